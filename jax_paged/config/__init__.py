"""Configuration of an engine: the arguments a user passes, and the settings they resolve to.

`engine_args.EngineArgs` holds the user's arguments and checks them without JAX. The worker resolves them
against the model and the device to an `engine_config.EngineConfig`. Further classes are
`speculative.SpeculativeConfig` for speculative decoding, `multimodal.ImageSettings` for image inputs, and
`launch.Launch` for a process that torchrun or a similar launcher has started.
`cache_dir` returns the folders of cached files.
"""
