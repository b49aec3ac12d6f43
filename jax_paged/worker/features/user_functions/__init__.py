"""User-defined functions in the forward pass and in sampling: hooks and logits processors.

LogitsProcessor is a JAX function that is traced into the step, optionally with a state of each sequence
(SavedStates). host_processors runs vLLM's per-request logits processors, which are Python functions,
on the host. hook_captures transfers the values that hooks capture to the host; the hooks themselves are in
jax_paged/models/features/hooks.py.
"""
