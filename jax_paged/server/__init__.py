"""HTTP server with the OpenAI API, and the `jax-paged` command line.

`launch.cli.main` is the command line and `app.OpenAIServer` the ASGI application. A request passes the
middleware and limits in `http`, is parsed by the models in `protocol`, and is handled by a class in `routes`,
which runs it on the engine through `streaming.RequestRunner`. `run_batch` runs a file of requests through the
same application without a network. `ray_serve` runs several replicas of the server with Ray Serve.

The server uses the engine only through `AsyncLLMEngine` or `ReplicatedEngine`. It does not import JAX.
"""
