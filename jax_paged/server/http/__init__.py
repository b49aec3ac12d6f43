"""HTTP layer of the server: protocol, limits, authentication and event streams.

`listening.uvicorn_config` configures uvicorn with the connection protocol in `http_protocol`, which enforces
timeouts and limits on headers. `middleware.with_middleware` wraps the application with request ids, CORS and
API keys (`api_keys`). `limits` bounds the body and the fields of a request, and `event_stream` sends
server-sent events. Only `api_keys.OPEN_PATHS` and `limits.check_sizes` depend on particular routes or fields.
"""
