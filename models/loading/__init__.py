"""Reading weights from checkpoint files onto devices.

`stored_tensors` reads the headers of safetensors files and maps the tensors into memory. `weight_reading`
compares the tensors with the weights of a model (`check_stored`) and reads them (`read_weights`);
`models.weights` uses it to load a model. `new_weights.with_weights` replaces the weights of a model that is
being served, for example after a training step. `eagle_checkpoint.load_head` loads EAGLE-3 heads for
speculative decoding. `pretrained` downloads models that have a short name, such as "smollm2". The package
`gguf` presents a GGUF file as a folder of safetensors files.
"""
