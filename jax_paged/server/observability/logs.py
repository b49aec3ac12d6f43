"""Logging of the server to stderr, as lines of text or of JSON.

The loggers are named "jax_paged...". Importing the package does not set up logging; the commands call
`configure`.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import orjson

from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.server.launch.options import LogFormat, LogLevel

_LOGGER = logging.getLogger(__name__)
_STATISTICS_INTERVAL_S = 10.0
# Control characters are replaced, so that text from a client cannot move the cursor of a terminal. Tracebacks
# need line breaks and tabs, so only `printable` replaces those.
_UNPRINTABLE = {c: "?" for c in (*range(32), *range(127, 160), 0x2028, 0x2029) if chr(c) not in "\n\t"}


def configure(level: LogLevel, log_format: LogFormat, stream: TextIO | None = None) -> logging.Handler:
    """Sets up the log output of this package and of uvicorn.

    Args:
        level: Minimum level for this package. For uvicorn it is always "warning".
        log_format: One line of text or one JSON object per record.
        stream: Stream for the output. None is stderr.

    Returns:
        The handler that writes the records.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    # The formats contain neither the source line nor the thread of a record, so logging need not look them
    # up.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for name, least in (("jax_paged", level), ("uvicorn", "warning")):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(least.upper())
        logger.propagate = False
    return handler


def printable(text: str) -> str:
    """Returns text from a client without control characters and line breaks, at most 200 characters long."""
    line = text[:200].translate(_UNPRINTABLE)
    return line.replace("\n", "?").replace("\t", "?")


async def log_statistics(
    engine: ServingEngine, num_waiting: Callable[[], int], interval_s: float = _STATISTICS_INTERVAL_S
) -> None:
    """Logs a line of statistics for each interval in which the engine was busy, until it is cancelled.

    Args:
        engine: The engine. Only counters and queue lengths are read.
        num_waiting: Returns the number of waiting requests.
        interval_s: Interval between two lines (seconds).
    """
    last = _counts(engine)
    while True:
        start = time.monotonic()
        await asyncio.sleep(interval_s)
        seconds, now = time.monotonic() - start, _counts(engine)
        schedulers = [replica.engine.scheduler for replica in engine.replicas]
        if now == last and not any(len(scheduler.queues) for scheduler in schedulers):
            continue
        num_blocks = sum(scheduler.block_manager.num_usable_blocks for scheduler in schedulers)
        num_free = sum(scheduler.block_manager.num_free_blocks for scheduler in schedulers)
        prompt, cached, generated, steps = (new - old for new, old in zip(now, last, strict=True))
        last = now
        fields = {
            "running": sum(len(scheduler.queues.running) for scheduler in schedulers),
            "waiting": num_waiting(),
            "swapped": sum(len(scheduler.queues.swapped) for scheduler in schedulers),
            "prompt_tokens_per_s": round(prompt / seconds, 1),
            "generated_tokens_per_s": round(generated / seconds, 1),
            "steps_per_s": round(steps / seconds, 1),
            "pool_usage": round(1 - num_free / num_blocks, 4),
            "cached_prompt_tokens": round(cached / prompt, 4) if prompt else None,
            "generated_tokens_total": now[2],
        }
        hits = f", prefix cache hit rate {cached / prompt:.0%}" if prompt else ""
        _LOGGER.info(
            "%d running, %d waiting; prompt throughput %.0f tokens/s, generation throughput %.0f tokens/s; "
            "KV cache usage %.1f %%%s",
            fields["running"],
            fields["waiting"] + fields["swapped"],
            prompt / seconds,
            generated / seconds,
            100 * fields["pool_usage"],
            hits,
            extra={"fields": fields},
        )


def _counts(engine: ServingEngine) -> tuple[int, ...]:
    done = [replica.statistics for replica in engine.replicas]
    each = ((d.num_prompt_tokens, d.num_cached_tokens, d.num_generated_tokens, d.num_steps) for d in done)
    return tuple(map(sum, zip(*each, strict=True)))


class _TextFormatter(logging.Formatter):
    """Formatter for lines such as "2026-01-31 12:00:00.000 INFO message", with tracebacks below."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03d %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S", validate=False
        )

    def format(self, record: logging.LogRecord) -> str:
        """Returns the formatted record."""
        line = super().format(record)
        return line if line.isprintable() else line.translate(_UNPRINTABLE)


class _JsonFormatter(logging.Formatter):
    """Formatter for JSON objects: time (UTC), level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the formatted record, a single line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()
