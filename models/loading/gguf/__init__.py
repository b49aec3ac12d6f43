"""Reading GGUF files, the format of llama.cpp.

`header` parses and checks the header of a file: metadata, and names, types and positions of tensors.
`hf_config` describes the model of a header as a config.json and a generation_config.json. `hf_tensors`
presents the tensors under the names that they have in safetensors files. `block_types` converts blocks of
quantized numbers to the arrays of a quantized weight.

Source: the GGUF specification of ggml (docs/gguf.md); layouts of blocks as in ggml's ggml-quants.c.
"""
