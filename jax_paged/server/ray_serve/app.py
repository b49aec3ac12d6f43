"""The application of Ray Serve: an ingress, and replicas of the server behind it."""

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
from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.api_keys import with_all_keys
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.launch.server import load_engine
from jax_paged.server.observability.logs import configure
from jax_paged.server.ray_serve.continuation import ReplicaCall, ReplicaLostError, ResponsePart, ResponseStart
from jax_paged.server.ray_serve.ingress import Answering, Ingress
from jax_paged.server.ray_serve.replica import Replica

try:
    from ray import serve  # pyright: ignore[reportMissingImports]
    from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]
    from ray.serve.config import RequestRouterConfig  # pyright: ignore[reportMissingImports]
    from ray.serve.exceptions import RayServeException  # pyright: ignore[reportMissingImports]

    from jax_paged.server.ray_serve.router import PrefixRouter
except ModuleNotFoundError as error:
    raise ImportError(f"{error}; Ray Serve comes with: pip install 'jax-paged[ray]'") from error

# How long a replica may take to say that it has got a request; it answers later.
_ACCEPT_S = 5.0
_HEALTH_PERIOD_S = 1.0
# A replica that is alive but busy must not count as dead.
_HEALTH_TIMEOUT_S = 5.0
# Those that wait do so in the replicas, where clients take turns, and too many are refused.
_NO_LIMIT = 1_000_000
_NUM_SEATS = 64


def build(args: dict[str, Any]) -> serve.Application:
    """Returns the application for `serve deploy`, `serve run` or serve.run.

    Args:
        args: Fields of EngineArgs and of ServerOptions by their names. How many replicas there are, on what,
            and how their number follows the load is for Serve's own settings of the deployment "Replica".

    Raises:
        ValueError: If a name is unknown, a value can't be used, or there is no key and nothing says that none
            is wanted: where Serve listens is not known here.
    """
    fields = {field.name for kind in (EngineArgs, ServerOptions) for field in dataclasses.fields(kind)}
    for name in args.keys() - fields:
        allowed = f"the fields of EngineArgs and of ServerOptions{suggestion(name, fields)}"
        raise ValueError(f"args has {name!r}; allowed: {allowed}")
    values = argparse.Namespace(**args)
    options = with_all_keys(ServerOptions.from_cli_args(values), api_key_of_environment())
    if not (options.api_key or options.allow_unauthenticated):
        raise ValueError(
            "api_key_file is None; allowed: a file of keys (or JAX_PAGED_API_KEY), or allow_unauthenticated"
        )
    return application(EngineArgs.from_cli_args(values), options)


def application(args: EngineArgs, options: ServerOptions, num_gpus: int = 0) -> serve.Application:
    """Returns the application of Serve.

    Args:
        args: Model and limits of each engine.
        options: What clients may do, with all keys; and how many replicas there are.
        num_gpus: Of each replica.

    Raises:
        ValueError: If an option would reach one replica alone.
    """
    for name in ("developer_routes", "allow_runtime_lora_updating"):
        if getattr(options, name):
            raise ValueError(f"{name} is True; allowed with Ray: False, as a call reaches one replica of all")
    # The page shows one engine.
    options = dataclasses.replace(options, ui=False)
    router: dict[str, Any] = {
        "request_router_class": PrefixRouter,
        "request_router_kwargs": {"num_seats": args.max_num_seqs or _NUM_SEATS},
    }
    replicas = serve.deployment(
        name="Replica",
        num_replicas=options.ray or 1,
        max_ongoing_requests=_NO_LIMIT,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": 1, "num_gpus": num_gpus},
        request_router_config=RequestRouterConfig(**router),
    )(_Replica)
    ingress = serve.deployment(
        name="Ingress",
        max_ongoing_requests=_NO_LIMIT,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        ray_actor_options={"num_cpus": 0},
    )(_Ingress)
    return ingress.bind(replicas.bind(args, options), options)


class _Replica:
    """A server without a port; an actor of Ray's.

    Args:
        args: Model and limits of its engine.
        options: What clients may do.
    """

    def __init__(self, args: EngineArgs, options: ServerOptions) -> None:
        configure(options.log_level, options.log_format)
        name = options.served_model_name or args.model
        self._replica = Replica(OpenAIServer(load_engine(args, options), name, options))

    def check_health(self) -> None:
        """Raises ReplicaLostError if the engine has stopped or hangs: Serve then replaces this replica."""
        self._replica.check()

    async def answer(self, call: ReplicaCall) -> AsyncGenerator[ResponseStart | ResponsePart | None]:
        """Answers a request; None, which comes first, says that it has come."""
        yield None
        async with contextlib.aclosing(self._replica.answer(call)) as parts:
            async for part in parts:
                yield part


class _Ingress:
    """Where requests come in; an actor of Ray's.

    Args:
        replicas: Serve's handle of them.
        options: Theirs.
    """

    def __init__(self, replicas: Any, options: ServerOptions) -> None:
        configure(options.log_level, options.log_format)
        self._replicas = replicas.options(stream=True)
        self._ingress = Ingress(self._send, self._count, options.max_body_bytes)

    async def __call__(self, request: Request) -> Response:
        """Answers a request."""
        response = await self._ingress.answer(request)
        del response.headers["x-request-id"]  # Serve puts the same one there
        return response

    async def _send(self, call: ReplicaCall) -> Answering:
        parts = self._replicas.answer.remote(call)
        try:
            async with asyncio.timeout(_ACCEPT_S):
                await anext(parts)
            async for part in parts:
                yield part
        except TimeoutError as error:
            raise ReplicaLostError(f"no replica has taken the request within {_ACCEPT_S:g} s") from error
        except ReplicaLostError as error:  # as a replica has raised it, with a traceback for a text
            raise ReplicaLostError(str(getattr(error, "cause", error))) from error
        except RayTaskError:
            raise
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        finally:
            parts.cancel()

    async def _count(self) -> tuple[int, int]:
        """Returns how many replicas run, and how many there are or will be."""
        name = serve.get_replica_context().app_name
        status = await asyncio.to_thread(serve.status)
        states = status.applications[name].deployments["Replica"].replica_states
        counts = {str(getattr(state, "value", state)): num for state, num in states.items()}
        return counts.get("RUNNING", 0), sum(counts.values()) - counts.get("STOPPING", 0)
