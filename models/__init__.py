"""Model definitions in Flax NNX, and loading of checkpoints.

`weights.load_model` reads a checkpoint folder in Hugging Face layout and returns a `LoadedModel`. `registry`
maps the architecture names of config.json to the classes in `families/`. These derive from the base classes
in `causal_lm` and `encoder_decoder`. A decoder runs on a dense batch, `model(tokens)`, or over the paged KV
cache, `model.paged(tokens, kv_cache, metadata)`; `jax_paged.worker` compiles the paged call into its steps.

In docstrings, "float" without a width is the dtype of the model: float32 or bfloat16.
"""
