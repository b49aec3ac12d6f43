"""Optional features of the worker, one module or package per feature.

Features extend the forward pass (LoRA, hooks, prompt embeddings), the drawing of tokens (speculation, logits
processors), or run programs of their own around a step (encoders, pooling, prompt log-probabilities). They
are imported by jax_paged/worker/composition.py (loading), traced_features.py (traced steps), step_features.py
(host work in a step) and compilation/feature_set.py. FeatureRows holds their host state of each sequence.
"""
