"""The `jax-paged` commands: argument parsing, server start-up and the health check.

`cli.main` parses the command line and starts a command. `server.serve` loads the model and runs the server,
`health.check_health` checks a running server, and `options` has the dataclasses whose fields are the
command-line options. Ray Serve has its own start-up code in `ray_serve.launch`.
"""
