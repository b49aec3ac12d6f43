"""Configuration of an engine: the arguments a user passes, and the settings they resolve to.

`engine_args.EngineArgs` holds the user's arguments and checks them without JAX. The worker resolves them
against the model and the device to an `EngineConfig`. `speculative.SpeculativeConfig` configures speculative
decoding, `multimodal.ImageSettings` image inputs, and `launch.Launch` describes a process started by a
launcher such as torchrun.
"""
