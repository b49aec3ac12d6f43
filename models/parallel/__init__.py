"""Tensor parallelism, expert parallelism and pipeline parallelism of models.

In `sharding`, a `Split` describes how the dimensions of a weight are divided, and a `DeviceGrid` applies it
to the devices that share a model. Layers create their weights with a split, `models.loading` reads each
device's part of the weights, and `ForwardContext.grid` makes the devices available in a forward pass.
`stages.split_model` divides a decoder into pipeline stages.
"""
