"""HTTP layer of the server: protocol, limits, authentication and event streams.

`listening.uvicorn_config` configures uvicorn with the connection protocol in `http_protocol`, which enforces
limits on headers and timeouts. `middleware.with_middleware` wraps the application with request ids, CORS and
API keys (`api_keys`). `limits` bounds the body and the fields of a request, and `event_stream` sends
server-sent events. Nothing here depends on what the routes do.
"""
