"""Sampling: from logits to tokens.

`SamplerOptions.sample` (sampler.py) is traced into every step. It chooses a token for each logits row from
the row's logits and its entry in a `SamplingBatch`. token_counts.py keeps the token counts for penalties on
the device. token_rules.py computes biases and token masks on the host; the batch builder sends them to the
device.
"""
