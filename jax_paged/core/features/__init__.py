"""Optional features of the scheduler.

lora.py assigns device slots to LoRA adapters, multi_step.py plans multi-step decoding, speculation/ plans
steps that verify draft tokens, beam_search.py selects beams, interactive/ edits requests and steps, and
snapshot.py saves and restores a scheduler. Except for snapshots, core/composition.py creates these features
and connects them with the scheduler. Apart from type annotations, no other module of core/ imports them.
While LoRA, multi-step decoding and speculative decoding are off, a plain request runs none of their code.
"""
