"""The server's metrics, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.outputs import RequestOutput
from jax_paged.server.responses import num_prompt_tokens

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counts requests as they end, and reads the engine's queues and pool when it is scraped.

    Args:
        engine: Only its numbers of requests and of blocks are read, from any thread.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "jax_paged_requests",
            'Requests that ended; finish_reason is "abort" if the client left.',
            ["finish_reason"],
            registry=self._registry,
        )
        self._prompt_tokens = self._counter(
            "jax_paged_prompt_tokens", "Prompt tokens of requests that ended."
        )
        self._cached_tokens = self._counter(
            "jax_paged_cached_prompt_tokens", "Prompt tokens that were found in the prefix cache."
        )
        self._generation_tokens = self._counter(
            "jax_paged_generation_tokens", "Generated tokens of requests that ended."
        )
        self._first_token = self._histogram(
            "jax_paged_time_to_first_token_seconds", "Time from a request's arrival to its first token."
        )
        self._inter_token = self._histogram(
            "jax_paged_inter_token_latency_seconds", "Mean time between two tokens of a request."
        )
        self._gauge(
            "jax_paged_num_requests_running",
            "Requests that are running.",
            lambda: self._num_requests("running"),
        )
        self._gauge(
            "jax_paged_num_requests_waiting",
            "Requests that are waiting.",
            lambda: self._num_requests("waiting"),
        )
        self._gauge(
            "jax_paged_num_requests_swapped",
            "Requests whose blocks are in host memory.",
            lambda: self._num_requests("swapped"),
        )
        self._gauge(
            "jax_paged_kv_cache_usage_ratio",
            "Share of the pool's blocks that requests hold.",
            self._pool_usage,
        )

    def observe(self, output: RequestOutput, num_tokens: list[int]) -> None:
        """Counts a request that has ended.

        Args:
            output: The last output of the request.
            num_tokens: Generated tokens per output.
        """
        metrics = output.metrics
        self._requests.labels(_finish_reason(output)).inc()
        self._prompt_tokens.inc(num_prompt_tokens(output))
        self._cached_tokens.inc(output.num_cached_tokens)
        self._generation_tokens.inc(sum(num_tokens))
        if metrics.first_token_time is not None:
            self._first_token.observe(metrics.first_token_time - metrics.arrival_time)
            longest = max(num_tokens)
            if metrics.finished_time is not None and longest > 1:
                seconds = metrics.finished_time - metrics.first_token_time
                self._inter_token.observe(seconds / (longest - 1))

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=_SECONDS, registry=self._registry)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, registry=self._registry).set_function(value)

    # The engine's scheduler is looked up at every scrape: LLMEngine.record() replaces it.

    def _num_requests(self, queue: str) -> int:
        return len(getattr(self._engine.scheduler.queues, queue))

    def _pool_usage(self) -> float:
        manager = self._engine.scheduler.block_manager
        return 1 - manager.num_free_blocks / manager.num_usable_blocks


def _finish_reason(output: RequestOutput) -> str:
    """Returns why a request ended: the reason of an output that failed, if there is one, or of the first."""
    reasons = [completion.finish_reason for completion in output.outputs]
    return next((reason for reason in ("error", "abort") if reason in reasons), str(reasons[0]))
