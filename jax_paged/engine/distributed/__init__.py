"""Executors whose devices belong to other processes, the workers. The engine's process does not import JAX.

`MultiprocessExecutor` (multiprocess.py) starts workers on this machine. `ExternalExecutor` (multiprocess.py)
uses processes that a launcher such as torchrun has started, and `RayExecutor` (ray_executor.py) uses actors
of Ray. All of them send their calls to the first worker through a `WorkerTeam` (worker_team.py), which ends
all workers if one is lost. engine/executors.py chooses the executor. The code that runs in the workers is in
worker/distributed/.
"""
