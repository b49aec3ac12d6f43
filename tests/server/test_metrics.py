"""What GET /metrics reports; test_endings covers requests whose client leaves."""

import json
import math
import re
from pathlib import Path

import pytest
from helpers.metric_values import metric_values
from prometheus_client.parser import text_string_to_metric_families

from jax_paged import AsyncLLMEngine, CompletionOutput, RequestOutput, SamplingParams
from jax_paged.core.request import Request, RequestMetrics, Sequence, SequenceGroup
from jax_paged.engine.async_engine.statistics import Distribution, EngineStatistics
from jax_paged.server.observability.metrics import Metrics

ROOT = Path(__file__).parents[2]
SAMPLED = {"prompt": "def read(self", "max_tokens": 24, "temperature": 0.9, "seed": 5}
# What the panels of vLLM's own boards ask for, the current one and older ones.
VLLM_PANELS = [
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_per_output_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds_bucket",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "request_time_per_output_token_seconds_sum",
]


@pytest.fixture
def scripted_metrics(scripted):
    engine = AsyncLLMEngine(*scripted())
    yield Metrics(engine, "scripted", lambda: 0)
    engine.close()


def values(metrics):
    return metric_values(metrics.text().decode())


def families(served):
    return list(text_string_to_metric_families(served.client.get("../metrics").text))


def test_metrics_count_requests_and_tokens(served):
    served.wait_until_idle()
    before = served.metrics()
    usage = served.complete(ignore_eos=True, max_tokens=5)["usage"]
    served.stream("/completions", prompt="def f(", ignore_eos=True, max_tokens=5)
    answers = 'http_responses_total{route="/v1/completions",status="200"}'
    num_before = before.get(answers, 0)
    served.wait_until(lambda: served.metrics()[answers] - num_before == 2, "both answers are counted")
    after = served.metrics()

    def grew(name):
        return after[name] - before.get(name, 0)

    assert grew('request_success_total{finished_reason="length"}') == 2
    assert grew("generation_tokens_total") == grew("request_generation_tokens_sum") == 10
    prompt = 2 * usage["prompt_tokens"]
    assert grew("prompt_tokens_total") == grew("prefix_cache_queries_total") == prompt
    assert grew("request_prompt_tokens_sum") == prompt
    assert grew("time_to_first_token_seconds_count") == grew("e2e_request_latency_seconds_count") == 2
    # Two first tokens have none before them.
    assert grew("inter_token_latency_seconds_count") == grew("time_per_output_token_seconds_count") == 8
    decode = grew("request_decode_time_seconds_sum")
    assert grew("inter_token_latency_seconds_sum") == pytest.approx(decode, rel=0.2, abs=0.05)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[name] == 0
    assert after["programs"] >= after["programs_compiled"] > 0
    assert grew("steps_total") >= 10


def test_the_times_of_a_request_add_up(served):
    before = served.metrics()
    served.complete(max_tokens=8)
    after = served.metrics()
    queue, prefill, decode, inference, total = (
        after[f"{name}_seconds_sum"] - before.get(f"{name}_seconds_sum", 0)
        for name in (
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "request_inference_time",
            "e2e_request_latency",
        )
    )
    assert prefill + decode == pytest.approx(inference)
    assert queue + inference == pytest.approx(total)


def test_metrics_count_all_choices(served):
    served.wait_until_idle()
    before = served.metrics()["generation_tokens_total"]
    usage = served.post("/completions", **SAMPLED, n=3)["usage"]
    assert served.metrics()["generation_tokens_total"] - before == usage["completion_tokens"]
    chunks = served.stream("/completions", **SAMPLED, n=3, stream_options={"include_usage": True})
    grew = served.metrics()["generation_tokens_total"] - before
    assert grew == 2 * chunks[-1]["usage"]["completion_tokens"]


def test_refused_requests_are_counted_by_route_and_status(served):
    before = served.metrics()
    assert served.client.post("/completions", json={"prompt": "a", "n": -1}).status_code == 400
    assert served.client.post("/completions", content="{").status_code == 400
    assert served.client.get("/no/such/path").status_code == 404
    assert served.client.get("/nor/this").status_code == 404
    after = served.metrics()
    for labels, num in (('route="/v1/completions",status="400"', 2), ('route="other",status="404"', 2)):
        name = f"http_responses_total{{{labels}}}"
        assert after[name] - before.get(name, 0) == num
    assert not [name for name in after if "such" in name]


def test_what_vllms_boards_ask_for_is_there(served):
    served.complete(max_tokens=2)
    samples = [sample for family in families(served) for sample in family.samples]
    for name in VLLM_PANELS:
        found = [s for s in samples if s.name == f"vllm:{name}"]
        assert found, name
        assert {s.labels["model_name"] for s in found} == {"pagelet"}


def test_our_board_asks_for_what_is_there(served):
    served.complete(max_tokens=2)
    there = {sample.name for family in families(served) for sample in family.samples}
    text = (ROOT / "deploy" / "grafana" / "dashboards" / "jax-paged.json").read_text(encoding="utf-8")
    queries = [target["expr"] for panel in json.loads(text)["panels"] for target in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"(?:vllm:|jax_paged_)\w+", query)}
    assert len(asked) > 15
    assert asked <= there


def test_gauges_follow_the_engine_to_another_scheduler(scripted):
    engine = AsyncLLMEngine(*scripted())
    metrics = Metrics(engine, "scripted", lambda: 0)
    engine.close()  # its thread; what follows is done by hand
    scripted_engine = type(engine.engine)(*scripted())
    engine.engine = scripted_engine
    scripted_engine.record([].append)
    scripted_engine.add_request("a", "abcdefgh?")
    scripted_engine.add_request("b", "abcdefgh?")
    assert values(metrics)["num_requests_waiting"] == 2
    scripted_engine.step()
    now = values(metrics)
    assert (now["num_requests_running"], now["num_requests_waiting"]) == (2, 0)
    assert now["kv_cache_usage_perc"] > 0
    scripted_engine.close()


@pytest.mark.parametrize(
    ("reasons", "counted"),
    [(["stop"], "stop"), (["length", "stop"], "length"), (["stop", "abort"], "abort"), (["error"], "error")],
)
def test_an_output_that_did_not_end_well_decides_how_its_request_ended(scripted_metrics, reasons, counted):
    outputs = [CompletionOutput(i, "", [], 0.0, None, reason) for i, reason in enumerate(reasons)]
    ended = RequestMetrics(
        arrival_time=0.0, first_scheduled_time=0.5, first_token_time=1.0, finished_time=3.0, num_preemptions=2
    )
    output = RequestOutput("a", None, [5, 6], None, outputs, True, ended, num_cached_tokens=1)
    scripted_metrics.observe(output, [3] * len(reasons))
    now = values(scripted_metrics)
    assert {name: now[name] for name in now if "request_success_total" in name and now[name]} == {
        f'request_success_total{{finished_reason="{counted}"}}': 1
    }
    assert now["request_prompt_tokens_sum"] == 2
    assert now["request_generation_tokens_sum"] == 3 * len(reasons)
    assert now["request_max_num_generation_tokens_sum"] == 3
    assert now["request_time_per_output_token_seconds_sum"] == 1
    assert now["num_preemptions_total"] == 2
    assert scripted_metrics.recent[-1] == (1.0, 1.0)
    assert scripted_metrics.num_ended[counted] == 1


def test_a_request_that_never_ran_has_no_times(scripted_metrics):
    failed = CompletionOutput(0, "", [], 0.0, None, "error")
    times = RequestMetrics(arrival_time=0.0, finished_time=1.0)
    output = RequestOutput("a", None, [5], None, [failed], True, times, num_cached_tokens=0)
    scripted_metrics.observe(output, [0])
    now = values(scripted_metrics)
    assert now["e2e_request_latency_seconds_count"] == 1
    assert now["request_queue_time_seconds_count"] == now["time_to_first_token_seconds_count"] == 0
    assert not scripted_metrics.recent


def test_bounds_belong_to_the_interval_below():
    found = Distribution((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 3), (math.inf, 4)):
        found.add(value, times)
    assert found.counts == [3, 3, 4]


def group(*lengths, prompt=5):
    sequences = [Sequence([1] * prompt, output_token_ids=[2] * n) for n in lengths]
    return SequenceGroup(
        Request("a", [1] * prompt, SamplingParams()), sequences, RequestMetrics(0.0, num_cached_tokens=3)
    )


def test_statistics_count_tokens_and_the_time_between_them():
    done = EngineStatistics()
    running = group(1)
    done.note(running, 10.0)
    assert (done.num_prompt_tokens, done.num_cached_tokens, done.num_generated_tokens) == (5, 3, 1)
    assert sum(done.inter_token.counts) == 0
    running.sequences[0].output_token_ids += [2]
    done.note(running, 10.5)
    running.sequences[0].output_token_ids += [2] * 4  # a burst
    done.note(running, 11.5)
    done.note(running, 20.0)  # nothing new
    running.sequences[0].output_token_ids += [2]
    done.note(running, 21.5)
    done.forget("a")
    assert done.num_generated_tokens == 7
    assert done.num_prompt_tokens == 5
    assert sum(done.inter_token.counts) == 6
    assert done.inter_token.total == pytest.approx(0.5 + 1.0 + 10.0)
    done.note(group(1), 30.0)  # the id is free again
    assert done.num_prompt_tokens == 10


def test_statistics_of_several_sequences_and_of_dropped_beams():
    done = EngineStatistics()
    samples = group(1, 1, 1)
    done.note(samples, 1.0)
    for seq in samples.sequences:
        seq.output_token_ids += [2]
    done.note(samples, 1.25)
    assert done.num_generated_tokens == 6
    assert (sum(done.inter_token.counts), done.inter_token.total) == (3, 0.75)
    del samples.sequences[1:]
    done.note(samples, 2.0)
    assert done.num_generated_tokens == 6  # counters never fall
    done.forget("a")
    done.forget("a")
