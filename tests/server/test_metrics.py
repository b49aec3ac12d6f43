"""What GET /metrics reports; test_endings covers requests whose client leaves."""

import pytest

from jax_paged import CompletionOutput, RequestOutput
from jax_paged.core.sequence import RequestMetrics
from jax_paged.server.metrics import Metrics

SAMPLED = {"prompt": "def read(self", "max_tokens": 24, "temperature": 0.9, "seed": 5}


def values(metrics):
    """Returns the samples by name, without "jax_paged_" and comments."""
    lines = metrics.text().decode().splitlines()
    pairs = (line.removeprefix("jax_paged_").rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_metrics_count_requests_and_tokens(served):
    served.wait_until_idle()
    before = served.metrics()
    usage = served.complete(ignore_eos=True, max_tokens=5)["usage"]
    served.stream("/completions", prompt="def f(", ignore_eos=True, max_tokens=5)
    after = served.metrics()

    def grew(name):
        return after[name] - before.get(name, 0)

    assert grew('requests_total{finish_reason="length"}') == 2
    assert grew("generation_tokens_total") == 10
    assert grew("prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert grew("time_to_first_token_seconds_count") == grew("inter_token_latency_seconds_count") == 2
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"):
        assert after[name] == 0


def test_metrics_count_all_choices(served):
    served.wait_until_idle()
    before = served.metrics()["generation_tokens_total"]
    usage = served.post("/completions", **SAMPLED, n=3)["usage"]
    assert served.metrics()["generation_tokens_total"] - before == usage["completion_tokens"]
    chunks = served.stream("/completions", **SAMPLED, n=3, stream_options={"include_usage": True})
    grew = served.metrics()["generation_tokens_total"] - before
    assert grew == 2 * chunks[-1]["usage"]["completion_tokens"]


def test_gauges_follow_the_engine_to_another_scheduler(scripted_engine):
    metrics = Metrics(scripted_engine)
    scripted_engine.record([].append)
    scripted_engine.add_request("a", "abcdefgh?")
    scripted_engine.add_request("b", "abcdefgh?")
    assert values(metrics)["num_requests_waiting"] == 2
    scripted_engine.step()
    now = values(metrics)
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (2, 0)
    assert now["kv_cache_usage_ratio"] > 0


@pytest.mark.parametrize(
    ("reasons", "counted"),
    [(["stop"], "stop"), (["length", "stop"], "length"), (["stop", "abort"], "abort"), (["error"], "error")],
)
def test_an_output_that_did_not_end_well_decides_how_its_request_ended(scripted_engine, reasons, counted):
    metrics = Metrics(scripted_engine)
    outputs = [CompletionOutput(i, "", [], 0.0, None, reason) for i, reason in enumerate(reasons)]
    ended = RequestMetrics(arrival_time=0.0, first_token_time=1.0, finished_time=3.0)
    output = RequestOutput("a", None, [5, 6], None, outputs, True, ended, num_cached_tokens=1)
    metrics.observe(output, [3] * len(reasons))
    now = values(metrics)
    assert {name: now[name] for name in now if name.startswith("requests_total")} == {
        f'requests_total{{finish_reason="{counted}"}}': 1
    }
    assert (now["prompt_tokens_total"], now["cached_prompt_tokens_total"]) == (2, 1)
    assert now["generation_tokens_total"] == 3 * len(reasons)
    assert now["inter_token_latency_seconds_sum"] == 1
