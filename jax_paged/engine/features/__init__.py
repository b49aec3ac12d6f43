"""Optional features of the engine, one module or package per feature.

A feature that adds methods to LLMEngine is a subclass of EngineFeature. Other features check parts of a
request (images, LoRA adapters, grammars) or extend a step (token masks, adapter weights). Of the engine's
other modules, only jax_paged/engine/composition.py imports features at run time. It combines them into an
engine. Features do not import JAX: their device side is in jax_paged/worker/features.
"""
