"""Optional features of models: hooks, LoRA adapters and pooling.

`hooks` applies user functions to the outputs of modules. `lora` reads adapters and applies them to linear
maps. `pooling` reads from a checkpoint how hidden states become embeddings or class scores.
`jax_paged.worker` passes hooks and adapters to a forward pass through `ForwardContext.hooks` and
`ForwardContext.output_edits`. A request without these features does not use this package.
"""
