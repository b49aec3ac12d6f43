"""Adapters, and vectors in place of tokens, in the engine: exact in every batch, whatever happens to it."""

import dataclasses
import functools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from helpers.adapters import ADAPTERS, FIXTURES, merged, reference, write_random
from helpers.real_model import make_engine, reschedule, reset, steps_of
from helpers.wrapped_executor import WrappedExecutor

from jax_paged import LLM, BeamSearchParams, LLMEngine, LoRARequest, SamplingParams
from jax_paged.engine import engine_core
from jax_paged.models.weights import load_model
from jax_paged.outputs import RequestOutput

pytestmark = pytest.mark.thorough

BASE = FIXTURES / "gqa4_llama3"
# Of different ranks, with patterns and without.
NAMES = [
    *("rank1", "rank2_attention", "rank3_mlp", "rank4_rslora", "rank_pattern", "rank8_all_linear"),
    *("rank6_one_layer", "rslora_and_rank_pattern"),
]
# Float32 sums in another order move the log-probabilities of this model by up to 2e-5.
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
SETTINGS: dict[str, Any] = {
    "few_buckets": True,
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_model_len": 128,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 1200,
    "matmul_backend": "auto",
    "attention_backend": "auto",
    "num_scheduler_steps": 4,
    "async_scheduling": True,
}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 8, "enable_prompt_embeds": True}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, and what PEFT has drawn for it; of the model alone, transformers."""

    prompt: Any
    adapter: LoRARequest | None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    params: SamplingParams = dataclasses.field(default_factory=lambda: GREEDY)


def named(name: str) -> LoRARequest:
    return LoRARequest(name, 1 + [*NAMES, "soft_prompt"].index(name), str(ADAPTERS / name))


@functools.cache
def all_cases() -> list[Asked]:
    """Requests with each of the adapters, with a soft prompt, and with none, in turns."""
    base = json.loads((BASE / "reference.json").read_text())["cases"]
    by_name = [(named(name), reference(name)["cases"]) for name in [*NAMES, "soft_prompt"]]
    listed = [(None, base[3:13:2]), *by_name]
    return [
        Asked(case["prompt_token_ids"], adapter, case["token_ids"], case["logprobs"])
        for i in range(5)
        for adapter, cases in listed
        for case in [cases[i]]
    ]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMEngine]:
    with make_engine(BASE, **SETTINGS, **LORA) as engine:
        engine.executor.wait_until_compiled()
        yield engine


@pytest.fixture
def engine(session: LLMEngine) -> LLMEngine:
    for number in range(1, 200):  # what an id stands for is remembered, though its adapter has made room
        session.remove_lora(number)
    return reset(session)


def run(engine: LLMEngine, requests: list[Asked], each: int | None = None) -> list[RequestOutput]:
    """Runs requests together, or so many at a time; returns their outputs in order."""
    outputs: dict[int, RequestOutput] = {}
    for first in range(0, len(requests), each or len(requests)):
        for i, asked in enumerate(requests[first : first + (each or len(requests))], start=first):
            engine.add_request(str(i), asked.prompt, asked.params, lora_request=asked.adapter)
        while engine.has_unfinished_requests():
            outputs |= {int(o.request_id): o for o in engine.step() if o.finished}
    assert engine.wait_if_idle()
    engine.scheduler.block_manager.check_integrity()
    assert not engine.scheduler.queues.running_adapters
    return [outputs[i] for i in range(len(requests))]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(o.token_ids) for o in output.outputs] for output in outputs]


def logprobs(output: RequestOutput) -> list[float]:
    return [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs or []]


def traces(engine: LLMEngine) -> int:
    return engine.executor.runner.compiled.num_traces  # pyright: ignore[reportAttributeAccessIssue]


def check(outputs: list[RequestOutput], requests: list[Asked]) -> None:
    assert tokens(outputs) == [[asked.token_ids] for asked in requests]
    for output, asked in zip(outputs, requests, strict=True):
        np.testing.assert_allclose(logprobs(output), asked.logprobs, atol=TOLERANCE)


@pytest.mark.quick
def test_eight_adapters_a_soft_prompt_and_the_model_alone_in_one_batch_are_what_peft_computes(
    engine: LLMEngine,
) -> None:
    requests, before = all_cases(), traces(engine)
    together = run(engine, requests)
    check(together, requests)
    engine.scheduler.forget_prefixes(None)
    alone = run(engine, requests, each=1)
    check(alone, requests)
    assert traces(engine) == before


def test_rows_of_the_model_alone_are_the_same_to_the_bit_beside_adapters(engine: LLMEngine) -> None:
    """In the same steps, those without any adapter are other programs."""
    soft = named("soft_prompt")
    requests = [asked for asked in all_cases() if asked.adapter != soft]
    outputs = []
    for given in (requests, [dataclasses.replace(asked, adapter=None) for asked in requests]):
        reschedule(engine, num_scheduler_steps=1, enable_prefix_caching=False)
        outputs.append(run(engine, given))
    same = [logprobs(a) == logprobs(b) for a, b in zip(*outputs, strict=True)]
    assert same == [asked.adapter is None for asked in requests]


@pytest.mark.quick
def test_the_slots_change_nothing(engine: LLMEngine) -> None:
    requests = [asked for asked in all_cases() if asked.adapter is not None][:16]
    first = run(engine, requests)
    slots = dict(engine.scheduler.adapters.slots)
    reschedule(engine)
    run(engine, requests[15:7:-1], each=1)
    second = run(engine, requests)
    assert slots.keys() == engine.scheduler.adapters.slots.keys()
    assert slots != engine.scheduler.adapters.slots
    assert [logprobs(o) for o in first] == [logprobs(o) for o in second]


@pytest.mark.parametrize("num_slots", [1, 3])
def test_more_adapters_than_slots(engine: LLMEngine, num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reschedule(engine, max_loras=num_slots)
    steps, requests = steps_of(engine, monkeypatch), all_cases()
    check(run(engine, requests), requests)
    for output in steps:
        of_rows = {steps.named[row.seq_id][0].adapter for row in output.scheduled} - {""}
        assert len(of_rows) <= num_slots
    assert sum(len(output.adapter_loads) for output in steps) >= 8


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_get_their_adapters_and_vectors_again(engine: LLMEngine, mode: Any) -> None:
    """In a pool for a few of them, in chunks, and with two slots: what is drawn is what it was."""
    sampled = SamplingParams(temperature=0.8, n=2, seed=5, max_tokens=12, logprobs=0)
    cases = all_cases()
    requests = cases[:30] + [dataclasses.replace(asked, params=sampled) for asked in cases[-10:]]
    wanted = tokens(run(engine, requests))
    reschedule(
        engine,
        num_blocks=40,
        max_num_batched_tokens=16,
        max_loras=2,
        preemption_mode=mode,
        enable_prefix_caching=mode == "swap",
    )
    outputs = run(engine, requests)
    assert tokens(outputs) == wanted
    assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 3


def check_that_nothing_is_shared(engine: LLMEngine) -> None:
    """The same text with two adapters, a soft prompt and none shares its blocks with itself alone."""
    text = np.random.default_rng(0).integers(0, 256, 40).tolist()
    of_each = [None, named("rank1"), named("rank3_mlp"), named("soft_prompt")]
    requests = [Asked(text, adapter) for adapter in of_each]
    first = run(engine, requests, each=1)
    assert [o.num_cached_tokens for o in first] == [0, 0, 0, 0]
    assert len({str(t) for t in tokens(first)}) == 4
    again = run(engine, requests, each=1)
    assert [o.num_cached_tokens for o in again] == [36, 36, 36, 44]
    assert tokens(again) == tokens(first)


@pytest.mark.quick
def test_the_prefix_cache_shares_nothing_between_adapters(engine: LLMEngine) -> None:
    check_that_nothing_is_shared(engine)


@pytest.mark.quick
def test_the_test_notices_a_missing_salt(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    make = engine_core.request_state

    def without_salt(*args: Any) -> Any:
        state = make(*args)
        state.group.request = dataclasses.replace(state.group.request, cache_salt="")
        return state

    monkeypatch.setattr(engine_core, "request_state", without_salt)
    with pytest.raises(AssertionError):
        check_that_nothing_is_shared(engine)


def test_the_cache_goes_by_what_an_adapter_does_and_not_by_its_name(
    engine: LLMEngine, tmp_path: Path
) -> None:
    text = list(range(40))
    folder = write_random(tmp_path / "a", BASE, 2, 0)
    shutil.copytree(folder, tmp_path / "b")
    (first,) = run(engine, [Asked(text, LoRARequest("a", 1, str(folder)))])
    (same,) = run(engine, [Asked(text, LoRARequest("b", 2, str(tmp_path / "b")))])
    assert (first.num_cached_tokens, same.num_cached_tokens) == (0, 36)
    assert engine.scheduler.adapters.slots.keys() == {engine.input_processor.adapters._kept[1].key}
    engine.remove_lora(1)
    write_random(folder, BASE, 2, 1)
    (other,) = run(engine, [Asked(text, LoRARequest("a", 1, str(folder)))])
    assert other.num_cached_tokens == 0
    assert tokens([first]) == tokens([same]) != tokens([other])


def test_adapters_come_and_go_under_traffic_and_nothing_is_traced(engine: LLMEngine, tmp_path: Path) -> None:
    """Each request is what the dense model computes whose weights its adapter was merged into."""
    folders = [write_random(tmp_path / str(i), BASE, 1 + i, i) for i in range(6)]
    rng, before, outputs = np.random.default_rng(1), traces(engine), {}
    prompts = rng.integers(0, 256, (24, 10)).tolist()
    for i, prompt in enumerate(prompts):
        request = LoRARequest(f"adapter {i}", 1 + i, str(folders[i % 6]))
        assert engine.add_lora(request)
        engine.add_request(str(i), prompt, GREEDY, lora_request=request)
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
        assert engine.remove_lora(1 + i)  # while it runs, or waits
        assert not engine.list_loras()
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert traces(engine) == before
    call = nnx.jit(lambda model, tokens: nnx.log_softmax(model(tokens)))
    for i, folder in enumerate(folders):
        model = merged(BASE, folder)
        texts = [prompts[j] + list(outputs[str(j)].outputs[0].token_ids) for j in range(i, 24, 6)]
        dense = np.asarray(call(model, np.array(texts)))[:, 9:-1]
        for rows, j in zip(dense, range(i, 24, 6), strict=True):
            drawn = outputs[str(j)].outputs[0].token_ids
            np.testing.assert_allclose(rows[range(24), drawn], logprobs(outputs[str(j)]), atol=TOLERANCE)
            assert (rows.max(-1) - rows[range(24), drawn] < TOLERANCE).all()


def test_what_does_not_fit_is_refused_and_the_engine_goes_on(engine: LLMEngine, tmp_path: Path) -> None:
    good = named("rank1")
    engine.add_request("running", [5, 6, 7], GREEDY, lora_request=good)
    engine.step()
    too_large = LoRARequest("large", 70, str(write_random(tmp_path / "large", BASE, 17, 0)))
    for request, part in (
        ("rank1", "`lora_request` must be None or a LoRARequest, got 'rank1'"),
        (LoRARequest("gone", 71, str(tmp_path / "gone")), "can't be read"),
        (too_large, "must be at most 16 (max_lora_rank), got 17"),
        (
            LoRARequest("rank1", good.lora_int_id, str(ADAPTERS / "rank3_mlp")),
            "`lora_int_id` must be another id for lora_name 'rank1'",
        ),
        (LoRARequest("other name", good.lora_int_id, good.lora_path), "is the id of lora_name 'rank1'"),
    ):
        with pytest.raises(ValueError, match=re.escape(part)) as caught:
            engine.add_request("bad", [5, -1], SamplingParams(), lora_request=request)  # pyright: ignore
        assert re.search(r"`prompt_token_ids\[1\]` must be .*got -1", str(caught.value))
    for bad in (("", 1, "x"), ("x", 0, "x"), ("x", 1, "")):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(*bad)
    assert engine.list_loras() == {good.lora_int_id}
    copies = [write_random(tmp_path / f"copy {i}", BASE, 1, i) for i in range(17)]
    for i, folder in enumerate(copies[:16]):
        assert engine.add_lora(LoRARequest(str(i), 100 + i, str(folder)))
        assert not engine.add_lora(LoRARequest(str(i), 100 + i, str(folder)))
    with pytest.raises(
        ValueError, match="`max_cpu_loras` must be an integer of at least 17 to add another adapter, got 16"
    ):
        engine.add_lora(LoRARequest("16", 116, str(copies[16])))
    (finished,) = [o for _ in range(60) for o in engine.step() if o.finished]
    (alone,) = run(engine, [Asked([5, 6, 7], good)])  # read again: it was not added
    assert tokens([finished]) == tokens([alone])
    assert not engine.remove_lora(999)


def test_adapters_that_only_requests_have_named_make_room(engine: LLMEngine, tmp_path: Path) -> None:
    folders = [write_random(tmp_path / str(i), BASE, 1, i) for i in range(20)]
    requests = [LoRARequest(str(i), 1 + i, str(folder)) for i, folder in enumerate(folders)]
    outputs = run(engine, [Asked([1, 2, 3], request) for request in requests])
    assert engine.list_loras() == set(range(5, 21))
    assert tokens(run(engine, [Asked([1, 2, 3], requests[0])])) == tokens(outputs[:1])


def test_llm_takes_one_adapter_for_all_prompts_or_one_for_each(engine: LLMEngine) -> None:
    cases = all_cases()[:10]
    prompts, adapters = [asked.prompt for asked in cases], [asked.adapter for asked in cases]
    executor = WrappedExecutor(engine.executor)
    llm = LLM(str(BASE), executor=executor, skip_tokenizer_init=True)
    outputs = llm.generate(prompts, GREEDY, lora_request=adapters, use_tqdm=False)
    check(outputs, cases)
    (one,) = llm.generate([prompts[1]], GREEDY, lora_request=adapters[1], use_tqdm=False)
    check([one], cases[1:2])
    with pytest.raises(ValueError, match="the length of `lora_request` must be 10, one per prompt, got 2"):
        llm.generate(prompts, GREEDY, lora_request=adapters[:2], use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompts\[1\]: `lora_request` must be .*got 'x'"):
        llm.generate(prompts[:2], GREEDY, lora_request=[None, "x"], use_tqdm=False)  # pyright: ignore


def test_searches_and_forks_keep_their_adapter(engine: LLMEngine) -> None:
    case = next(asked for asked in all_cases() if asked.adapter == named("rank3_mlp"))
    params: Any = BeamSearchParams(1, max_tokens=24)
    (searched,) = run(engine, [dataclasses.replace(case, params=params)])
    assert tokens([searched]) == [[case.token_ids]]
    engine.add_request("0", case.prompt, GREEDY, lora_request=case.adapter)
    while not engine.step():
        pass
    engine.fork("0", "fork")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [o for o in engine.step() if o.finished]
    assert tokens(outputs) == [[case.token_ids]] * 2


def test_what_can_not_be_done_with_adapters_says_so(engine: LLMEngine) -> None:
    engine.add_request("0", [1, 2, 3], GREEDY, lora_request=named("rank1"))
    engine.add_request("1", [1, 2, 3], GREEDY, lora_request=named("soft_prompt"))
    while not engine.step():
        pass
    for request_id in "01":
        with pytest.raises(ValueError, match="without a LoRA adapter"):
            engine.inspect(request_id)
    with pytest.raises(ValueError, match="`lora_request` must be none because an engine state"):
        engine.state()


def table() -> np.ndarray:
    return np.asarray(load_model(BASE, "float32").model.embed_tokens.embedding[...])


def test_vectors_of_tokens_are_these_tokens(engine: LLMEngine) -> None:
    """Beside adapters and tokens, of one and of many, in whole steps and in chunks; cached by content."""
    soft = named("soft_prompt")
    cases = [asked for asked in all_cases() if asked.adapter != soft]
    given = [
        dataclasses.replace(asked, prompt={"prompt_embeds": table()[asked.prompt]}) if i % 3 else asked
        for i, asked in enumerate(cases)
    ]
    before = traces(engine)
    check(run(engine, given), cases)
    reschedule(engine, max_num_batched_tokens=16)
    check(run(engine, given), cases)
    again = run(engine, given)
    check(again, cases)
    assert sum(o.num_cached_tokens for o in again) > 200
    assert traces(engine) == before


def test_other_vectors_of_the_same_length_share_nothing(engine: LLMEngine) -> None:
    rows = table()[:40]
    first, second, third = (
        run(engine, [Asked({"prompt_embeds": x}, None)])[0] for x in (rows, rows[::-1], rows.tolist())
    )
    (placeholders,) = run(engine, [Asked([0] * 40, None)])
    assert [o.num_cached_tokens for o in (first, second, third, placeholders)] == [0, 0, 36, 0]
    assert tokens([first]) == tokens([third]) != tokens([second])
    assert first.prompt_token_ids == [0] * 40


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (
            np.ones((3, 63)),
            "the shape of `prompt_embeds` must be [tokens, 64] with at least one token, got (3, 63)",
        ),
        (np.ones(64), "with at least one token, got (64,)"),
        (np.ones((0, 64)), "with at least one token, got (0, 64)"),
        (np.full((2, 64), np.nan), "the number of non-finite values in `prompt_embeds` must be 0, got 128"),
        (np.full((2, 64), 1e39), "non-finite"),
        ([["a"] * 64], "prompt_embeds"),
        ("text", "prompt_embeds"),
        (
            np.ones((128, 64)),
            "the number of tokens of `prompt` must be at most 127 (max_model_len - 1), got 128",
        ),
    ],
)
def test_vectors_that_do_not_fit(engine: LLMEngine, value: Any, part: str) -> None:
    with pytest.raises(ValueError, match="prompt") as caught:
        engine.check_request({"prompt_embeds": value})
    assert part in str(caught.value)


def test_what_has_no_meaning_for_vectors_is_refused(engine: LLMEngine) -> None:
    params = SamplingParams(repetition_penalty=1.2, prompt_logprobs=1, truncate_prompt_tokens=2)
    for prompt, adapter in (({"prompt_embeds": table()[:3]}, None), ([1, 2], named("soft_prompt"))):
        with pytest.raises(ValueError, match="whose vectors have no token ids") as caught:
            engine.check_request(prompt, params, lora_request=adapter)  # pyright: ignore[reportArgumentType]
        for name in (
            "`repetition_penalty` must be 1.0 with",
            "`prompt_logprobs` must be None with",
            "`truncate_prompt_tokens` must be None with",
        ):
            assert name in str(caught.value)
    with pytest.raises(ValueError, match="must be None with an adapter's soft prompt"):
        engine.check_request({"prompt_embeds": table()[:3]}, lora_request=named("soft_prompt"))
    with pytest.raises(ValueError, match="because embeddings can't be pinned"):
        engine.pin_prefix({"prompt_embeds": table()[:9]})


@pytest.mark.slow
def test_one_program_serves_all_with_batch_invariant() -> None:
    settings = SETTINGS | {"num_scheduler_steps": 1, "few_buckets": False, "batch_invariant": True}
    settings |= {"matmul_backend": "xla"}
    with make_engine(BASE, **settings, **LORA) as engine:
        kinds = [name.split(" ")[0] for name in engine.executor.buckets]
        assert kinds == ["lora-decode", "embeds-lora-mixed"]
        requests = all_cases()
        together = run(engine, requests)
        check(together, requests)
        engine.scheduler.forget_prefixes(None)
        alone = run(engine, requests, each=1)
        assert [logprobs(o) for o in together] == [logprobs(o) for o in alone]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3_fused", "gpt2_fan_in", "moe_attention"])
def test_other_families(name: str) -> None:
    expected = reference(name)
    settings = SETTINGS | {"max_model_len": None, "num_scheduler_steps": 1}
    with make_engine(FIXTURES / expected["base"], **settings, enable_lora=True) as engine:
        request = LoRARequest(name, 1, str(ADAPTERS / name))
        cases = [
            Asked(c["prompt_token_ids"], request, c["token_ids"], c["logprobs"]) for c in expected["cases"]
        ]
        check(run(engine, cases), cases)
