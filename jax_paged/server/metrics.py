"""What a server tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.outputs import RequestOutput

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counts requests as they end; reads queues and pool when it is asked for the text.

    Args:
        engine: Only its numbers of requests and blocks are read, from any thread.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "jax_paged_requests", "Requests that ended.", ["finish_reason"], registry=registry
        )
        self._prompt_tokens = Counter("jax_paged_prompt_tokens", "Prompt tokens.", registry=registry)
        self._cached_tokens = Counter(
            "jax_paged_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", registry=registry
        )
        self._generation_tokens = Counter(
            "jax_paged_generation_tokens", "Generated tokens.", registry=registry
        )
        self._first_token = Histogram(
            "jax_paged_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._inter_token = Histogram(
            "jax_paged_inter_token_latency_seconds",
            "Between two tokens of a request, on its average.",
            buckets=_SECONDS,
            registry=registry,
        )
        manager, scheduler = engine.scheduler.block_manager, engine.scheduler
        gauges = {
            "jax_paged_num_requests_running": ("Requests running.", lambda: len(scheduler.queues.running)),
            "jax_paged_num_requests_waiting": ("Requests waiting.", lambda: len(scheduler.queues.waiting)),
            "jax_paged_num_requests_swapped": (
                "Requests in host memory.",
                lambda: len(scheduler.queues.swapped),
            ),
            "jax_paged_kv_cache_usage_ratio": (
                "Share of the pool's blocks that requests hold.",
                lambda: 1 - manager.num_free_blocks / manager.num_usable_blocks,
            ),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=registry).set_function(value)

    def observe(self, output: RequestOutput, num_tokens: list[int]) -> None:
        """Counts a request that has ended, with so many tokens in each of its outputs."""
        metrics = output.metrics
        self._requests.labels(output.outputs[0].finish_reason).inc()
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        self._cached_tokens.inc(output.num_cached_tokens)
        self._generation_tokens.inc(sum(num_tokens))
        if metrics.first_token_time is not None:
            self._first_token.observe(metrics.first_token_time - metrics.arrival_time)
            longest = max(num_tokens)
            if metrics.finished_time is not None and longest > 1:
                seconds = metrics.finished_time - metrics.first_token_time
                self._inter_token.observe(seconds / (longest - 1))

    def text(self) -> bytes:
        """Returns everything in Prometheus' text format."""
        return generate_latest(self._registry)
