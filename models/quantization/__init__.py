"""Quantized weights: 8 or 4 bits per number, with scales.

`config` reads the quantization_config of config.json. `formats` and `mxfp4` read the checkpoint formats AWQ,
GPTQ, compressed-tensors, fp8 and MXFP4. `quantize` quantizes float weights to int8 or fp8 while they are
loaded. A weight matrix that stays quantized on the device is a `quantized_linear.QuantizedWeight`, which also
computes products. On a CPU, an engine replaces it by a `packed_weight.PackedWeight`, whose products are
faster. `models.weights` and `models.loading` use this package to load checkpoints; `models.layers` and
`models.moe.Experts` use it to compute products.
"""
