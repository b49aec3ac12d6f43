"""The sampler against a float64 NumPy reference, written from the definitions of the parameters."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jax_paged.sampling_params import SamplingParams
from jax_paged.worker.sampling.sampler import (
    IN_PROMPT,
    SampledTokens,
    SamplerOptions,
    SamplingBatch,
    _find,
    _integers_below,
    _weights,
    token_logprobs,
)
from jax_paged.worker.sampling.token_rules import pack_token_mask

V = 50
DRAWS = 20_000
MAX_LOGPROBS = 20
ORDER = ("bias", "repetition", "frequency", "presence", "temperature", "min_p", "top_k", "top_p")
GREEDY = SamplingParams(temperature=0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence at the moment it samples.

    `forbidden` tokens are biased by minus infinity, those outside `allowed` are masked.
    """

    params: SamplingParams = dataclasses.field(default_factory=lambda: GREEDY)
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    forbidden: tuple[int, ...] = ()
    seed: int = 0
    position: int = 0
    logprob_temperature: float = 1.0
    allowed: tuple[int, ...] | None = None
    keeps_draw: bool = False

    @property
    def bias(self) -> list[tuple[int, float]]:
        return [*(self.params.logit_bias or {}).items(), *((i, -math.inf) for i in self.forbidden)]


def make_batch(rows: Sequence[Row], vocab_size: int, num_batch_slots: int | None = None) -> SamplingBatch:
    """The batch of some rows; those with penalties have any of the batch slots, beside others."""
    num_batch_slots = len(rows) if num_batch_slots is None else num_batch_slots
    rng = np.random.default_rng(num_batch_slots)
    token_counts = rng.integers(0, 5, (num_batch_slots, vocab_size), np.int32)
    batch_slots = iter(rng.permutation(num_batch_slots))
    count_slots = np.full(len(rows), num_batch_slots, np.int32)
    token_mask = rng.integers(-(2**31), 2**31, (len(rows), -(-vocab_size // 32))).astype(np.int32)
    bias_ids = np.full((len(rows), 64), vocab_size, np.int32)
    bias_values = np.zeros((len(rows), 64), np.float32)
    for i, row in enumerate(rows):
        p = row.params
        if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1:
            count_slots[i] = next(batch_slots)
            counts = np.bincount(np.array(row.output, int), minlength=vocab_size)
            counts[list(row.prompt)] |= IN_PROMPT
            token_counts[count_slots[i]] = counts
        if row.allowed is not None:
            token_mask[i] = pack_token_mask(row.allowed, vocab_size)
        for j, (token_id, value) in enumerate(row.bias):
            bias_ids[i, j], bias_values[i, j] = token_id, value

    def column(get: Callable[[Row], Any], dtype: Any) -> np.ndarray:
        return np.array([get(row) for row in rows], dtype)

    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    fields: dict[str, Any] = {
        name: column(lambda r, n=name: getattr(r.params, n), np.float32) for name in names
    }
    fields |= {
        "logprob_temperature": column(lambda r: r.logprob_temperature, np.float32),
        "top_k": column(lambda r: r.params.top_k, np.int32),
        "seed": column(lambda r: (r.seed >> 32, r.seed & 0xFFFFFFFF), np.uint32),
        "position": column(lambda r: r.position, np.int32),
        "wants_logprobs": column(lambda r: r.params.logprobs is not None, bool),
        "count_slots": count_slots,
        "token_counts": token_counts,
        "has_token_mask": column(lambda r: r.allowed is not None, bool),
        "keeps_draw": column(lambda r: r.keeps_draw, bool),
        "token_mask": token_mask,
        "bias_ids": bias_ids,
        "bias_values": bias_values,
    }
    return SamplingBatch(**{name: jnp.asarray(value) for name, value in fields.items()})


def reference(logits: np.ndarray, row: Row, order: Sequence[str] = ORDER) -> np.ndarray:
    """The float64 probabilities of the next token of one row, temperature above 0."""
    p, x = row.params, logits.astype(np.float64)
    counts = np.bincount(np.array(row.output, int), minlength=len(x))
    seen = np.isin(np.arange(len(x)), (*row.prompt, *row.output))

    def probabilities(x: np.ndarray) -> np.ndarray:
        weights = np.exp(x - x.max())
        return weights / weights.sum()

    if row.allowed is not None:
        x[np.setdiff1d(np.arange(len(x)), row.allowed)] = -np.inf
    for step in order:
        if step == "bias":
            for token_id, value in row.bias:
                x[token_id] += value
        elif step == "repetition":
            x = np.where(seen, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
        elif step == "frequency":
            x = x - p.frequency_penalty * counts
        elif step == "presence":
            x = x - p.presence_penalty * (counts > 0)
        elif step == "temperature":
            x = x / p.temperature
        elif step == "min_p":
            x = np.where(probabilities(x) >= p.min_p * probabilities(x).max(), x, -np.inf)
        elif step == "top_k" and 0 < p.top_k < len(x):
            x = np.where(x >= np.sort(x)[-p.top_k], x, -np.inf)
        elif step == "top_p" and p.top_p < 1:
            ids = np.argsort(-x, kind="stable")
            mass = np.cumsum(probabilities(x)[ids])
            assert np.abs(mass - p.top_p).min() > 1e-6, "the case hangs on rounding: choose another top_p"
            x[ids[np.searchsorted(mass, p.top_p) + 1 :]] = -np.inf
    return probabilities(x)


traces: list[tuple[int, ...]] = []


@jax.jit
def step(logits: jax.Array, batch: SamplingBatch) -> SampledTokens:
    traces.append(logits.shape)
    return SamplerOptions(max_logprobs=MAX_LOGPROBS).sample(logits, batch)


def run(logits: np.ndarray, rows: Sequence[Row], num_batch_slots: int | None = None) -> Any:
    """Samples the rows, each from its own logits or all from the same; all in NumPy arrays."""
    shared = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (len(rows), logits.shape[-1]))
    got = step(shared, make_batch(rows, logits.shape[-1], num_batch_slots))
    return types.SimpleNamespace(**{name: np.asarray(value) for name, value in vars(got).items()})


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    """The p-value of the tokens' counts; 0 if one fell where the probability is 0. Rare ones are merged."""
    observed = np.bincount(tokens, minlength=len(probabilities))
    if observed[probabilities == 0].any():
        return 0.0
    expected = probabilities * len(tokens)
    rare = expected < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    cells = expected > 0
    if cells.sum() == 1:
        return 1.0
    statistic = ((observed - expected)[cells] ** 2 / expected[cells]).sum()
    return float(stats.chi2.sf(statistic, cells.sum() - 1))


def random_logits(*shape: int, seed: int = 0, scale: float = 1.5) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


LOGITS = random_logits(V)
LIKELY = tuple(int(i) for i in np.argsort(-LOGITS))
PROMPT, OUTPUT = LIKELY[:4], (*LIKELY[2:8], *LIKELY[2:5], LIKELY[2])


def case(wrong: dict[str, Any], /, **params: Any) -> tuple[Row, dict[str, Any]]:
    """A row, and what a wrong reference takes instead: parameters, text or order."""
    return Row(SamplingParams(**params), PROMPT, OUTPUT), wrong


def swapped(first: str, second: str) -> dict[str, Any]:
    return {"order": tuple({first: second, second: first}.get(step, step) for step in ORDER)}


CASES = {
    "plain": case({"temperature": 1.07}),
    "temperature low": case({"temperature": 0.54}, temperature=0.5),
    "temperature high": case({"temperature": 2.3}, temperature=2.0),
    "temperature huge": case({"temperature": 10.0}, temperature=1e6),
    "top_k": case({"top_k": 8}, top_k=7),
    "top_k one": case({"top_k": 2}, top_k=1),
    "top_k above the vocabulary": case({"top_k": 40}, top_k=V + 3),
    "top_k -1": case({"top_k": 40}, top_k=-1),
    "top_p": case({"top_p": 0.73}, top_p=0.7),
    "top_p tiny": case({"top_p": 0.3}, top_p=1e-5),
    "top_p near one": case({"top_p": 0.97}, top_p=0.995),
    "min_p": case({"min_p": 0.12}, min_p=0.1),
    "min_p one": case({"min_p": 0.5}, min_p=1.0),
    "presence, not of the prompt": case({"output": PROMPT + OUTPUT}, presence_penalty=0.9),
    "presence negative": case({"presence_penalty": 0.7}, presence_penalty=-0.7),
    "frequency, not of the prompt": case({"output": PROMPT + OUTPUT}, frequency_penalty=0.6),
    "frequency counts": case({"frequency_penalty": 0.0, "presence_penalty": 0.6}, frequency_penalty=0.6),
    "repetition of the prompt": case({"prompt": ()}, repetition_penalty=1.5),
    "repetition of the output": case({"output": ()}, repetition_penalty=0.6),
    "repetition of negative logits": case(
        {"repetition_penalty": 1 / 1.4}, repetition_penalty=1.4, logit_bias=dict.fromkeys(range(V), -5.0)
    ),
    "bias": case({"logit_bias": {LIKELY[0]: -1.5}}, logit_bias={LIKELY[0]: -2.0, LIKELY[9]: 2.0}),
    "bias before repetition": case(
        swapped("bias", "repetition"), repetition_penalty=1.8, logit_bias=dict.fromkeys(LIKELY[:6], 2.0)
    ),
    "repetition before frequency": case(
        swapped("repetition", "frequency"), repetition_penalty=1.8, frequency_penalty=0.7
    ),
    "temperature before top_p": case(swapped("temperature", "top_p"), temperature=1.6, top_p=0.6),
    "temperature before min_p": case(swapped("temperature", "min_p"), temperature=1.6, min_p=0.1),
    "top_k before top_p": case(swapped("top_k", "top_p"), top_k=8, top_p=0.8),
    "min_p before top_p": case(swapped("min_p", "top_p"), min_p=0.15, top_p=0.85),
    "all": case(
        {"top_k": 11},
        temperature=1.3,
        top_k=12,
        top_p=0.98,
        min_p=0.01,
        presence_penalty=0.3,
        frequency_penalty=-0.2,
        repetition_penalty=1.2,
        logit_bias={LIKELY[10]: 1.0, LIKELY[1]: -1.0},
    ),
}


def draws(row: Row, *, seed: int = 0, position: int = 0, stride: int = 1) -> list[Row]:
    """The row at DRAWS different pairs of seed and position; seeds fill both words."""
    return [
        dataclasses.replace(row, seed=seed + i % 100 * (2**32 + 3), position=position + i // 100 * stride)
        for i in range(DRAWS)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_distribution(name: str) -> None:
    row, wrong = CASES[name]
    tokens = run(LOGITS, draws(row)).token_ids
    expected = reference(LOGITS, row)
    assert chi_square(tokens, expected) > 1e-4
    # A token expected 30 times or more is missed with a chance of e**-30.
    assert set(np.flatnonzero(expected * DRAWS > 30)) <= set(tokens) <= set(np.flatnonzero(expected))
    text = {k: v for k, v in wrong.items() if k in ("prompt", "output")}
    values = {k: v for k, v in wrong.items() if k not in ("prompt", "output", "order")}
    spoilt = dataclasses.replace(row, params=dataclasses.replace(row.params, **values), **text)
    spoilt = reference(LOGITS, spoilt, wrong.get("order", ORDER))
    assert chi_square(tokens, spoilt) < 1e-6, "the test would not see this bug"


def test_draws_are_independent() -> None:
    """Pairs of neighbouring positions, and of neighbouring seeds, fall as independent draws do."""
    logits = np.append(random_logits(8, seed=1), np.full(V - 8, -np.inf))
    row = Row(SamplingParams())
    p = reference(logits, row)[:8]
    first = run(logits, draws(row, stride=2)).token_ids
    assert chi_square(first * 8 + first, np.outer(p, p).ravel()) < 1e-6, "the test would not see a bug"
    for other in ({"position": 1}, {"seed": 1}, {"seed": 2**32}):
        second = run(logits, draws(row, stride=2, **other)).token_ids
        assert chi_square(first * 8 + second, np.outer(p, p).ravel()) > 1e-4


def test_tail_of_a_large_vocabulary() -> None:
    """Half of the mass on one token, half evenly on 150,000: each part of the tail gets its share."""
    logits = np.zeros(150_001, np.float32)
    logits[70_000] = math.log(150_000)
    rows = [Row(SamplingParams(), seed=i, position=i) for i in range(512)]
    tokens = np.concatenate([run(logits, rows[i : i + 32]).token_ids for i in range(0, 512, 32)])
    parts = np.where(tokens == 70_000, 10, tokens // 15_001)
    assert chi_square(parts, np.append(np.full(10, 0.05), 0.5)) > 1e-4
    assert len(set(tokens)) > 0.95 * (tokens != 70_000).sum()


def test_weights_of_a_large_vocabulary() -> None:
    """The integers that are drawn from match the float64 distribution, rare tokens included."""
    logits = random_logits(2, 150_001, scale=3)
    gap = logits.max(-1, keepdims=True) - logits
    weights = np.asarray(_weights(jnp.asarray(gap), jnp.full(2, jnp.inf)), np.int64)
    total = weights.sum(-1, keepdims=True)
    assert ((total > 2**29 - 2**17) & (total < 2**30 + 2**17)).all()
    got = weights / total
    expected = np.stack([reference(x, Row(SamplingParams())) for x in logits])
    # A weight is rounded by a quarter on average, of a total of at least 2**29.
    assert np.abs(got - expected).sum(-1).max() / 2 < 150_001 / 8 * 2.0**-29 + 1e-6
    # It is rounded by at most half; the gap, up to 32 and in float32, is off by at most 2**-20.
    assert (np.abs(got - expected) < 1.001 * 2.0**-30 + 2 * 2.0**-20 * expected).all()
    rare = expected < np.median(expected)
    assert got[rare].sum() == pytest.approx(expected[rare].sum(), rel=1e-3)


def test_integers_below() -> None:
    limits = np.append(np.random.default_rng(2).integers(0, 2**30 + 2**17, 998), [1, 2**30])
    keys = jax.random.split(jax.random.key(3), 1000)
    bits = np.asarray(jax.vmap(jax.random.bits)(keys))
    expected = [int(n) * (int(b) >> 2) >> 30 for n, b in zip(limits, bits, strict=True)]
    assert np.asarray(_integers_below(jnp.asarray(limits, jnp.int32), keys)).tolist() == expected


def test_find() -> None:
    weights = jnp.tile(jnp.array([[0, 3, 0, 2, 0]]), (5, 1))
    index, rest = _find(weights, jnp.arange(5))
    assert (index.tolist(), rest.tolist()) == ([1, 1, 1, 3, 3], [0, 1, 2, 0, 1])


def test_ties_at_a_bound_are_kept() -> None:
    logits = np.append([1, 3, 2, 2, 2], np.full(V - 5, -9.0))
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.6)):
        assert set(run(logits, draws(Row(params))).token_ids) == {1, 2, 3, 4}


@functools.cache
def assorted_rows(vocab_size: int) -> list[Row]:
    """64 rows that use every parameter, alone and together; a third are greedy."""
    rng = np.random.default_rng(5)
    rows = []
    for i in range(64):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.8, 1.5])),
            top_k=int(rng.choice([0, 0, 1, 5, 40])),
            top_p=float(rng.choice([1.0, 0.5, 0.9])),
            min_p=float(rng.choice([0.0, 0.0, 0.05])),
            presence_penalty=float(rng.choice([0.0, 0.5])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            logprobs=[None, 5][i % 2],
            logit_bias={int(rng.integers(vocab_size)): 4.0} if i % 3 == 0 else None,
        )
        prompt, output = (tuple(rng.integers(0, vocab_size, rng.integers(1, 8)).tolist()) for _ in range(2))
        rows.append(Row(params, prompt, output, seed=int(rng.integers(2**63)), position=i))
    return rows


@pytest.mark.parametrize("vocab_size", [V, 4099])
def test_alone_and_in_any_batch(vocab_size: int) -> None:
    """The same token in batches of 64, 16 and 1, in any place, beside any rows and any padding."""
    logits, rows = random_logits(64, vocab_size, scale=2), assorted_rows(vocab_size)
    expected = run(logits, rows)
    assert len(set(expected.token_ids.tolist())) > 10
    shuffled = np.random.default_rng(6).permutation(64)
    for size, num_rows in ((64, 50), (16, 16), (16, 11), (1, 1)):
        padding = np.full((size - num_rows, vocab_size), np.nan)
        for start in range(0, 64 - num_rows + 1, num_rows):
            ids = shuffled[start : start + num_rows]
            got = run(np.concatenate([logits[ids], padding]), [rows[i] for i in ids] + [Row()] * len(padding))
            for name in ("token_ids", "rank", "top_token_ids", "is_finite"):
                assert np.array_equal(getattr(got, name)[:num_rows], getattr(expected, name)[ids]), name
            for name in ("logprob", "top_logprobs"):
                far = np.abs(getattr(got, name)[:num_rows] - getattr(expected, name)[ids])
                assert far.max() < 1e-5, name


def test_seats_change_nothing() -> None:
    """Batch slots of the rows, their number, and the counts of the other batch slots."""
    logits, rows = random_logits(64, V, scale=2), assorted_rows(V)
    expected = run(logits, rows).token_ids
    assert np.array_equal(run(logits, rows, num_batch_slots=200).token_ids, expected)
    batch = make_batch(rows, V)
    own = np.isin(np.arange(64), batch.count_slots)
    assert 10 < own.sum() < 60
    counts = jnp.where(jnp.asarray(own)[:, None], batch.token_counts, -1)
    got = step(jnp.asarray(logits), dataclasses.replace(batch, token_counts=counts))
    assert np.array_equal(got.token_ids, expected)


@pytest.mark.parametrize("vocab_size", [V, 64, 97])
def test_allowed_tokens(vocab_size: int) -> None:
    """Masked rows choose as the reference does; the rows beside them, and all log-probabilities, stay."""
    rng = np.random.default_rng(9)
    logits, rows = random_logits(64, vocab_size, scale=2), assorted_rows(vocab_size)
    masked = []
    for i, row in enumerate(rows):
        allowed = tuple(rng.choice(vocab_size, rng.integers(1, vocab_size), replace=False).tolist())
        masked.append(dataclasses.replace(row, allowed=allowed) if i % 3 else row)
    got, plain = run(logits, masked), run(logits, rows)
    for i, row in enumerate(masked):
        if row.allowed is None:
            assert got.token_ids[i] == plain.token_ids[i]
        else:
            assert got.token_ids[i] in row.allowed
            if row.params.temperature == 0:
                params = dataclasses.replace(row.params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
                expected = reference(logits[i], dataclasses.replace(row, params=params))
                assert got.token_ids[i] == expected.argmax()
    assert np.array_equal(got.top_token_ids, plain.top_token_ids), "of the raw logits"
    assert got.is_finite.all()


def test_distribution_of_allowed_tokens() -> None:
    params = SamplingParams(top_p=0.8, logit_bias={LIKELY[5]: 3.0}, repetition_penalty=1.3)
    row = Row(params, PROMPT, OUTPUT, allowed=LIKELY[1:20:2])
    tokens = run(LOGITS, draws(row)).token_ids
    assert chi_square(tokens, reference(LOGITS, row)) > 1e-4
    assert chi_square(tokens, reference(LOGITS, dataclasses.replace(row, allowed=None))) < 1e-6


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 6, "temperature": 0.7}])
def test_draws_that_the_mask_allows_are_kept(filters: dict[str, Any]) -> None:
    free = Row(SamplingParams(**filters), PROMPT, OUTPUT)
    masked = dataclasses.replace(free, allowed=LIKELY[1:20:2], keeps_draw=True)
    without, tokens = (run(LOGITS, draws(row)).token_ids for row in (free, masked))
    is_allowed = np.isin(without, masked.allowed)
    assert (tokens[is_allowed] == without[is_allowed]).all()
    # What is drawn again is drawn as if it were for the first time.
    again = reference(LOGITS, dataclasses.replace(masked, keeps_draw=False))
    assert chi_square(tokens[~is_allowed], again) > 1e-4
    if not filters:
        assert chi_square(tokens, again) > 1e-4


def test_greedy_rows_of_a_mixed_batch() -> None:
    logits, rows = random_logits(64, V), assorted_rows(V)
    greedy = [i for i, row in enumerate(rows) if row.params.temperature == 0]
    assert 16 <= len(greedy) < 48
    unfiltered = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    expected = []
    for i in greedy:
        params = dataclasses.replace(rows[i].params, **unfiltered)
        expected.append(reference(logits[i], dataclasses.replace(rows[i], params=params)).argmax())
    assert run(logits, rows).token_ids[greedy].tolist() == expected
    assert run(logits[greedy[:16]], [rows[i] for i in greedy[:16]]).token_ids.tolist() == expected[:16]
    assert run(np.ones(V), [Row()] * 16).token_ids.tolist() == [0] * 16, "the lowest id wins a tie"


def test_logprobs_and_ranks() -> None:
    logits, rows = random_logits(64, V, scale=4), assorted_rows(V)
    logits[:, 7] = -np.inf
    logits[:32] += 1000
    got = run(logits, rows)
    x = logits.astype(np.float64)
    largest = x.max(-1, keepdims=True)
    expected = x - largest - np.log(np.exp(x - largest).sum(-1, keepdims=True))
    # Neighbouring float32 numbers lie 6e-5 apart above 512.
    tolerance = np.where(np.arange(64) < 32, 1e-4, 1e-5)
    assert (np.abs(got.logprob - expected[np.arange(64), got.token_ids]) < tolerance).all()
    for i, row in enumerate(rows):
        wanted = row.params.logprobs is not None
        top = np.argsort(-logits[i], kind="stable")[:MAX_LOGPROBS]
        assert got.rank[i] == wanted * (1 + (logits[i] > logits[i, got.token_ids[i]]).sum())
        assert np.array_equal(got.top_token_ids[i], wanted * top)
        assert (np.abs(got.top_logprobs[i] - wanted * expected[i, top]) < tolerance[i]).all()


def test_logprob_temperature_of_some_rows() -> None:
    logits, params = random_logits(6, V, scale=4), SamplingParams(temperature=0, logprobs=MAX_LOGPROBS)
    temperatures = np.array([1, 0.25, 1, 3, 1, 1e6])
    rows = [Row(params, logprob_temperature=t) for t in temperatures]
    got, plain = run(logits, rows), run(logits, [Row(params)] * 6)
    x = logits.astype(np.float64) / temperatures[:, None]
    expected = x - np.log(np.exp(x).sum(-1, keepdims=True))
    top = np.argsort(-x, kind="stable")[:, :MAX_LOGPROBS]
    assert np.array_equal(got.top_token_ids, top)
    assert np.array_equal(got.token_ids, top[:, 0])
    assert np.abs(got.top_logprobs - np.take_along_axis(expected, top, 1)).max() < 1e-5
    same = temperatures == 1
    assert np.array_equal(got.top_logprobs[same], plain.top_logprobs[same]), "another row's temperature"


def test_logprobs_of_given_tokens() -> None:
    logits, wanted = jnp.stack([jnp.asarray(LOGITS), jnp.ones(V)]), jnp.ones(2, bool)
    got = token_logprobs(logits, jnp.array([LIKELY[3], 9]), wanted, max_logprobs=2)
    logprob, rank, top_ids, top = map(np.asarray, got)
    expected = np.log(reference(LOGITS, Row(SamplingParams())))
    assert logprob.tolist() == pytest.approx([expected[LIKELY[3]], -math.log(V)], abs=1e-5)
    assert top[0].tolist() == pytest.approx(expected[list(LIKELY[:2])].tolist(), abs=1e-5)
    assert top[1].tolist() == pytest.approx([-math.log(V)] * 2, abs=1e-5)
    assert rank.tolist() == [4, 1], "tied tokens share the better rank"
    assert top_ids.tolist() == [list(LIKELY[:2]), [0, 1]], "the lower id wins a tie"
    assert token_logprobs(logits, jnp.zeros(2, jnp.int32), wanted, max_logprobs=0)[3].shape == (2, 0)


def test_rows_that_are_not_finite() -> None:
    logits, rows = random_logits(64, V), assorted_rows(V)
    expected = run(logits, rows)
    assert expected.is_finite.all()
    bad = logits.copy()
    bad[0, 0] = bad[5, V - 1] = bad[17, 20] = bad[33] = np.nan
    bad[9, 3] = bad[34] = np.inf
    bad[40] = -np.inf
    bad[41, 0], bad[41, 1] = np.inf, -np.inf
    broken = [0, 5, 9, 17, 33, 34, 40, 41]
    fine = [i for i in range(64) if i not in broken]
    got = run(bad, rows)
    assert np.flatnonzero(~got.is_finite).tolist() == broken
    assert not got.token_ids[broken].any()
    for name in ("token_ids", "logprob", "rank", "top_token_ids", "top_logprobs"):
        assert np.array_equal(getattr(got, name)[fine], getattr(expected, name)[fine]), name


def test_impossible_tokens() -> None:
    """Logits of minus infinity are never drawn, and make no row wrong."""
    got = run(np.where(np.arange(V) < 5, random_logits(64, V), -np.inf), assorted_rows(V))
    assert got.is_finite.all()
    assert (got.token_ids < 5).all()
    assert np.isfinite(got.logprob).all()


def test_forbidden_tokens() -> None:
    """A bias of minus infinity, as min_tokens needs it, beats every other parameter."""
    rows = []
    for row in assorted_rows(V):
        params = dataclasses.replace(row.params, logit_bias={LIKELY[0]: 100.0})
        rows.append(Row(params, LIKELY[:3], LIKELY[:5], LIKELY[:3], row.seed, row.position))
    got = run(LOGITS, rows)
    assert not set(got.token_ids.tolist()) & set(LIKELY[:3])
    assert np.isfinite(got.logprob).all()
    row = dataclasses.replace(rows[0], params=SamplingParams(top_p=0.8, repetition_penalty=1.5))
    assert chi_square(run(LOGITS, draws(row)).token_ids, reference(LOGITS, row)) > 1e-4
    assert got.has_choice.all()


def test_rows_without_any_token_to_choose() -> None:
    """By mask, by bias, by both together, or as the model rules out the rest; other rows don't notice."""
    logits, rows = random_logits(64, V, scale=2), assorted_rows(V)
    logits[:, LIKELY[4]] = -np.inf
    others, expected = run(logits, rows), dict[int, list[int]]()
    for i, row in enumerate(rows):
        allowed, forbidden = {
            0: ((LIKELY[0],), (LIKELY[0],)),
            1: (LIKELY[:3], LIKELY[:4]),
            2: (None, tuple(range(V))),
            3: ((LIKELY[4],), ()),
            4: (LIKELY[:3], LIKELY[:2]),
            5: (None, tuple(t for t in range(V) if t != LIKELY[7])),
        }.get(i % 8, (None, ()))
        expected[i] = {4: [LIKELY[2]], 5: [LIKELY[7]]}.get(i % 8, [] if i % 8 < 4 else [others.token_ids[i]])
        rows[i] = dataclasses.replace(row, allowed=allowed, forbidden=forbidden)
    logits[8] = np.nan
    got = run(logits, rows)
    assert np.flatnonzero(~got.is_finite).tolist() == [8]
    # What is not finite is not the request's fault.
    assert np.flatnonzero(~got.has_choice).tolist() == [
        i for i, left in expected.items() if not left and i != 8
    ]
    for i, left in expected.items():
        assert got.token_ids[i] == (left[0] if left else 0), i


def test_a_forced_token_is_a_choice() -> None:
    row = Row(SamplingParams(logit_bias={3: -100.0}), forbidden=tuple(range(3)), allowed=(0, 1, 2, 3))
    got = run(LOGITS, [row, dataclasses.replace(row, params=GREEDY), Row()])
    assert got.has_choice.all()
    assert got.token_ids[:2].tolist() == [3, 3]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e25])
def test_extreme_values(scale: float) -> None:
    extremes: list[dict[str, Any]] = [
        {"temperature": 1e-5},
        {"temperature": 1e-30},
        {"temperature": 1e6, "top_p": 1e-30},
        {"repetition_penalty": 1e6, "temperature": 1e6},
        {"repetition_penalty": 1e-6, "temperature": 1e-4},
        {"min_p": 1.0, "top_k": 2**31 - 1, "top_p": 1 - 1e-7},
        {"min_p": 1e-45, "top_p": 1e-45, "frequency_penalty": -2, "logit_bias": {0: 100, 1: -100}},
        {"temperature": 1e-45},
    ]
    rows = [Row(SamplingParams(**extremes[i % 8]), (1, 2), (3,) * 14, position=i) for i in range(64)]
    with np.errstate(over="ignore"):
        got = run(LOGITS * np.float32(scale), rows)
    assert got.is_finite.all()
    assert set(got.token_ids.tolist()) <= set(range(V))
    assert np.isfinite(got.logprob).all()
    for i in (1, 7):
        assert (got.token_ids[i::8] == LIKELY[0]).all(), "below 1e-5 is greedy"


def test_values_do_not_retrace() -> None:
    logits = random_logits(64, V)
    run(logits, assorted_rows(V))
    before = len(traces)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.5, logprobs=3),
        SamplingParams(logit_bias={1: 1.0}),
    ):
        run(logits, [Row(params)] * 64)
    assert len(traces) == before


def conditional_depths(jaxpr: Any, depth: int = 0) -> dict[str, int]:
    """The fewest conditionals that each primitive lies under, by its name, and by name and dimensions."""
    found: dict[str, int] = {}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        for key in (name, f"{name} {getattr(equation.outvars[0].aval, 'ndim', 0)}d"):
            found[key] = min(depth, found.get(key, depth))
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                for key, d in conditional_depths(inner, depth + (name == "cond")).items():
                    found[key] = min(d, found.get(key, d))
    return found


def test_nothing_is_computed_that_no_row_asks_for() -> None:
    traced = step.trace(jnp.zeros((4, V)), make_batch([Row()] * 4, V))
    depths = conditional_depths(traced.jaxpr.jaxpr)
    assert "sort" not in depths
    assert depths["top_k"] == 1, "most likely tokens: only if a row wants logprobs"
    assert depths["cumsum"] == 1, "the draw: only if a row is random"
    assert min(d for name, d in depths.items() if name.startswith(("random", "threefry"))) == 1
    assert depths["while"] == 2, "the search for a bound: only if a random row has top_k or top_p"
    assert min(d for name, d in depths.items() if name.startswith("scatter")) == 2
    assert depths["shift_right_arithmetic 3d"] == 2, "masks: only if a row has one"
    assert "stablehlo.sort" not in traced.lower().as_text()


def test_64_bit_mode_changes_nothing() -> None:
    logits, rows = random_logits(64, V), assorted_rows(V)
    expected = run(logits, rows)
    with jax.enable_x64(True):
        got = run(logits, rows)
    assert np.array_equal(got.token_ids, expected.token_ids)
    assert (got.token_ids.dtype, got.logprob.dtype) == (np.int32, np.float32)
