"""Access log: one log line and one count per HTTP request, after it and its engine requests have ended."""

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jax_paged.outputs import RequestOutput
from jax_paged.server.http.paths import route_path
from jax_paged.server.observability.logs import printable
from jax_paged.server.observability.metrics import Metrics, finish_reason
from jax_paged.server.protocol.responses import num_prompt_tokens

_LOGGER = logging.getLogger(__name__)
# Routes that monitoring systems and the status page poll. They are logged at the level "debug".
_POLLED = ("/health", "/metrics", "/ready", "/ping", "/ui/state")
_CLIENT_DISCONNECTED = 499


class RequestRecord:
    """Record of the engine requests of one HTTP request.

    Args:
        on_end: Called once, when the HTTP request and all of its engine requests have ended.

    Attributes:
        num_requests: Number of engine requests, one per prompt.
        num_prompt_tokens: Prompt tokens of the engine requests that have ended.
        num_cached_tokens: Prompt tokens that were found in the prefix cache.
        num_output_tokens: Generated tokens of all outputs.
        queue_s: Longest time (seconds) from arrival until a request was first scheduled; None if none was.
        first_token_s: Shortest time (seconds) from arrival to a first token; None if there was none.
        finish_reasons: The distinct finish reasons, as keys of a dict to keep their order.
    """

    def __init__(self, on_end: Callable[["RequestRecord"], None]) -> None:
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.queue_s: float | None = None
        self.first_token_s: float | None = None
        self.finish_reasons: dict[str, None] = {}
        self._on_end = on_end
        self._num_open = 1  # counts the HTTP request itself

    def begin(self) -> None:
        """Records the start of an engine request."""
        self.num_requests += 1
        self._num_open += 1

    def record_result(self, output: RequestOutput, num_tokens: list[int]) -> None:
        """Records the final state of an engine request.

        Args:
            output: Last output of the request.
            num_tokens: Number of generated tokens of each output.
        """
        times = output.metrics
        self.num_prompt_tokens += num_prompt_tokens(output)
        self.num_cached_tokens += output.num_cached_tokens
        self.num_output_tokens += sum(num_tokens)
        self.finish_reasons[finish_reason(output)] = None
        if times.first_scheduled_time is not None:
            self.queue_s = max(self.queue_s or 0.0, times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is not None:
            seconds = times.first_token_time - times.arrival_time
            self.first_token_s = seconds if self.first_token_s is None else min(self.first_token_s, seconds)

    def end(self) -> None:
        """Records the end of the HTTP request or of one of its engine requests."""
        self._num_open -= 1
        if not self._num_open:
            self._on_end(self)


class AccessLog:
    """ASGI middleware that gives each HTTP request a record, and counts and logs its response.

    Args:
        app: The next ASGI application.
        metrics: Counts the responses.
        paths: Paths of the application's routes. A request that was rejected before routing is counted under
            its path if that is one of them, and under "other" if not.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The inner middleware changes its scope. The copy keeps the original path for the log, and leaves the
        # scope of an application that mounts this one unchanged.
        inner: Scope = {**scope, "state": dict(scope.get("state", {}))}
        inner.pop("route", None)
        start = time.monotonic()
        status = _CLIENT_DISCONNECTED  # until a response starts

        async def noted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        def end(record: RequestRecord) -> None:
            self._end(scope, inner, status, time.monotonic() - start, record)

        record = RequestRecord(end)
        inner["state"]["record"] = record
        try:
            await self._app(inner, receive, noted_send)
        finally:
            record.end()

    def _end(self, scope: Scope, inner: Scope, status: int, seconds: float, record: RequestRecord) -> None:
        """Counts and logs a request.

        Args:
            scope: The original scope.
            inner: The scope that the application has routed.
            status: HTTP status of the response.
            seconds: Time from the start of the HTTP request until it and its engine requests had ended.
            record: Record of its engine requests.
        """
        path = route_path(inner)
        route = getattr(inner.get("route"), "path", path if path in self._paths else "other")
        self._metrics.observe_response(route, status)
        level = logging.DEBUG if route in _POLLED and status < 500 else logging.INFO
        if not _LOGGER.isEnabledFor(level):
            return
        request_id = inner["state"].get("request_id") or uuid.uuid4().hex
        fields: dict[str, Any] = {
            "request_id": printable(request_id),
            "client": ":".join(map(str, scope.get("client") or ())),
            "method": printable(scope["method"]),
            "path": printable(scope["path"]),
            "status": status,
            "total_s": round(seconds, 4),
        }
        parts = [f"{status} {fields['method']} {fields['path']} {seconds:.3f} s"]
        if record.num_requests:
            fields |= {
                "requests": record.num_requests,
                "prompt_tokens": record.num_prompt_tokens,
                "cached_tokens": record.num_cached_tokens,
                "output_tokens": record.num_output_tokens,
                "queue_s": _rounded(record.queue_s),
                "first_token_s": _rounded(record.first_token_s),
                "finish_reason": ",".join(record.finish_reasons) or None,
            }
            cached = f" ({record.num_cached_tokens} cached)" if record.num_cached_tokens else ""
            parts.append(f"prompt {record.num_prompt_tokens}{cached}, output {record.num_output_tokens}")
            parts.append(f"queue {_seconds(record.queue_s)}, first token {_seconds(record.first_token_s)}")
            parts.append(fields["finish_reason"] or "no finish reason")
        parts.append(f"id {fields['request_id']}")
        _LOGGER.log(level, "%s", "; ".join(parts), extra={"fields": fields})


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"
