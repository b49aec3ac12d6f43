"""Starting Ray Serve on this machine, and ending it on a signal."""

import contextlib
import logging
import signal
import sys
from collections.abc import Mapping

from jax_paged.config.engine_args import EngineArgs, api_key_of_environment
from jax_paged.server.http.api_keys import with_all_keys
from jax_paged.server.http.listening import check_tls
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.launch.server import free_address, one_line_errors
from jax_paged.server.observability.logs import configure

_LOGGER = logging.getLogger(__name__)
# What goes through it is a request, or a part of an answer.
_OBJECT_STORE_BYTES = 100 * 2**20


def serve_with_ray(args: EngineArgs, options: ServerOptions) -> None:
    """Serves a model by several replicas until SIGINT or SIGTERM; nothing is left running then.

    The cluster is one of its own, on this machine, whatever others run here.

    Args:
        args: Model and limits of each engine.
        options: How to listen, what clients may do, and how many replicas there are.

    Raises:
        SystemExit: If the address can't be bound, or Ray, the model or a setting can't be used.
        KeyboardInterrupt: If Ctrl-C is pressed before the server listens.
    """
    configure(options.log_level, options.log_format)
    with one_line_errors():
        options = with_all_keys(options, api_key_of_environment())
        check_tls(options)
        host, port = free_address(options)
        try:
            from jax_paged.server.ray_serve.app import application  # only now: it needs Ray
        except ImportError as error:
            sys.exit(f"jax-paged: {error}")
        application(args, options)  # checks them
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES)
    try:
        with one_line_errors():
            num_gpus = _check_room(args, options, ray.cluster_resources())
        if args.distributed_executor_backend == "ray":  # its workers take them
            num_gpus = 0
        http = {
            "host": host,
            "port": port,
            "keep_alive_timeout_s": max(1, round(options.keep_alive_timeout)),
            **{name: getattr(options, name) for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")},
        }
        serve.start(proxy_location="HeadOnly", http_options=http)
        try:
            serve.run(application(args, options, num_gpus), name="jax-paged")
        except RuntimeError as error:
            sys.exit(f"jax-paged: {error}")
        scheme = "http" if options.ssl_certfile is None else "https"
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(
            f"Serving the OpenAI API at {scheme}://{address}/v1 by {options.ray} replicas. "
            "Press Ctrl-C to stop.",
            flush=True,
        )
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has put one of its own there
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        _LOGGER.warning("shutting down: running requests have %g s to end", options.shutdown_timeout)
    finally:
        serve.shutdown()
        ray.shutdown()


def _check_room(args: EngineArgs, options: ServerOptions, resources: Mapping[str, float]) -> int:
    """Returns how many GPUs each replica gets: those of all its engines, where there are any.

    Raises:
        ValueError: If there are too few for all replicas, or, where there are none, not a core for each.
    """
    kind = "GPU" if resources.get("GPU") else "CPU"
    each = args.num_engines * args.tensor_parallel_size if kind == "GPU" else 1
    num = int(resources.get(kind, 0))
    if (options.ray or 0) > num // each:
        allowed = f"up to {num // each} replicas, as there are {num} {kind}s and each takes {each}"
        raise ValueError(f"ray is {options.ray}; allowed: {allowed}")
    return each if kind == "GPU" else 0
