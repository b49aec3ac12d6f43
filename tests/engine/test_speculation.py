"""Tokens that are drafted and verified: every output is that of one token after the other."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.eagle_heads import CONFIG as HEAD_CONFIG
from helpers.eagle_heads import random_tensors, write_head
from helpers.real_model import (
    TOLERANCE,
    VOCAB_SIZE,
    Request,
    add,
    assert_no_block_lost,
    finished_outputs,
    make_engine,
    mixed_requests,
    nan_embedding,
    reschedule,
    reset,
    run,
)
from helpers.windowed_model import write_windowed_checkpoint
from safetensors.numpy import load_file, save_file

from jax_paged import BeamSearchParams, EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from jax_paged.lab.recording import replay
from jax_paged.outputs import RequestOutput
from jax_paged.speculation import Speculation
from jax_paged.worker import traced_features

pytestmark = pytest.mark.thorough

SIZES = {"block_size": 4, "max_num_seqs": 40, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 1200}
# Methods that draft whatever there is; the random requests of a random model give "ngram" little to find.
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "adaptive": False}
DRAFT_MODEL = {"method": "draft_model", "adaptive": False}
EAGLE = {"method": "eagle3", "adaptive": False}


def methods(*sizes: int, of: tuple[dict[str, Any], ...] = (NGRAM, DRAFT_MODEL)) -> list[Any]:
    return [
        pytest.param({**method, "num_speculative_tokens": k}, id=f"{method['method']} {k}")
        for method in of
        for k in sizes
    ]


@pytest.fixture(scope="module")
def other_draft(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like the one that is served, with other weights: it is right now and then."""
    folder = tmp_path_factory.mktemp("draft")
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    rng = np.random.default_rng(5)
    tensors = load_file(checkpoint / "model.safetensors")
    changed = {k: v + rng.normal(0, 0.25 * v.std(), v.shape).astype(v.dtype) for k, v in tensors.items()}
    save_file(changed, folder / "model.safetensors")
    return folder


def speculating(checkpoint: Path, draft: Path, config: dict[str, Any], **settings: Any) -> LLMEngine:
    own = {} if config["method"] == "ngram" else {"model": str(draft)}
    return make_engine(
        checkpoint, few_buckets=True, speculative_config={**config, **own}, **{**SIZES, **settings}
    )


def random_requests(seed: int, count: int, max_output: int = 40) -> list[Request]:
    """Draws requests of every kind; many choose among few tokens, so that their texts repeat."""
    rng = np.random.default_rng(seed)
    requests = mixed_requests(seed, count, max_prompt=30, max_output=max_output)
    shared = rng.integers(0, VOCAB_SIZE, 24).tolist()
    for i, request in enumerate(requests):
        params, prompt = request.params, request.prompt
        params.temperature = [0.0, 0.8, 1.3][int(rng.integers(3))]
        if rng.random() < 0.6:
            params.allowed_token_ids = rng.integers(8, VOCAB_SIZE, int(rng.integers(2, 6))).tolist()
            params.logit_bias, params.min_tokens = None, 0
        if rng.random() < 0.3:
            params.n = 4
        if rng.random() < 0.3:
            params.stop_token_ids = rng.integers(0, VOCAB_SIZE, 9).tolist()
        elif rng.random() < 0.2:
            params.stop = [chr(97 + int(rng.integers(26)))]
        if rng.random() < 0.5:
            prompt = shared[: int(rng.integers(1, 25))] + prompt
        requests[i] = dataclasses.replace(request, prompt=prompt)
    kind = int(rng.integers(4))
    some = SamplingParams(temperature=0.8, seed=seed, max_tokens=30)
    form = StructuredOutputsParams(regex="(ab|cde|ab ab )*f")
    requests.append(Request(shared[:7], dataclasses.replace(some, structured_outputs=form)))
    requests.append(Request(shared[:5], dataclasses.replace(some, bad_words_token_ids=[[9, 10], [11]])))
    if kind == 0:
        requests.append(Request(shared[:9], SamplingParams(), BeamSearchParams(3, max_tokens=9)))
    return requests


def in_turns(
    engine: LLMEngine, requests: list[Request], **settings: Any
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Returns the outputs without drafts, one step at a time, and with them."""
    depth, engine._core.max_in_flight = engine._core.max_in_flight, 1
    reschedule(reset(engine), speculation=None, num_scheduler_steps=1)
    expected = run(engine, requests)
    engine._core.max_in_flight = depth
    reschedule(engine, **settings)
    return expected, run(engine, requests)


def assert_same(expected: list[RequestOutput], outputs: list[RequestOutput]) -> None:
    for before, after in zip(expected, outputs, strict=True):
        assert [list(x.token_ids) for x in after.outputs] == [list(x.token_ids) for x in before.outputs]
        for want, got in zip(before.outputs, after.outputs, strict=True):
            assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
            assert got.stop_reason == want.stop_reason
            assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=30 * TOLERANCE)
            for a, b in zip(want.logprobs or (), got.logprobs or (), strict=True):
                assert a.keys() == b.keys()
                assert all(abs(a[t].logprob - b[t].logprob) < TOLERANCE for t in a)


@pytest.fixture(scope="module", params=methods(3))
def engine(request: Any, checkpoint: Path, other_draft: Path) -> Iterator[LLMEngine]:
    with speculating(checkpoint, other_draft, request.param) as engine:
        yield engine


@pytest.mark.parametrize("depth", [1, 2])
def test_random_requests(engine: LLMEngine, depth: int) -> None:
    engine._core.max_in_flight = depth
    assert_same(*in_turns(engine, random_requests(depth, 10)))
    drafts = engine.scheduler.drafts
    assert drafts.num_verified > 20
    assert 0 < sum(drafts.num_accepted) < drafts.num_drafts


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_small_pool(engine: LLMEngine, mode: str) -> None:
    requests = [r for r in random_requests(3, 12) if r.beams is None]
    expected, outputs = in_turns(engine, requests, num_blocks=60, num_swap_blocks=600, preemption_mode=mode)
    assert_same(expected, outputs)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert engine.scheduler.drafts.num_verified > 10


def test_what_unwritten_blocks_hold_does_not_matter(engine: LLMEngine) -> None:
    requests = random_requests(4, 6)
    reschedule(reset(engine))
    expected = run(engine, requests)
    reschedule(engine)
    engine.executor.runner.fill_kv_cache(float("nan"))  # pyright: ignore[reportAttributeAccessIssue]
    assert_same(expected, run(engine, requests))
    engine.executor.runner.fill_kv_cache(0.0)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_recording_replays(engine: LLMEngine) -> None:
    reset(engine)
    lines: list[str] = []
    engine.record(lines.append)
    run(engine, random_requests(5, 6))
    engine.record(None)
    assert engine.scheduler.drafts.num_verified == 0
    replay(lines)


def test_requests_that_come_go_and_are_edited(engine: LLMEngine) -> None:
    """A fork, a rollback and a draft by hand, between steps that verify."""
    reset(engine)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, allowed_token_ids=[9, 20, 31, 42])
    (expected,) = run(engine, [Request([5, 6, 7], params)])
    add(engine, [Request([5, 6, 7], params)] * 2)
    for _ in range(5):
        engine.step()
    engine.rollback("0", 3)
    engine.fork("1", "fork")
    engine.verify("1", [9, 20])
    outputs = finished_outputs(engine)
    assert_no_block_lost(engine)
    assert {tuple(o.outputs[0].token_ids) for o in outputs.values()} == {tuple(expected.outputs[0].token_ids)}
    assert len(outputs) == 3


@pytest.mark.parametrize("config", methods(3))
def test_bursts_and_what_pays(checkpoint: Path, other_draft: Path, config: dict[str, Any]) -> None:
    """With adaptation, steps with drafts, bursts and others follow each other as it happens."""
    config = {**config, "adaptive": True}
    with speculating(checkpoint, other_draft, config, num_scheduler_steps=4, async_scheduling=True) as engine:
        for seed in range(2):
            assert_same(*in_turns(engine, random_requests(20 + seed, 8)))


@pytest.mark.quick
def test_the_model_itself_drafts_what_it_draws(checkpoint: Path) -> None:
    with speculating(checkpoint, checkpoint, {**DRAFT_MODEL, "num_speculative_tokens": 3}) as engine:
        requests = [r for r in random_requests(6, 10) if not r.params.structured_outputs]
        assert_same(*in_turns(engine, requests))
        drafts = engine.scheduler.drafts
        # Those behind the last token of an output, or a stop, count as not accepted.
        assert sum(drafts.num_accepted) > 0.8 * drafts.num_drafts
        long = SamplingParams(n=4, temperature=1.3, seed=1, max_tokens=201, ignore_eos=True)
        reschedule(reset(engine))
        run(engine, [Request([3, 4], long), Request([9] * 20, dataclasses.replace(long, temperature=0, n=1))])
        drafts = engine.scheduler.drafts
        assert sum(drafts.num_accepted) >= 0.99 * drafts.num_drafts > 700


def test_layers_with_windows(tmp_path: Path) -> None:
    write_windowed_checkpoint(tmp_path, 12)
    settings = {"speculative_config": NGRAM, "skip_tokenizer_init": True, **SIZES}
    with make_engine(tmp_path, few_buckets=True, **settings) as engine:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        prompts = np.random.default_rng(0).integers(0, 64, (4, 30)).tolist()
        few = [dataclasses.replace(params, allowed_token_ids=[3, 9, 12])] * 4
        requests = [Request(p, x) for p, x in zip(prompts, few, strict=True)]
        assert_same(*in_turns(engine, requests))
        assert sum(engine.scheduler.drafts.num_accepted) > 10


@pytest.mark.slow
@pytest.mark.parametrize("config", methods(1, 3, 7, of=(NGRAM, DRAFT_MODEL, EAGLE)))
def test_three_hundred_random_requests(
    checkpoint: Path, other_draft: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    draft = other_draft
    if config["method"] == "eagle3":
        draft = write_head(tmp_path, HEAD_CONFIG, random_tensors(HEAD_CONFIG))
    with speculating(checkpoint, draft, config, num_scheduler_steps=8) as engine:
        pools = itertools.cycle([{}, {"num_blocks": 60, "preemption_mode": "swap"}, {"num_blocks": 60}])
        for seed, pool in zip(range(25), pools, strict=False):
            engine._core.max_in_flight = 1 + seed % 2
            requests = random_requests(100 + seed, 12)
            if pool:
                requests = [r for r in requests if r.beams is None]
            assert_same(*in_turns(engine, requests, num_swap_blocks=600 if pool else None, **pool))
            assert sum(engine.scheduler.drafts.num_accepted) > 0


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_form_leaves_no_choice_about_is_drafted(checkpoint: Path, adaptive: bool, depth: int) -> None:
    config = {**NGRAM, "num_speculative_tokens": 7, "adaptive": adaptive}
    form = StructuredOutputsParams(regex="[ab](cdefghijkl){3}[ab](mnopqrstuvw){3}x")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=70, structured_outputs=form)
    requests = [Request([5, 6], params), Request([7, 8, 9], dataclasses.replace(params, n=3))]
    with speculating(checkpoint, checkpoint, config, async_scheduling=depth > 1) as engine:
        assert engine._core.max_in_flight == depth
        lines: list[str] = []
        engine.record(lines.append)
        assert_same(*in_turns(engine, requests))
        drafts = engine.scheduler.drafts
        assert 4 * 40 < sum(drafts.num_accepted) == drafts.num_drafts
        assert drafts.num_verified < 4 * 30
        engine.record(None)
        replay(lines)
        replay(lines, num_blocks=800)


def test_penalties_that_forget_drafts_are_noticed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted mistake: rows behind drafts count the tokens up to the last known one only."""
    right = traced_features.drafts_before

    def forgetful(step: Any, tokens: Any, vocab_size: int) -> Any:
        return right(step, tokens, vocab_size) * 0 + vocab_size

    monkeypatch.setattr(traced_features, "drafts_before", forgetful)
    few = {"allowed_token_ids": [9, 20, 31, 42], "ignore_eos": True, "frequency_penalty": 0.3}
    params = SamplingParams(temperature=0, max_tokens=60, **few)
    requests = [Request([5, 6, 7 + i], params) for i in range(4)]
    with speculating(checkpoint, checkpoint, {**NGRAM, "num_speculative_tokens": 5}) as engine:
        expected, outputs = in_turns(engine, requests)
        assert [o.outputs[0].token_ids for o in outputs] != [o.outputs[0].token_ids for o in expected]
        assert sum(engine.scheduler.drafts.num_accepted) > 0


@pytest.mark.quick
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ngram", "`speculative_config` must be None or a dict with some of the keys method, .*got 'ngram'"),
        ({"methods": "ngram"}, "a dict with some of the keys method, .*did you mean 'method'"),
        ({"method": "medusa"}, "`method` must be .*got 'medusa'"),
        ({"method": "draft_model"}, "`model` must be the name or folder of a draft model, got None"),
        ({"method": "ngram", "model": "pagelet"}, "`model` must be None with method='ngram', got 'pagelet'"),
        ({"num_speculative_tokens": 0}, "`num_speculative_tokens` must be .*got 0"),
        (
            {"num_speculative_tokens": True, "adaptive": 1},
            "(?s)`num_speculative_tokens` must be .*got True.*`adaptive` must be .*got 1",
        ),
        (
            {"prompt_lookup_min": 5},
            "`prompt_lookup_max` must be at least prompt_lookup_min, which is 5, got 4",
        ),
    ],
)
def test_bad_settings(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs(speculative_config=config)


def test_a_draft_model_that_does_not_fit(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)pagelet.*vocabulary"):
        make_engine(checkpoint, speculative_config={"model": "pagelet"})


@pytest.mark.quick
def test_it_is_off_beside_batch_invariance() -> None:
    with pytest.raises(ValueError, match="None with batch_invariant"):
        EngineArgs(speculative_config={"method": "ngram"}, batch_invariant=True)
    assert Speculation("ngram", 3).max_rows(512) == 256


def test_drafts_by_hand_are_not_counted(engine: LLMEngine) -> None:
    """There may be more of them than the engine would draft."""
    reset(engine)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (expected,) = run(engine, [Request([5, 6, 7], params)])
    reschedule(engine)
    add(engine, [Request([5, 6, 7], params)])
    while not engine.step()[0].outputs[0].token_ids:
        pass
    engine._core.wait_for_steps()
    seq = next(iter(engine.scheduler.queues.running.values())).sequences[0]
    right = list(expected.outputs[0].token_ids)[len(seq.output_token_ids) :][:9]
    before = engine.scheduler.drafts.num_drafts
    assert engine.verify("0", right).num_accepted == 9
    assert engine.scheduler.drafts.num_drafts == before
    assert list(finished_outputs(engine)["0"].outputs[0].token_ids) == list(expected.outputs[0].token_ids)


def test_logits_behind_a_wrong_draft_end_nobody(engine: LLMEngine) -> None:
    """A token with a broken embedding is drafted and never drawn; where it is drawn, its sequence ends."""
    reset(engine)
    few = {"temperature": 0, "ignore_eos": True, "max_tokens": 30, "allowed_token_ids": [9, 20, 31, 42]}
    requests = [
        Request([50, 9, 60, 50, 20, 50], SamplingParams(**few)),
        Request([3, 50], SamplingParams(**few)),
    ]
    drawn = [list(o.outputs[0].token_ids) for o in run(engine, requests)]
    unused = [t for t in (9, 20, 31, 42) if all(t not in tokens for tokens in drawn)]
    with nan_embedding(engine, [*unused, drawn[0][12]]):
        expected, outputs = in_turns(engine, requests)
    for before, after in zip(expected, outputs, strict=True):
        want, got = list(before.outputs[0].token_ids), list(after.outputs[0].token_ids)
        assert after.outputs[0].finish_reason == before.outputs[0].finish_reason
        # The rows in front of a broken draft may see its values: their sequence then ends a little early.
        assert got == want or (got == want[: len(got)] and after.outputs[0].finish_reason == "abort")


def test_a_recording_with_other_drafts_is_refused(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    reset(engine)
    lines: list[str] = []
    engine.record(lines.append)
    run(engine, [Request([5, 6], SamplingParams(temperature=0, max_tokens=5))])
    engine.record(None)
    engine.replay(lines)
    config = dataclasses.replace(engine.config, speculation=None)
    monkeypatch.setattr(engine._core, "config", config)
    with pytest.raises(ValueError, match="speculation in `lines`"):
        engine.replay(lines)
