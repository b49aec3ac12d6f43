"""LoRA adapters and soft prompts.

`adapter_files.read_adapter` reads an adapter folder that PEFT has saved and checks that it fits the model.
`layers.LoraLayout` describes the arrays on the device that hold the adapters of all slots.
`layers.row_functions` returns the functions that apply them in a forward pass; `jax_paged.worker` passes
these to `ForwardContext.output_edits`.
"""
