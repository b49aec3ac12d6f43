"""Monitoring of the server: logs, access log, Prometheus metrics and the state for the status page.

`logs.configure` sets up logging. `access.AccessLog` is the outermost ASGI middleware; it creates a
`RequestRecord` for each HTTP request. `metrics.Metrics` counts requests and reads the engine for GET
/metrics, and `state.State` makes the snapshot for the status page. None of them changes the engine.
"""
