"""Model families: one file per architecture, or per group of similar architectures, in Flax NNX.

A class has the name of its Hugging Face architecture. `models/registry.py` maps these names to files, and
imports a file when its model is loaded. Most decoders derive from `llama.py`, and override the parts of the
config and the layer that differ; `blocks.py` has parts that several of them share. `encoder.py` and
`decoder_poolers.py` are embedding models and classifiers, `t5.py` is an encoder-decoder model. `siglip.py`
and `qwen3_vision.py` are image encoders, and `eagle.py` has the heads for EAGLE-3 speculative decoding. The
base classes are in `models/causal_lm.py`.
"""
