"""LoRA adapters of an engine, on the host.

Adapters reads adapters and keeps them in host memory. LoRAMethods adds `add_lora`, `remove_lora` and
`list_loras` to LLMEngine. `with_adapters` adds the weights of newly loaded adapters to a step. The
scheduler's core/features/lora.py assigns adapters to slots, and worker/features/lora.py writes them to the
device.
"""
