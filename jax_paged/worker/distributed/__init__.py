"""Workers: processes that own the devices of an engine with several processes.

The engine's process starts worker processes or connects to them, and calls the executor methods of worker 0,
the leader. The leader runs a LocalExecutor and sends each program with its arguments to the other workers,
the followers, which run it on their devices. `process.main` runs a worker, `handshake` connects the workers,
`channel.Channel` carries their messages, and `process_group.ProcessGroup` is the interface through which
ModelRunner uses the other processes.
"""
