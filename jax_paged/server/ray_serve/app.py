"""Ray Serve application: an ingress deployment and a deployment of server replicas."""

import argparse
import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from jax_paged.arguments.suggestions import suggestion
from jax_paged.config.engine_args import EngineArgs, api_key_of_environment
from jax_paged.errors import ArgumentError
from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.api_keys import with_all_keys
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.launch.server import load_engine
from jax_paged.server.observability.logs import configure
from jax_paged.server.ray_serve.continuation import ReplicaCall, ReplicaLostError, ResponsePart, ResponseStart
from jax_paged.server.ray_serve.ingress import Ingress, ResponseStream
from jax_paged.server.ray_serve.replica import Replica

try:
    from ray import serve  # pyright: ignore[reportMissingImports]
    from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]
    from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
    from ray.serve.exceptions import RayServeException  # pyright: ignore[reportMissingImports]

    from jax_paged.server.ray_serve.router import PrefixRouter
except ModuleNotFoundError as error:
    raise ImportError(f"{error}; install Ray Serve with: pip install 'jax-paged[ray]'") from error

# Time (seconds) in which a replica must accept a request. Its response may take longer.
_ACCEPT_S = 5.0
_HEALTH_PERIOD_S = 1.0
# Long enough that a busy replica is not considered dead.
_HEALTH_TIMEOUT_S = 5.0
# Ray Serve does not limit requests. They wait in the replicas, where clients take turns and excess requests
# are rejected.
_MAX_ONGOING = 1_000_000
# Number of requests that an engine is assumed to run at once if max_num_seqs is not set.
_NUM_SLOTS = 64


def build(args: dict[str, Any]) -> serve.Application:
    """Returns the application for `serve deploy`, `serve run` or serve.run.

    Args:
        args: Fields of EngineArgs and ServerOptions by name. The number of replicas, their resources and
            their autoscaling are settings of Ray Serve for the deployment "Replica".

    Raises:
        ValueError: If a name is unknown or a value is invalid, or if there is no API key and
            allow_unauthenticated is not set. The address is configured in Ray Serve, so a key is required
            even if it is a loopback address.
    """
    fields = {field.name for kind in (EngineArgs, ServerOptions) for field in dataclasses.fields(kind)}
    for name in args.keys() - fields:
        allowed, remedy = "a field of EngineArgs or ServerOptions", suggestion(name, fields)
        raise ArgumentError("args", name, allowed, aspect="each name in", remedy=remedy)
    values = argparse.Namespace(**args)
    options = with_all_keys(ServerOptions.from_cli_args(values), api_key_of_environment())
    if not (options.api_key or options.allow_unauthenticated):
        allowed = "a file of API keys unless JAX_PAGED_API_KEY or allow_unauthenticated is set"
        raise ArgumentError("api_key_file", None, allowed)
    return application(EngineArgs.from_cli_args(values), options)


def application(args: EngineArgs, options: ServerOptions, num_gpus: int = 0) -> serve.Application:
    """Returns the application for Ray Serve.

    Args:
        args: Model and limits of each engine.
        options: Options of the server, with the API keys from all sources and the number of replicas.
        num_gpus: Number of GPUs of each replica.

    Raises:
        ValueError: If an option is set that would affect only one replica.
    """
    for name in ("developer_routes", "allow_runtime_lora_updating"):
        if getattr(options, name):
            raise ArgumentError(name, True, "False with Ray because a call reaches only one replica")
    # The status page shows only one engine.
    options = dataclasses.replace(options, ui=False)
    router: dict[str, Any] = {
        "request_router_class": PrefixRouter,
        "request_router_kwargs": {"num_slots": (args.max_num_seqs or _NUM_SLOTS) * args.num_engines},
    }
    replicas = serve.deployment(
        name="Replica",
        num_replicas=options.ray or 1,
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": 1, "num_gpus": num_gpus},
        request_router_config=RequestRouterConfig(**router),
    )(_Replica)
    ingress = serve.deployment(
        name="Ingress",
        max_ongoing_requests=_MAX_ONGOING,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        ray_actor_options={"num_cpus": 0},
    )(_Ingress)
    return ingress.bind(replicas.bind(args, options), options)


class _Replica:
    """Ray actor with a server that has no port.

    Args:
        args: Model and limits of the engine.
        options: Options of the server.
    """

    def __init__(self, args: EngineArgs, options: ServerOptions) -> None:
        configure(options.log_level, options.log_format)
        name = options.served_model_name or args.model
        self._replica = Replica(OpenAIServer(load_engine(args, options), name, options))

    def check_health(self) -> None:
        """Raises ReplicaLostError if the engine has stopped or hangs. Ray Serve then replaces the replica."""
        self._replica.check()

    async def answer(self, call: ReplicaCall) -> AsyncGenerator[ResponseStart | ResponsePart | None]:
        """Yields None to confirm that the request has arrived, and then the parts of its response."""
        yield None
        async with contextlib.aclosing(self._replica.answer(call)) as parts:
            async for part in parts:
                yield part


class _Ingress:
    """Ray actor that receives HTTP requests.

    Args:
        replicas: Ray Serve's handle of the replicas.
        options: Options of the server.
    """

    def __init__(self, replicas: Any, options: ServerOptions) -> None:
        configure(options.log_level, options.log_format)
        self._replicas = replicas.options(stream=True)
        self._ingress = Ingress(self._send, self._count, options.max_body_bytes)

    async def __call__(self, request: Request) -> Response:
        """Handles one HTTP request."""
        response = await self._ingress.answer(request)
        del response.headers["x-request-id"]  # Ray Serve adds the same header.
        return response

    async def _send(self, call: ReplicaCall) -> ResponseStream:
        parts = self._replicas.answer.remote(call)
        try:
            async with asyncio.timeout(_ACCEPT_S):
                await anext(parts)
            async for part in parts:
                yield part
        except TimeoutError as error:
            raise ReplicaLostError(f"no replica accepted the request within {_ACCEPT_S:g} s") from error
        except ReplicaLostError as error:  # The replica has raised it; Ray adds a traceback to its text.
            raise ReplicaLostError(str(getattr(error, "cause", error))) from error
        except RayTaskError:
            raise
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        finally:
            parts.cancel()

    async def _count(self) -> tuple[int, int]:
        """Returns the number of running replicas and the number of replicas that should run."""
        name = serve.get_replica_context().app_name
        status = await asyncio.to_thread(serve.status)
        states = status.applications[name].deployments["Replica"].replica_states
        counts = {str(getattr(state, "value", state)): num for state, num in states.items()}
        return counts.get("RUNNING", 0), sum(counts.values()) - counts.get("STOPPING", 0)
