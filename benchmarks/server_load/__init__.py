"""Load tests of the server: `make bench-server`, or `python -m server_load [SCENARIO ...]`.

Each scenario in `scenarios` starts its own server (`client.serving`), sends requests with a small HTTP client
and returns measured values, some of them with an upper bound. `storm_clients` is a separate process of
clients. The command fails if a value exceeds its bound.
"""
