"""The engine: accepts requests, runs them step by step and returns their outputs. It runs on the host.

`LLMEngine` (llm_engine.py) is the synchronous engine. `LLM` uses it through `ListRunner` (list_runner.py).
`AsyncLLMEngine` (async_engine/) runs an `LLMEngine` in a thread for asyncio, and `ReplicatedEngine`
(replicas/) distributes requests over several of them; the server uses these two. Inside the engine,
`InputProcessor` checks requests, `EngineCore` runs steps, and `RequestState` (output_processor.py) turns new
tokens into outputs. An `Executor` computes the steps on the devices: LocalExecutor (worker/executor.py) in
this process, or an executor in distributed/ in worker processes. executors.py chooses it. composition.py
connects these parts with the features in features/. None of these modules imports JAX until an executor is
made.
"""
