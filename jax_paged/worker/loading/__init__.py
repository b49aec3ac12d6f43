"""Loading of a model onto its devices, and the choice of settings that fit the model and the devices.

`load` and `ServedWeights` (weights.py) read, divide, pack and replace weights. `resolve_config` turns
EngineArgs and the properties of the loaded model into an EngineConfig. `choose_backend` (kernel_check.py)
chooses the attention backend, `choose_matmul_backend` (mesh.py) the backend of matrix products, and
`device_grids` (mesh.py) the devices. `CustomComponents` holds a model and functions that the caller provides.
ServedModel uses all of them when an engine starts.
"""
