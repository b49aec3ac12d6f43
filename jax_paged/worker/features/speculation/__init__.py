"""Speculative decoding on the device: drafters, and the verification of draft tokens.

A Drafter proposes draft tokens inside the step that verifies them: DraftModel with a smaller model,
EagleDrafter with an EAGLE-3 head. `load_drafter` loads either of them. The functions in verification.py call
the drafter in a traced step and accept draft tokens. N-gram drafts are found on the host
(jax_paged/core/features/speculation) and use the same verification.
"""
