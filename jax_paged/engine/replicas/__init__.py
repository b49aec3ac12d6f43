"""Several engines with the same weights, and requests that move from one engine to another.

`ReplicatedEngine` (replicated_engine.py) distributes the server's requests over several `AsyncLLMEngine`s;
`serving_engine` makes it, or a single engine, from the arguments. `Placement` (placement.py) chooses the
engine of each request, for `ReplicatedEngine` and for `ListRunner` (engine/list_runner.py). `PriorOutput`
(prior_outputs.py) holds the output of a request that another engine has begun. With Ray Serve, the server
uses it to continue the requests of a replica that was lost.
"""
