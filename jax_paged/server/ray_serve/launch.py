"""Start-up and shutdown of Ray Serve on this machine."""

import contextlib
import logging
import signal
import sys
from collections.abc import Mapping

from jax_paged.config.engine_args import EngineArgs, api_key_of_environment
from jax_paged.errors import ArgumentError
from jax_paged.server.http.api_keys import with_all_keys
from jax_paged.server.http.listening import check_tls
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.launch.server import exit_on_value_error, free_address
from jax_paged.server.observability.logs import configure

_LOGGER = logging.getLogger(__name__)
# The object store only holds requests and parts of responses.
_OBJECT_STORE_BYTES = 100 * 2**20


def serve_with_ray(args: EngineArgs, options: ServerOptions) -> None:
    """Serves a model with several replicas until SIGINT or SIGTERM, then stops all processes it has started.

    It always starts a Ray cluster of its own on this machine, even if another one is running.

    Args:
        args: Model and limits of each engine.
        options: Options of the server and the number of replicas.

    Raises:
        SystemExit: If the address cannot be bound, or Ray, the model or an option cannot be used.
        KeyboardInterrupt: If Ctrl-C is pressed before the server listens.
    """
    configure(options.log_level, options.log_format)
    with exit_on_value_error():
        options = with_all_keys(options, api_key_of_environment())
        check_tls(options)
        host, port = free_address(options)
        try:
            from jax_paged.server.ray_serve.app import application  # Imported late because it needs Ray.
        except ImportError as error:
            sys.exit(f"jax-paged: {error}")
        application(args, options)  # Checks the arguments before Ray is started.
    import ray  # pyright: ignore[reportMissingImports]
    from ray import serve  # pyright: ignore[reportMissingImports]

    ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES)
    try:
        with exit_on_value_error():
            num_gpus = _check_room(args, options, ray.cluster_resources())
        if args.distributed_executor_backend == "ray":  # The engines' workers reserve the GPUs.
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
            f"Serving the OpenAI API at {scheme}://{address}/v1 with {options.ray} replicas. "
            "Press Ctrl-C to stop.",
            flush=True,
        )
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # replaces Ray's handler
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
        _LOGGER.warning("shutting down: waiting at most %g s for running requests", options.shutdown_timeout)
    finally:
        serve.shutdown()
        ray.shutdown()


def _check_room(args: EngineArgs, options: ServerOptions, resources: Mapping[str, float]) -> int:
    """Returns the number of GPUs for each replica, which is 0 on a machine without GPUs.

    Raises:
        ValueError: If there are not enough GPUs for all replicas, or without GPUs, fewer CPU cores than
            replicas.
    """
    kind = "GPU" if resources.get("GPU") else "CPU"
    each = args.num_engines * args.tensor_parallel_size if kind == "GPU" else 1
    num = int(resources.get(kind, 0))
    if (options.ray or 0) > num // each:
        allowed = f"at most {num // each} because there are {num} {kind}s and each replica needs {each}"
        raise ArgumentError("ray", options.ray, allowed)
    return each if kind == "GPU" else 0
