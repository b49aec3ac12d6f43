"""Pooling on the device: embeddings, classification logits and scores instead of generated tokens.

For models with a KV cache, `plan_pooling` selects the hidden states of a step that are pooled, and
PoolProgram computes their weighted sums. For encoder-only models, EncoderRunner replaces ModelRunner and
computes whole texts. The host side is jax_paged/engine/features/pooling.py.
"""
