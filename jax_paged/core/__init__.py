"""The scheduler: decides which sequences run in each step and which KV cache blocks they hold.

Entry points: `Scheduler` (scheduler.py) schedules steps and takes in their results, `BlockManager`
(block_manager.py) allocates the blocks, and `SequenceGroup` (request.py) is a request with its scheduling
state. `SchedulerOutput` and `ModelRunnerOutput` are the messages between scheduler and executor. The engine
adds requests and runs the loop of schedule, execute and update; `worker/` executes the steps.

This package does not compute with arrays and does not import JAX or NumPy. It reads no clock: callers pass
the time. Optional features are in features/ and are connected in composition.py. replicas/ chooses one of
several engines for a request.
"""
