"""Lifecycle of the server: accepting requests, graceful shutdown, and failure of the engine."""

import contextlib
import logging
from collections.abc import Collection, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.server.http.paths import route_path
from jax_paged.server.protocol.responses import ApiError, asleep_error
from jax_paged.server.waiting_queue import WaitingQueue

# Exit statuses of the process.
DRAINED = 0
REQUESTS_ABORTED = 3
ENGINE_FAILED = 4

# Time (seconds) that clients have to read the last event of their streams before the server ends.
_FINAL_EVENT_S = 2
_LOGGER = logging.getLogger(__name__)


class Lifecycle:
    """State of the server, from accepting requests to its end.

        running --signal--> draining --all answered, timeout or second signal--> ended
           |                                                                       ^
           +--the engine fails or hangs--> failed ---------------------------------+

    The owner calls `tick` several times per second, and ends the server when it returns True.

    Args:
        engine: The engine to watch. It is stopped when requests are aborted.
        shutdown_timeout: Time (seconds) that running requests have to finish after a signal.
        step_timeout: Time (seconds) after which a step of the engine is considered hung.
        stay: Whether the server keeps running after the engine has failed, and responds to requests with the
            failure.

    Attributes:
        num_active: Number of requests whose response is not complete.
        is_draining: Whether the server is shutting down and rejects new requests.
        exit_code: Exit status for the process.
    """

    def __init__(
        self, engine: ServingEngine, *, shutdown_timeout: float, step_timeout: float, stay: bool
    ) -> None:
        self.num_active = 0
        self.is_draining = False
        self._engine = engine
        self._shutdown_timeout = shutdown_timeout
        self._step_timeout = step_timeout
        self._stay = stay
        self._abort_time: float | None = None  # time.monotonic() when running requests are aborted
        # time.monotonic() when the server ends, even if clients are still reading
        self._end_time: float | None = None
        self.exit_code = DRAINED

    def rejection(self) -> ApiError | None:
        """Returns the error for new requests while none are accepted; None while requests are accepted."""
        if self.is_draining:
            return ApiError(
                "the server is shutting down", status=503, code="shutting_down", headers={"Retry-After": "1"}
            )
        stopped, asleep = self._engine.stopped_error, self._engine.asleep_error
        if stopped is not None:
            return ApiError(str(stopped), status=503)
        return None if asleep is None else asleep_error(asleep)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Counts a request as active within the context."""
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    def end(self, now: float) -> None:
        """Starts the shutdown. A second call aborts the requests that are still running.

        Args:
            now: The current value of time.monotonic() (seconds).
        """
        if not self.is_draining:
            self.is_draining = True
            self._abort_time = now + self._shutdown_timeout
            if self.num_active:
                _LOGGER.warning(
                    "shutting down: waiting at most %g s for %d requests; a second signal aborts them",
                    self._shutdown_timeout,
                    self.num_active,
                )
        elif self._end_time is None:
            self._abort_time = now

    def tick(self, now: float) -> bool:
        """Checks the engine and the timeouts, and returns whether the server should end now.

        Args:
            now: The current value of time.monotonic() (seconds).

        Returns:
            True if the server should end now.
        """
        self._watch(now)
        is_due = self._abort_time is not None and now >= self._abort_time
        if is_due and self._end_time is None and self.num_active:
            _LOGGER.warning("shutting down: aborting %d running requests", self.num_active)
            self.exit_code = self.exit_code or REQUESTS_ABORTED
            self._end_time = now + _FINAL_EVENT_S
            self._engine.fail(EngineDeadError("the server is shutting down"))
        is_over = self._end_time is not None and now >= self._end_time
        return is_over or (self.is_draining and not self.num_active)

    def _watch(self, now: float) -> None:
        if self.exit_code == ENGINE_FAILED or self._end_time is not None:
            return
        began = self._engine.step_began
        if began is not None and now - began > self._step_timeout:
            _LOGGER.error(
                "an engine step takes more than %g s; stack:\n%s", self._step_timeout, self._engine.stack()
            )
            self._engine.fail(
                EngineDeadError(
                    f"the engine hangs: a step has taken more than {self._step_timeout:g} s (--step-timeout)"
                )
            )
        if (stopped := self._engine.stopped_error) is not None:
            self._engine.fail(stopped)  # Stops the other engines too, if there are several.
            self.exit_code = ENGINE_FAILED
            if not self._stay:
                self._end_time = now + _FINAL_EVENT_S


class Gate:
    """ASGI middleware that rejects requests before their body is read, and counts the accepted ones.

    A POST request for one of `paths` is rejected with status 503 while the server does not accept requests,
    and with status 429 if too many requests are waiting. Other requests pass, unless their path has
    unprintable characters, which is status 404.

    Args:
        app: The next ASGI application.
        lifecycle: Decides whether requests are accepted, and counts the active ones.
        waiting_queue: Decides whether another request may wait.
        paths: Paths of the routes that run the model.
    """

    def __init__(
        self, app: ASGIApp, lifecycle: Lifecycle, waiting_queue: WaitingQueue, paths: Collection[str]
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._waiting_queue = waiting_queue
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        path = route_path(scope) if scope["type"] == "http" else ""
        if not path.isprintable():  # Starlette's routes would ignore a line break at the end of the path.
            error = ApiError("the path must contain only printable characters", status=404)
            await error.response()(scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] != "POST" or path not in self._paths:
            await self._app(scope, receive, send)
            return
        journal = scope.get("state", {}).get("journal")
        # Another replica has begun the response, so the request must not be rejected because the queue is
        # full.
        has_begun = journal is not None and journal.has_begun
        error = self._lifecycle.rejection() or (None if has_begun else self._waiting_queue.rejection())
        if error is not None:
            await error.response()(scope, receive, send)
            return
        with self._lifecycle.active():
            await self._app(scope, receive, send)
