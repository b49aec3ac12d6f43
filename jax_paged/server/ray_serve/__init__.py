"""Several replicas of the server with Ray Serve.

`launch.serve_with_ray` starts Ray Serve on this machine (`--ray`), and `app.build` returns the application
for other clusters. `ingress.Ingress` receives HTTP requests and sends them to replicas, which
`router.PrefixRouter` selects by conversation and load. `replica.Replica` wraps the ASGI application of the
server. If a replica fails, the ingress sends the request to another one together with its
`continuation.Progress`, and a stream continues. Only `app`, `router` and `launch` need Ray.
"""
