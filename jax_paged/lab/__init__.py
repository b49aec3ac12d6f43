"""Tools to study an engine: simulation, recording and replay, and drawings for notebooks.

`simulator.simulate` runs the scheduler on a trace of requests without a model. `recording.replay` replays the
recorded steps of an engine, with the same scheduler or another one. `pool_map`, `page_table`, `movie`,
`timeline` and `latency` draw KV cache blocks, steps and request latencies. The tools use the scheduler in
core/ directly and need no JAX. LLMEngine calls some of them, for example in its method `pool_map`.
"""
