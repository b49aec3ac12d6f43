"""Lifecycle of the server: draining, failure of the engine, refusals meanwhile, and the exit status."""

import contextlib
import logging
from collections.abc import Collection, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.server.http.paths import route_path
from jax_paged.server.protocol.responses import ApiError, asleep_error
from jax_paged.server.waiting_queue import WaitingQueue

# Exit statuses.
DRAINED = 0
REQUESTS_CUT_OFF = 3
ENGINE_FAILED = 4

# How long clients have to read the last event of their streams.
_LAST_WORDS_S = 2
_LOGGER = logging.getLogger(__name__)


class Lifecycle:
    """State of the server: whether it takes requests. `tick` is called several times a second.

        running --signal--> draining --all answered, timeout, second signal--> ended
           |                                                                     ^
           +--the engine fails or hangs--> failed -------------------------------+

    Args:
        engine: Watched; stopped when requests are cut off.
        shutdown_timeout: Seconds that running requests have to end once the server drains.
        step_timeout: Seconds after which a step of the engine counts as hung.
        stay: Whether a server whose engine has failed goes on to answer that it has.
    """

    def __init__(
        self, engine: ServingEngine, *, shutdown_timeout: float, step_timeout: float, stay: bool
    ) -> None:
        self.num_active = 0  # requests whose answer is not complete
        self.is_draining = False
        self._engine = engine
        self._shutdown_timeout = shutdown_timeout
        self._step_timeout = step_timeout
        self._stay = stay
        self._cuts_at: float | None = None  # when the requests that still run are cut off
        self._ends_at: float | None = None  # when the server ends, whoever still reads
        self.exit_code = DRAINED  # of the process

    def refusal(self) -> ApiError | None:
        """Returns what a new request is answered while none are taken, or None."""
        if self.is_draining:
            return ApiError(
                "the server is shutting down", status=503, code="shutting_down", headers={"Retry-After": "1"}
            )
        stopped, asleep = self._engine.stopped, self._engine.asleep
        if stopped is not None:
            return ApiError(str(stopped), status=503)
        return None if asleep is None else asleep_error(asleep)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Counts a request while it is answered."""
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1

    def end(self, now: float) -> None:
        """Begins to end the server; a second call cuts off what still runs.

        Args:
            now: Seconds of time.monotonic.
        """
        if not self.is_draining:
            self.is_draining = True
            self._cuts_at = now + self._shutdown_timeout
            if self.num_active:
                _LOGGER.warning(
                    "shutting down: %d running requests have %g s to end; a second signal cuts them off",
                    self.num_active,
                    self._shutdown_timeout,
                )
        elif self._ends_at is None:
            self._cuts_at = now

    def tick(self, now: float) -> bool:
        """Watches the engine and the clock.

        Args:
            now: Seconds of time.monotonic.

        Returns:
            Whether the server ends now.
        """
        self._watch(now)
        if self._cuts_at is not None and now >= self._cuts_at and self._ends_at is None and self.num_active:
            _LOGGER.warning("shutting down: %d requests are cut off", self.num_active)
            self.exit_code = self.exit_code or REQUESTS_CUT_OFF
            self._ends_at = now + _LAST_WORDS_S
            self._engine.fail(EngineDeadError("the server is shutting down"))
        is_over = self._ends_at is not None and now >= self._ends_at
        return is_over or (self.is_draining and not self.num_active)

    def _watch(self, now: float) -> None:
        if self.exit_code == ENGINE_FAILED or self._ends_at is not None:
            return
        began = self._engine.step_began
        if began is not None and now - began > self._step_timeout:
            _LOGGER.error(
                "a step of the engine takes more than %g s, in\n%s", self._step_timeout, self._engine.stack()
            )
            self._engine.fail(
                EngineDeadError(
                    f"the engine hangs: a step takes more than {self._step_timeout:g} s (--step-timeout)"
                )
            )
        if (stopped := self._engine.stopped) is not None:
            self._engine.fail(stopped)  # the other engines, if there are several
            self.exit_code = ENGINE_FAILED
            if not self._stay:
                self._ends_at = now + _LAST_WORDS_S


class Gate:
    """Refuses requests before they are read, and counts those that are let through.

    Args:
        app: The application behind.
        lifecycle: Refuses all while the server ends.
        waiting_queue: Refuses those that would have to wait where too many wait already.
        paths: Of the routes that generate text; all others pass.
    """

    def __init__(
        self, app: ASGIApp, lifecycle: Lifecycle, waiting_queue: WaitingQueue, paths: Collection[str]
    ) -> None:
        self._app = app
        self._lifecycle = lifecycle
        self._waiting_queue = waiting_queue
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        path = route_path(scope) if scope["type"] == "http" else ""
        if not path.isprintable():  # routes would take a path with a line break at its end for one without
            error = ApiError("no path here has control characters", status=404)
            await error.response()(scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] != "POST" or path not in self._paths:
            await self._app(scope, receive, send)
            return
        journal = scope.get("state", {}).get("journal")
        has_begun = journal is not None and journal.has_begun  # elsewhere: it is refused no more
        error = self._lifecycle.refusal() or (None if has_begun else self._waiting_queue.refusal())
        if error is not None:
            await error.response()(scope, receive, send)
            return
        with self._lifecycle.active():
            await self._app(scope, receive, send)
