"""Device side of the engine: model weights, KV cache, compiled step programs and sampling.

`executor.py` is the entry point. `Executor` is the interface that the engine calls, and `LocalExecutor`
implements it in this process with a `ModelRunner`. The runner turns each SchedulerOutput into arrays
(`InputBatch`, `BatchBuilder`), runs the compiled step (`traced_step.py`) and returns a ModelRunnerOutput
(`step_result.py`). Only this package, `models/` and `pallas_kernels/` import JAX. The scheduler and the HTTP
server exchange plain values with this package.
"""
