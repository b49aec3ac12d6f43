"""Prometheus metrics of the server.

Metrics that vLLM also has use vLLM's names, so that dashboards for vLLM work. The others start with
"jax_paged_".
"""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from jax_paged.engine.async_engine.engine import AsyncLLMEngine
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.outputs import RequestOutput
from jax_paged.server.protocol.responses import num_prompt_tokens

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_LABELS = ("model_name", "engine")
# Value of the label "engine" for waiting requests that have not been assigned to one of several engines.
_ANY_ENGINE = "any"
_FINISH_REASONS = ("stop", "length", "abort", "error")
_NUM_RECENT = 100
# vLLM's histograms of tokens and times (seconds) of requests that have ended.
_TOKENS = {
    "request_prompt_tokens": "Number of prompt tokens of a finished request.",
    "request_generation_tokens": "Number of generated tokens of all outputs of a finished request.",
    "request_max_num_generation_tokens": "Number of tokens of the longest output of a finished request.",
}
_TIMES = {
    "time_to_first_token": "Time from the arrival of a request to its first token (seconds).",
    "e2e_request_latency": "Time from the arrival of a request to its end (seconds).",
    "request_queue_time": "Time from the arrival of a request until it is first scheduled (seconds).",
    "request_inference_time": "Time from when a request is first scheduled to its end (seconds).",
    "request_prefill_time": "Time from when a request is first scheduled to its first token (seconds).",
    "request_decode_time": "Time from the first token of a request to its end (seconds).",
    "request_time_per_output_token": "Mean time per output token of a request except the first (seconds).",
}


class Latency(NamedTuple):
    """Latencies of a request that has ended, in seconds.

    Args:
        first_token: Time from arrival to the first token.
        per_token: Average time between two tokens. None if there was only one token.
    """

    first_token: float
    per_token: float | None


class Metrics:
    """Counters of requests that have ended, and a collector that reads the engine whenever it is scraped.

    Args:
        engine: The engine. Only numbers are read, from any thread.
        model_name: Value of the label "model_name".
        num_queued: Returns the number of requests that wait in the server for the engine.

    Attributes:
        recent: Latencies of the most recent requests that produced a token.
        num_ended: Number of requests that have ended, by finish reason.
    """

    def __init__(self, engine: ServingEngine, model_name: str, num_queued: Callable[[], int]) -> None:
        self._engine = engine
        self._num_queued = num_queued
        self.recent: collections.deque[Latency] = collections.deque(maxlen=_NUM_RECENT)
        self.num_ended: dict[str, int] = dict.fromkeys(_FINISH_REASONS, 0)
        self._registry = CollectorRegistry()
        self._labels = [(model_name, str(replica)) for replica in range(len(engine.replicas))]
        self._registry.register(_EngineCollector(engine, model_name, num_queued))
        # The metrics of requests are lists with one entry per engine.
        ended = self._counter("vllm:request_success", "Number of finished requests.", "finished_reason")
        self._ended = [{r: ended.labels(*labels, r) for r in _FINISH_REASONS} for labels in self._labels]
        preempted = "Number of preemptions of finished requests."
        preemptions = self._counter("vllm:num_preemptions", preempted)
        self._preemptions = [preemptions.labels(*labels) for labels in self._labels]
        self._responses = Counter(
            "jax_paged_http_responses",
            "HTTP responses by route and status, including rejections; 499 if the client disconnected first.",
            ["route", "status"],
            registry=self._registry,
        )
        bounds = self._lengths(engine.engine.config.max_model_len)
        self._histograms = {
            **{n: self._histogram(n, text, bounds) for n, text in _TOKENS.items()},
            **{n: self._histogram(f"{n}_seconds", text) for n, text in _TIMES.items()},
        }

    def observe(self, output: RequestOutput, num_tokens: list[int], replica: int = 0) -> None:
        """Counts a request that has ended.

        Args:
            output: Last output of the request.
            num_tokens: Number of generated tokens of each output.
            replica: Index of the engine that ran the request.
        """
        times, longest = output.metrics, max(num_tokens)
        reason = finish_reason(output)
        self.num_ended[reason] += 1
        self._ended[replica][reason].inc()
        if times.num_preemptions:
            self._preemptions[replica].inc(times.num_preemptions)
        counts = num_prompt_tokens(output), sum(num_tokens), longest
        found: dict[str, float] = dict(zip(_TOKENS, counts, strict=True))
        arrival, started, first = times.arrival_time, times.first_scheduled_time, times.first_token_time
        if started is not None:
            found["request_queue_time"] = started - arrival
        if times.finished_time is not None:
            found["e2e_request_latency"] = times.finished_time - arrival
            if started is not None and first is not None:
                found["request_inference_time"] = times.finished_time - started
                found["request_prefill_time"] = first - started
                found["request_decode_time"] = times.finished_time - first
                found["time_to_first_token"] = first - arrival
                if longest > 1:
                    found["request_time_per_output_token"] = found["request_decode_time"] / (longest - 1)
                self.recent.append(Latency(first - arrival, found.get("request_time_per_output_token")))
        for name, value in found.items():
            self._histograms[name][replica].observe(value)

    def num_waiting(self) -> int:
        """Returns the number of waiting requests, in the server and in the engines."""
        waiting = (len(replica.engine.scheduler.queues.waiting) for replica in self._engine.replicas)
        return self._num_queued() + sum(waiting)

    def observe_response(self, route: str, status: int) -> None:
        """Counts an HTTP response.

        Args:
            route: Path of the route, or "other" for a path without a route. Paths from clients must not
                create new time series.
            status: HTTP status.
        """
        self._responses.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """Returns all metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [*_LABELS, *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: Iterable[float] = _SECONDS) -> list[Histogram]:
        family = Histogram(f"vllm:{name}", text, _LABELS, buckets=tuple(bounds), registry=self._registry)
        return [family.labels(*labels) for labels in self._labels]

    @staticmethod
    def _lengths(max_model_len: int) -> list[int]:
        """Returns histogram bounds (tokens): 1, 2, 5, 10, 20, 50 and so on, up to `max_model_len`."""
        bounds = (10**power * digit for power in itertools.count() for digit in (1, 2, 5))
        return [*itertools.takewhile(lambda bound: bound < max_model_len, bounds), max_model_len]


class _EngineCollector(Collector):
    """Collector that reads counters, queues and block pools of the engines whenever it is scraped.

    It looks up an engine's scheduler each time, because LLMEngine.record() replaces it.
    """

    def __init__(self, engine: ServingEngine, model_name: str, num_queued: Callable[[], int]) -> None:
        self._replicas = engine.replicas
        self._model_name = model_name
        self._num_queued = num_queued

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics of the engines."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._speculation()
        for name, text in (
            ("inter_token_latency", "Time between two tokens of a sequence (seconds)."),
            ("time_per_output_token", "Deprecated name of inter_token_latency_seconds."),
        ):
            histogram = HistogramMetricFamily(f"vllm:{name}_seconds", text, labels=_LABELS)
            for labels, replica in self._each():
                values = replica.statistics.inter_token
                counts = itertools.accumulate(list(values.counts))
                bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
                histogram.add_metric(labels, list(zip(bounds, counts, strict=True)), values.total)
            yield histogram
        yield from self._config_metrics()
        yield from self._total_metrics()

    def _each(self) -> Iterator[tuple[list[str], AsyncLLMEngine]]:
        """Yields each engine with its labels."""
        for place, replica in enumerate(self._replicas):
            yield [self._model_name, str(place)], replica

    def _gauges(self) -> Iterator[Metric]:
        running = self._gauge("vllm:num_requests_running", "Number of running requests.")
        waiting = self._gauge("vllm:num_requests_waiting", "Number of waiting requests.")
        usage = "Fraction of the KV cache blocks that are in use; 1 means all blocks."
        used = self._gauge("vllm:kv_cache_usage_perc", usage)
        older = self._gauge("vllm:gpu_cache_usage_perc", "Deprecated name of kv_cache_usage_perc.")
        is_one = len(self._replicas) == 1
        for labels, replica in self._each():
            queues, manager = replica.engine.scheduler.queues, replica.engine.scheduler.block_manager
            running.add_metric(labels, len(queues.running))
            waiting.add_metric(labels, len(queues.waiting) + (self._num_queued() if is_one else 0))
            for family in (used, older):
                family.add_metric(labels, 1 - manager.num_free_blocks / manager.num_usable_blocks)
        if not is_one:
            waiting.add_metric([self._model_name, _ANY_ENGINE], self._num_queued())
        yield from (running, waiting, used, older)

    def _counters(self) -> Iterator[Metric]:
        for name, text, attribute in (
            ("prompt_tokens", "Number of prompt tokens of requests with a first token.", "num_prompt_tokens"),
            ("generation_tokens", "Number of generated tokens.", "num_generated_tokens"),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prompt_tokens"),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_cached_tokens"),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            for labels, replica in self._each():
                counter.add_metric(labels, getattr(replica.statistics, attribute))
            yield counter

    def _speculation(self) -> Iterator[Metric]:
        """Yields the metrics of speculative decoding, if any engine uses it."""
        planners = [(labels, replica.engine.scheduler.drafts) for labels, replica in self._each()]
        drafts = [(labels, planner) for labels, planner in planners if planner is not None]
        if not drafts:
            return
        for name, text, value_of in (
            ("num_drafts", "Number of verified drafts: one per sequence and step.", lambda d: d.num_verified),
            ("num_draft_tokens", "Number of verified draft tokens.", lambda d: d.num_drafts),
            ("num_accepted_tokens", "Number of accepted draft tokens.", lambda d: sum(d.num_accepted)),
        ):
            counter = CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=_LABELS)
            for labels, of_engine in drafts:
                counter.add_metric(labels, value_of(of_engine))
            yield counter
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of accepted draft tokens by their position in the draft.",
            labels=[*_LABELS, "position"],
        )
        for labels, of_engine in drafts:
            for position, value in enumerate(of_engine.num_accepted):
                by_place.add_metric([*labels, str(position)], value)
        yield by_place

    def _config_metrics(self) -> Iterator[Metric]:
        """Yields the cache configuration and the sleep state of the engines."""
        names = ["block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "engine"]
        info = GaugeMetricFamily("vllm:cache_config_info", "Configuration of the KV cache.", labels=names)
        states = "1 for the current sleep state, else 0; weights_offloaded is level 1, discard_all level 2."
        asleep = GaugeMetricFamily("vllm:engine_sleep_state", states, labels=[*_LABELS, "sleep_state"])
        for labels, replica in self._each():
            config = replica.engine.config
            dtype = config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
            values = config.block_size, config.num_blocks, dtype, config.enable_prefix_caching, labels[1]
            info.add_metric([str(value) for value in values], 1)
            for i, state in enumerate(("awake", "weights_offloaded", "discard_all")):
                asleep.add_metric([*labels, state], int(replica.engine.sleep_level == i))
        yield from (info, asleep)

    def _total_metrics(self) -> Iterator[Metric]:
        """Yields metrics that vLLM does not have. They are sums over all engines, without labels."""
        engines = [replica.engine for replica in self._replicas]
        version = GaugeMetricFamily(
            "jax_paged_weight_version_info", "Name of the current weights.", labels=["weight_version"]
        )
        version.add_metric([engines[0].weight_version], 1)
        yield version
        progress = [engine.executor.compile_progress for engine in engines]
        num_compiled, num_programs = map(sum, zip(*progress, strict=True))
        num_swapped = sum(len(engine.scheduler.queues.swapped) for engine in engines)
        swapped = "Number of requests whose KV cache blocks are swapped out to host memory."
        yield GaugeMetricFamily("jax_paged_num_requests_swapped", swapped, value=num_swapped)
        yield GaugeMetricFamily("jax_paged_programs", "XLA programs to compile.", value=num_programs)
        yield GaugeMetricFamily("jax_paged_programs_compiled", "Compiled XLA programs.", value=num_compiled)
        num_steps = sum(replica.statistics.num_steps for replica in self._replicas)
        yield CounterMetricFamily("jax_paged_steps", "Number of engine steps.", value=num_steps)
        shared = "Number of KV cache token reads that cascade attention has saved."
        num_saved = sum(engine.num_saved_reads for engine in engines)
        yield CounterMetricFamily("jax_paged_shared_tokens", shared, value=num_saved)

    @staticmethod
    def _gauge(name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=_LABELS)


class _Merged(Collector):
    """Collector of the metrics of several replicas."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._families: dict[str, Metric] = {}
        for replica, text in texts.items():
            for family in text_string_to_metric_families(text):
                samples = [x._replace(labels={**x.labels, "replica": replica}) for x in family.samples]
                family.samples = []
                self._families.setdefault(family.name, family).samples += samples

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def with_replicas(texts: Mapping[str, str]) -> bytes:
    """Returns the metrics of several replicas as one text, with an additional label "replica".

    Args:
        texts: Metrics of each replica in the Prometheus text format, by the replica's name.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(texts))
    return generate_latest(registry)


def finish_reason(output: RequestOutput) -> str:
    """Returns the finish reason of a request: of its first output, unless another output has failed."""
    reasons = [completion.finish_reason for completion in output.outputs]
    return next((reason for reason in ("error", "abort") if reason in reasons), str(reasons[0]))
