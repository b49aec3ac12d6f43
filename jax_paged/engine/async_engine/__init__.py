"""The engine for asyncio, on which the server runs requests.

`AsyncLLMEngine` (engine.py) runs an `LLMEngine` in a thread of its own. Its methods for requests, such as
`submit`, `generate` and `encode`, are in `RequestMethods` (request_methods.py), which `ReplicatedEngine`
shares. A `RequestStream` (request_stream.py) delivers the outputs of one request to an event loop.
`EngineStatistics` (statistics.py) has the counters that the server's metrics and logs read.
"""
