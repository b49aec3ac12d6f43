"""Beam search of the engine against a plain one: NumPy, float64, no cache, written from the definition."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.real_model import (
    CONFIG,
    VOCAB_SIZE,
    Request,
    drain,
    log_softmax,
    reschedule,
    run,
    run_alone,
    steps_of,
    tokens_of,
)
from helpers.real_model import add as add_requests
from safetensors.numpy import load_file

from jax_paged import BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.outputs import RequestOutput

# Every decision of the reference is clearer than MARGIN, and no log-probability of the engine is further off
# than half of it (2.1e-5 was seen): so float32 can't have turned one.
MARGIN, TOLERANCE = 7e-5, 3.5e-5
# No end token of this model is likely, so one token in ten ends a hypothesis.
EOS_TOKEN_IDS = frozenset(range(3, VOCAB_SIZE, 30))
PARAMS = SamplingParams(temperature=0)


class Float64Llama:
    """The model's definition, a text at a time as a whole."""

    def __init__(self, folder: Path) -> None:
        self._w = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}

    def last_logits(self, texts: np.ndarray) -> np.ndarray:
        """Returns the logits [N, V] after the last token of texts [N, L]."""
        w, (n, length) = self._w, texts.shape
        heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
        dim = CONFIG["hidden_size"] // heads
        frequencies = CONFIG["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        angles = np.tile(np.arange(length)[:, None] * frequencies, 2)
        masked = np.triu(np.full((length, length), -np.inf), 1)

        def norm(x: np.ndarray, name: str) -> np.ndarray:
            scale = np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"])
            return x / scale * w[f"model.{name}.weight"]

        def split(x: np.ndarray, count: int) -> np.ndarray:
            return x.reshape(n, length, count, dim).swapaxes(1, 2)

        def rotate(x: np.ndarray) -> np.ndarray:
            halves = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
            return x * np.cos(angles) + halves * np.sin(angles)

        x = w["model.embed_tokens.weight"][texts]
        for i in range(CONFIG["num_hidden_layers"]):

            def project(x: np.ndarray, name: str, i: int = i) -> np.ndarray:
                return x @ w[f"model.layers.{i}.{name}_proj.weight"].T

            y = norm(x, f"layers.{i}.input_layernorm")
            q = rotate(split(project(y, "self_attn.q"), heads))
            k = rotate(split(project(y, "self_attn.k"), kv_heads)).repeat(heads // kv_heads, 1)
            v = split(project(y, "self_attn.v"), kv_heads).repeat(heads // kv_heads, 1)
            scores = q @ k.swapaxes(2, 3) / np.sqrt(dim) + masked
            mixed = np.exp(log_softmax(scores)) @ v
            x = x + project(mixed.swapaxes(1, 2).reshape(n, length, -1), "self_attn.o")
            y = norm(x, f"layers.{i}.post_attention_layernorm")
            gate = project(y, "mlp.gate")
            x = x + project(gate / (1 + np.exp(-gate)) * project(y, "mlp.up"), "mlp.down")
        return norm(x[:, -1], "norm") @ w["lm_head.weight"].T


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    tokens: list[int]
    cum_logprob: float
    score: float = 0.0
    ended: bool = False


@dataclasses.dataclass(frozen=True)
class Found:
    best: list[Hypothesis]
    margin: float
    num_ended: int


def plain_beam_search(model: Float64Llama, prompt: list[int], params: BeamSearchParams) -> Found:
    """Each beam's 2k likeliest tokens; those that end complete it, the k best others go on."""
    k, margin = params.beam_width, np.inf
    ends = frozenset() if params.ignore_eos else EOS_TOKEN_IDS
    beams, completed = [Hypothesis(prompt, 0.0)], []

    def gap(ranked: list[float], place: int) -> float:
        """By how much the order of the first `place` is decided."""
        pairs = itertools.pairwise(ranked[: place + 1])
        return min((abs(a - b) for a, b in pairs), default=np.inf)

    for _ in range(params.max_tokens):
        logits = model.last_logits(np.array([beam.tokens for beam in beams]))
        candidates = []
        for beam, row in zip(beams, log_softmax(logits / (params.temperature or 1)), strict=True):
            order = np.argsort(-row)
            margin = min(margin, row[order[2 * k - 1]] - row[order[2 * k]])
            for token_id in order[: 2 * k].tolist():
                new = Hypothesis([*beam.tokens, token_id], beam.cum_logprob + row[token_id])
                (completed if token_id in ends else candidates).append(new)
        candidates.sort(key=lambda h: -h.cum_logprob)
        margin = min(margin, gap([h.cum_logprob for h in candidates[k - 1 : k + 1]], 1))
        beams = candidates[:k]

    def scored(h: Hypothesis) -> Hypothesis:
        ended = h.tokens[-1] in ends
        length = len(h.tokens) - ended
        return dataclasses.replace(h, score=h.cum_logprob / length**params.length_penalty, ended=ended)

    ranked = sorted(map(scored, completed + beams), key=lambda h: -h.score)
    margin = min(margin, gap([h.score for h in ranked], k))
    return Found(ranked[:k], margin, sum(h.ended for h in ranked[:k]))


@dataclasses.dataclass(frozen=True)
class Case:
    prompt: list[int]
    params: BeamSearchParams


def make_cases(seeds: tuple[int, ...]) -> list[Case]:
    """Every width with every penalty, temperature and kind of end; prompts around block boundaries."""
    kinds = itertools.product((2, 4, 6), (0.5, 1.0, 2.0), (False, True))
    cases = []
    for i, ((width, penalty, ignore_eos), seed) in enumerate(zip(kinds, seeds, strict=True)):
        temperature = (0.0, 0.6, 1.7)[(i // 2 + i // 6 + i % 2) % 3]
        params = BeamSearchParams(width, 16, ignore_eos, temperature, penalty)
        length = (1, 15, 16, 17, 32, 40)[(i + i // 6) % 6]
        cases.append(Case(np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist(), params))
    return cases


# Of the seeds from 0 on, the first with the margin.
CASES = make_cases((0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 22))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Found]:
    model = Float64Llama(checkpoint)
    return [plain_beam_search(model, case.prompt, case.params) for case in CASES]


def assert_found(outputs: list[RequestOutput], expected: list[Found]) -> None:
    for case, output, found in zip(CASES, outputs, expected, strict=True):
        got = [case.prompt + o.token_ids for o in output.outputs]
        assert got == [h.tokens for h in found.best], case.params
        for completion, h in zip(output.outputs, found.best, strict=True):
            assert abs(completion.cumulative_logprob - h.cum_logprob) < TOLERANCE
            assert completion.finish_reason == ("stop" if h.ended else "length")


REQUESTS = [Request(case.prompt, PARAMS, case.params) for case in CASES]


def test_the_reference_is_the_model(checkpoint: Path, dense: Any) -> None:
    prompts = [case.prompt for case in CASES]
    model = Float64Llama(checkpoint)
    for prompt, logits in zip(prompts, dense.logits(prompts), strict=True):
        assert np.abs(model.last_logits(np.array([prompt]))[0] - logits[-1]).max() < 1e-4


def test_cases_are_decided_and_as_demanding_as_they_should_be(expected: list[Found]) -> None:
    print("margins", sorted(f"{found.margin:.1e}" for found in expected))
    assert min(found.margin for found in expected) > MARGIN
    with_end = [found for case, found in zip(CASES, expected, strict=True) if not case.params.ignore_eos]
    assert sum(found.num_ended for found in with_end) > 10
    assert any(0 < found.num_ended < len(found.best) for found in with_end)
    lengths = {len(h.tokens) - len(c.prompt) for c, f in zip(CASES, expected, strict=True) for h in f.best}
    assert len(lengths & set(range(2, 10))) >= 4, "hypotheses end in the middle"
    outputs = [h.tokens[len(c.prompt) :] for c, f in zip(CASES, expected, strict=True) for h in f.best]
    ended = [c.params.ignore_eos for c, f in zip(CASES, expected, strict=True) for _ in f.best]
    assert any(
        ignored and not EOS_TOKEN_IDS.isdisjoint(o[:-1]) for o, ignored in zip(outputs, ended, strict=True)
    )


@pytest.fixture(params=[4, 16])
def any_engine(request: pytest.FixtureRequest) -> LLMEngine:
    """An engine of either block size in which the likely end tokens end a sequence."""
    engine = request.getfixturevalue("shared_engine" if request.param == 4 else "engine")
    assert engine.config.block_size == request.param
    reschedule(engine, eos_token_ids=EOS_TOKEN_IDS)
    return engine


def test_one_after_the_other(any_engine: LLMEngine, expected: list[Found]) -> None:
    outputs = run_alone(any_engine, REQUESTS)
    assert_found(outputs, expected)
    off = [
        abs(o.cumulative_logprob - h.cum_logprob)
        for output, found in zip(outputs, expected, strict=True)
        for o, h in zip(output.outputs, found.best, strict=True)
    ]
    print(f"log-probabilities are off by {max(off):.1e} at most")


def test_all_together_and_again_from_the_cache(any_engine: LLMEngine, expected: list[Found]) -> None:
    assert_found(run(any_engine, REQUESTS), expected)
    again = run(any_engine, REQUESTS)
    assert_found(again, expected)
    size = any_engine.config.block_size
    assert [o.num_cached_tokens for o in again] == [(len(c.prompt) - 1) // size * size for c in CASES]


def ordinary_requests() -> list[Request]:
    rng = np.random.default_rng(5)
    requests = []
    for i in range(12):
        params = SamplingParams(
            n=(1, 1, 3)[i % 3], temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=30, ignore_eos=True
        )
        requests.append(Request(rng.integers(0, VOCAB_SIZE, 5 + 3 * i).tolist(), params))
    return requests


@pytest.mark.thorough
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap", None])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_under_pressure_beside_others(
    shared_engine: LLMEngine,
    expected: list[Found],
    preemption_mode: str | None,
    enable_prefix_caching: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = ordinary_requests()
    alone = run_alone(shared_engine, others)
    # The largest search alone needs 36 blocks.
    reschedule(
        shared_engine,
        num_blocks=39,
        eos_token_ids=EOS_TOKEN_IDS,
        preemption_mode=preemption_mode,
        enable_prefix_caching=enable_prefix_caching,
    )
    steps = steps_of(shared_engine, monkeypatch)
    outputs = run(shared_engine, [*REQUESTS, *others])
    assert_found(outputs[: len(REQUESTS)], expected)
    for output, single in zip(outputs[len(REQUESTS) :], alone, strict=True):
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in single.outputs]
    preempted = [o.metrics.num_preemptions for o in outputs]
    assert sum(n > 0 for n in preempted[: len(REQUESTS)]) >= 4
    assert max(preempted) <= 10
    num_swapped = sum(len(step.blocks_to_swap_out) for step in steps)
    assert (num_swapped > 50) == (preemption_mode != "recompute")
    assert num_swapped == sum(len(step.blocks_to_swap_in) for step in steps)
    print(f"{preemption_mode}: {sum(preempted)} preemptions, at most {max(preempted)}; {num_swapped} swapped")


def test_width_1_is_greedy(engine: LLMEngine) -> None:
    prompts = [case.prompt for case in CASES]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    searches = [Request(p, PARAMS, BeamSearchParams(1, max_tokens=16, ignore_eos=True)) for p in prompts]
    outputs = run(engine, [*searches, *(Request(p, greedy) for p in prompts)])
    assert tokens_of(outputs[: len(prompts)]) == tokens_of(outputs[len(prompts) :])


def test_memory_sharing(shared_engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that beams take, and would take if each had its own; the paper saves 38 to 66% (figure 15)."""
    manager, schedule = shared_engine.scheduler.block_manager, shared_engine.scheduler.schedule
    counts = np.zeros(2, int)

    def count(now: float) -> Any:
        output = schedule(now)
        tables = [tables[0] for tables in manager.block_tables.values()]
        counts[:] += len({block for table in tables for block in table}), sum(map(len, tables))
        return output

    monkeypatch.setattr(shared_engine.scheduler, "schedule", count)
    rng = np.random.default_rng(0)
    saved = {}
    for width in (2, 4, 6):
        counts[:] = 0
        params = BeamSearchParams(width, max_tokens=60, ignore_eos=True)
        # About the paper's Alpaca lengths: 19 tokens in, 58 out.
        prompts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (15, 19, 23)]
        run(shared_engine, [Request(p, PARAMS, params) for p in prompts])
        saved[width] = 1 - counts[0] / counts[1]
    print("beam search, blocks of 4: share of blocks saved", {k: f"{v:.1%}" for k, v in saved.items()})
    # The prompts are two fifths of the tokens on average, and all beams but one share them.
    for width, share in saved.items():
        assert share > 0.4 * (1 - 1 / width)
    assert saved[2] < saved[4] < saved[6]


def test_abort_half_way(shared_engine: LLMEngine, expected: list[Found]) -> None:
    reschedule(shared_engine, eos_token_ids=EOS_TOKEN_IDS)
    add_requests(shared_engine, REQUESTS[:6])
    for _ in range(5):
        assert all(not output.outputs for output in shared_engine.step() if not output.finished)
    running = next(iter(shared_engine.scheduler.queues.running))
    state = shared_engine.abort_request(running)
    assert state is not None
    assert {o.finish_reason for o in state.output().outputs} == {"abort"}
    finished = drain(shared_engine)
    for i, found in enumerate(expected[:6]):
        if str(i) in finished:
            assert [o.token_ids for o in finished[str(i)].outputs] == [
                h.tokens[len(CASES[i].prompt) :] for h in found.best
            ]
