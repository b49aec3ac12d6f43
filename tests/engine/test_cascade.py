"""Engines whose sequences attend to shared blocks together: every output is that of each by itself."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.real_model import (
    TOLERANCE,
    VOCAB_SIZE,
    Request,
    add,
    assert_no_block_lost,
    finished_outputs,
    make_engine,
    run,
    tokens_of,
)
from helpers.windowed_model import WINDOWED_VOCAB_SIZE, write_windowed_checkpoint

from jax_paged import BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.pallas_kernels import native
from jax_paged.worker.features import cascade

pytestmark = pytest.mark.thorough

SIZES = {"block_size": 4, "max_num_seqs": 24, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 2000}
BACKENDS = [
    pytest.param("xla", marks=pytest.mark.slow),
    pytest.param("native", marks=pytest.mark.skipif(not native.is_built(), reason=str(native.problem()))),
]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets two rows attend together to any block that they have in common."""
    for name, value in {"MIN_ROWS": 2, "MIN_TOKENS": 1, "MIN_SAVED_TOKENS": 1}.items():
        monkeypatch.setattr(cascade, name, value)


@pytest.fixture(params=BACKENDS)
def engines(
    checkpoint: Path, always: None, request: pytest.FixtureRequest
) -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """An engine with cascade attention, and one without."""
    with (
        make_engine(checkpoint, few_buckets=True, attention_backend=request.param, **SIZES) as engine,
        make_engine(
            checkpoint, few_buckets=True, attention_backend=request.param, disable_cascade_attn=True, **SIZES
        ) as plain,
    ):
        assert engine.config.cascade_attention
        assert not plain.config.cascade_attention
        yield engine, plain


def shared_requests(seed: int, count: int, **params: Any) -> list[Request]:
    """Makes greedy requests in families, whose prefixes have any length, and begin with one another."""
    rng = np.random.default_rng(seed)
    prefixes: list[list[int]] = [[]]
    for _ in range(4):
        start = prefixes[rng.integers(len(prefixes))]
        prefixes.append(start + rng.integers(8, VOCAB_SIZE, int(rng.integers(1, 250 - len(start)))).tolist())
    requests = []
    for _ in range(count):
        prefix = prefixes[rng.integers(len(prefixes))]
        prompt = prefix[: rng.integers(len(prefix) + 1)] if rng.random() < 0.2 else prefix
        prompt = prompt + rng.integers(8, VOCAB_SIZE, int(rng.integers(1, 40))).tolist()
        settings = {"temperature": 0.0, "max_tokens": int(rng.integers(2, 40)), "ignore_eos": True} | params
        requests.append(Request(prompt, SamplingParams(**settings)))
    return requests


def check(engines: tuple[LLMEngine, LLMEngine], requests: list[Request]) -> int:
    """Checks that two engines say the same; returns how many tokens the first has read less."""
    engine, plain = engines
    before = engine.num_saved_reads
    outputs, expected = run(engine, requests), run(plain, requests)
    assert tokens_of(outputs) == tokens_of(expected)
    for output, other in zip(outputs, expected, strict=True):
        for x, y in zip(output.outputs, other.outputs, strict=True):
            assert x.cumulative_logprob == pytest.approx(
                y.cumulative_logprob, abs=TOLERANCE * len(x.token_ids)
            )
    assert_no_block_lost(engine)
    assert plain.num_saved_reads == 0
    return engine.num_saved_reads - before


def test_requests_with_shared_prefixes(engines: tuple[LLMEngine, LLMEngine]) -> None:
    run(engines[0], shared_requests(0, 3))  # prefixes in the cache already, as one engine has them
    assert check(engines, shared_requests(0, 16)) > 1000


@pytest.mark.slow
def test_two_hundred_requests_with_prefixes_of_all_lengths(engines: tuple[LLMEngine, LLMEngine]) -> None:
    for seed in range(10):
        assert check(engines, shared_requests(seed, 20)) > 500


def test_rows_that_dropped_blocks_attend_by_themselves(engines: tuple[LLMEngine, LLMEngine]) -> None:
    """Their tables may end with the same blocks, behind others."""
    (request,) = [r for r in shared_requests(3, 5, max_tokens=30) if len(r.prompt) > 100][:1]
    found = []
    for engine in engines:
        run(engine, [request])
        add(engine, [request] * 8)
        begun = set()
        while len(begun) < 8:
            begun |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
        for i in range(8):
            held = np.flatnonzero(engine.page_table(str(i)).entries["num_tokens"])
            engine.drop_kv(str(i), [n for n in held.tolist() if n != i % 2])
        before = engine.num_saved_reads
        found.append(tokens_of(list(finished_outputs(engine).values())))
        assert engine.num_saved_reads == before
    assert found[0] == found[1]


@pytest.mark.quick
def test_samples_and_beams(engines: tuple[LLMEngine, LLMEngine]) -> None:
    """They share their prompt, and what they have generated together; they copy blocks, and come and go."""
    (one, *rest) = shared_requests(3, 5, logprobs=1)
    samples = dataclasses.replace(
        one, params=SamplingParams(n=5, temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=1)
    )
    beams = dataclasses.replace(one, beams=BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True))
    assert check(engines, [samples, beams, *rest]) > 1000


@pytest.mark.parametrize("kind", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bursts_and_two_steps_in_flight(checkpoint: Path, always: None, backend: str, kind: str) -> None:
    """Rows end within a burst, and leave the others to themselves."""
    settings: dict[str, Any] = {**SIZES, "few_buckets": True, "attention_backend": backend}
    if kind == "int8":
        settings["kv_cache_dtype"] = kind
    requests = [r for r in shared_requests(5, 12) if len(r.prompt) > 8]
    ending = [dataclasses.replace(r, params=SamplingParams(temperature=0.0, max_tokens=30)) for r in requests]
    with (
        make_engine(checkpoint, num_scheduler_steps=8, **settings) as engine,
        make_engine(checkpoint, disable_cascade_attn=True, **settings) as plain,
    ):
        run(engine, requests[:2])
        for depth in (1, 2):
            engine._core.max_in_flight = depth
            assert check((engine, plain), requests + ending) > 1000


def test_layers_with_windows_attend_by_themselves(tmp_path: Path, always: None) -> None:
    """Of a model whose scores have a soft cap, too."""
    write_windowed_checkpoint(tmp_path, 50)
    requests = [
        dataclasses.replace(r, prompt=[t % WINDOWED_VOCAB_SIZE for t in r.prompt])
        for r in shared_requests(1, 12)
    ]
    settings = {**SIZES, "few_buckets": True, "skip_tokenizer_init": True}
    with (
        make_engine(tmp_path, **settings) as engine,
        make_engine(tmp_path, disable_cascade_attn=True, **settings) as plain,
    ):
        assert [group.window for group in engine.config.cache_groups] == [50, None]
        assert check((engine, plain), requests) > 500


def test_what_is_off(checkpoint: Path) -> None:
    """The rule says when: not for a few short requests, and never where rows may not depend on others."""
    with make_engine(checkpoint, few_buckets=True, **SIZES) as engine:
        run(engine, [r for r in shared_requests(0, 12) if len(r.prompt) < 60][:3])
        assert engine.num_saved_reads == 0
    with make_engine(checkpoint, batch_invariant=True, **SIZES) as engine:
        assert not engine.config.cascade_attention
        run(engine, shared_requests(0, 12))
        assert engine.num_saved_reads == 0
