"""Layers that keep a state of each sequence, in the real engine: every way in which states come and go."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.real_model import (
    Request,
    add,
    assert_no_block_lost,
    finished_outputs,
    make_engine,
    reschedule,
    reset,
    run,
    tokens_of,
)

from jax_paged import EngineArgs, LLMEngine, SamplingParams
from jax_paged.core.kv_cache.state_slots import StateSlots
from jax_paged.models.kv_location import NO_GROUP, KVLocation
from jax_paged.sampling_params import BeamSearchParams

pytestmark = pytest.mark.thorough

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
SIZE = 16
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "few_buckets": True,
    "max_model_len": 160,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 90,
    "swap_space": 2**-8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def cases_of(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Returns prompts, and what transformers says behind them."""
    cases = json.loads((FIXTURES / name / "reference.json").read_text())["cases"]
    return [case["prompt_token_ids"] for case in cases], [case["token_ids"] for case in cases]


@pytest.fixture(scope="module", params=["qwen3_5", pytest.param("lfm2", marks=pytest.mark.slow)])
def kept(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    with make_engine(FIXTURES / request.param, **SETTINGS) as engine:
        yield engine


@pytest.fixture
def engine(kept: LLMEngine) -> LLMEngine:
    """An idle engine with a new scheduler; whatever lies in its slots is not a number."""
    reset(kept)
    kept.executor.runner.fill_kv_cache(jnp.nan)  # pyright: ignore[reportAttributeAccessIssue]
    return kept


@pytest.fixture
def cases(kept: LLMEngine) -> tuple[list[list[int]], list[list[int]]]:
    return cases_of(Path(kept.config.model_name).name)


def greedy(prompts: list[list[int]]) -> list[Request]:
    return [Request(prompt, GREEDY) for prompt in prompts]


def test_dead_slots_are_not_read(engine: LLMEngine, cases: Any) -> None:
    prompts, expected = cases
    assert tokens_of(run(engine, greedy(prompts))) == expected
    # The last ones first: theirs are the checkpoints that are there still.
    warm = run(engine, greedy(prompts[::-1]))
    assert tokens_of(warm) == expected[::-1]
    cached = [output.num_cached_tokens for output in warm]
    assert sum(cached) > 0
    # Nothing but a checkpoint, which is kept where a prompt's last full block ends, or a chunk of it.
    assert all(n % SIZE == 0 for n in cached)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_state_slots": 3},
        {"num_state_slots": 2, "enable_prefix_caching": False},
        {"num_blocks": 18},
        {"num_blocks": 18, "preemption_mode": "swap"},
        {"num_state_slots": 4, "preemption_mode": "swap", "num_blocks": 18, "scheduling_policy": "priority"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 160},
    ],
    ids=str,
)
def test_with_little_room(engine: LLMEngine, cases: Any, settings: dict[str, Any]) -> None:
    prompts, expected = cases
    if settings.get("max_num_batched_tokens", 0) > SETTINGS["max_num_batched_tokens"]:
        prompts, expected = ([x for x, p in zip(part, prompts, strict=True) if len(p) < 40] for part in cases)
        settings = settings | {"max_num_batched_tokens": 48, "max_model_len": 48}
        expected = [tokens[: 48 - len(prompt)] for prompt, tokens in zip(prompts, expected, strict=True)]
    reschedule(engine, **settings)
    requests = [dataclasses.replace(r, priority=-i) for i, r in enumerate(greedy(prompts))]
    if settings.get("scheduling_policy") != "priority":
        requests = greedy(prompts)
    steps = engine.scheduler.block_manager.states
    moved: list[int] = []
    take = steps.take_moves

    def note() -> Any:
        moves = take()
        moved.append(len(moves.swap_out))
        return moves

    steps.take_moves = note
    outputs = run(engine, requests)
    assert tokens_of(outputs) == expected
    if "num_blocks" in settings:
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert (sum(moved) > 0) == (settings.get("preemption_mode") == "swap")


@pytest.mark.quick
def test_conversations_go_on_from_a_checkpoint_behind_the_prompt(engine: LLMEngine, cases: Any) -> None:
    prompts, _ = cases
    first = [p for p in prompts if len(p) in (31, 47)]
    outputs = run(engine, greedy(first))
    longer = [[*p, *o.outputs[0].token_ids, 7, 8, 9] for p, o in zip(first, outputs, strict=True)]
    warm = run(engine, greedy(longer))
    for text, output in zip(longer, warm, strict=True):
        assert output.num_cached_tokens == (len(text) - 4) // SIZE * SIZE
    reschedule(engine, enable_prefix_caching=False)
    assert tokens_of(run(engine, greedy(longer))) == tokens_of(warm)


@pytest.mark.quick
def test_samples_and_beams(engine: LLMEngine, cases: Any) -> None:
    """Samples are forks by copy; each is what it is alone, also when swapped or recomputed in between."""
    prompts = [p for p in cases[0] if len(p) in (5, 17, 33, 47)]
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20)
    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    requests = [Request(p, params) for p in prompts] + [Request(p, GREEDY, beams=beams) for p in prompts]
    reschedule(engine, enable_prefix_caching=False)
    expected = [run(engine, [request])[0] for request in requests]
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"num_blocks": 14, "preemption_mode": "swap"},
        {"num_blocks": 14, "num_state_slots": 6},
    )
    for settings in variants:
        reschedule(engine, **settings)
        outputs = run(engine, requests)
        for output, alone in zip(outputs, expected, strict=True):
            texts = [list(x.token_ids) for x in output.outputs]
            assert texts == [list(x.token_ids) for x in alone.outputs]
        if settings:
            assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert len({tuple(x.token_ids) for x in expected[0].outputs}) == 3


def test_forks_and_tokens_taken_back(engine: LLMEngine, cases: Any) -> None:
    prompts, expected = cases
    place = [len(p) for p in prompts].index(33)
    add(engine, greedy([prompts[place]]))
    for _ in range(8):
        engine.step()
    engine.fork("0", "fork")
    engine.step()
    engine.rollback("fork", 6)
    outputs = finished_outputs(engine)
    assert_no_block_lost(engine)
    for name in ("0", "fork"):
        assert list(outputs[name].outputs[0].token_ids) == expected[place]


def test_a_pinned_prefix_keeps_its_state(engine: LLMEngine, cases: Any) -> None:
    prompts, expected = cases
    place = [len(p) for p in prompts].index(79)
    name = engine.pin_prefix(prompts[place][:70])
    num_free = engine.scheduler.block_manager.states.pool.num_free
    add(engine, greedy([[i, *p] for i in range(3) for p in prompts]), "other ")  # evicts all else
    finished_outputs(engine)
    add(engine, greedy([prompts[place]]))
    output = finished_outputs(engine)["0"]
    assert list(output.outputs[0].token_ids) == expected[place]
    assert output.num_cached_tokens >= 64
    engine.unpin_prefix(name)
    assert engine.scheduler.block_manager.states.pool.num_free > num_free
    assert_no_block_lost(engine)


def test_weights_and_sleep_forget_checkpoints(engine: LLMEngine, cases: Any) -> None:
    prompts, expected = cases
    run(engine, greedy(prompts))
    add(engine, greedy(prompts[:4]))
    for _ in range(5):
        engine.step()
    engine.sleep(1, "keep")
    engine.wake_up()
    outputs = finished_outputs(engine)
    assert [list(outputs[str(i)].outputs[0].token_ids) for i in range(4)] == expected[:4]
    assert_no_block_lost(engine)
    run(engine, greedy(prompts))
    engine.update_weights(engine.config.model_name)
    again = run(engine, greedy(prompts[::-1]))
    assert tokens_of(again) == expected[::-1]
    assert all(output.num_cached_tokens == 0 for output in again)


def test_memory_per_sequence(kept: LLMEngine) -> None:
    model, runner = Path(kept.config.model_name), kept.executor.runner  # pyright: ignore[reportAttributeAccessIssue]
    config = json.loads((model / "config.json").read_text())
    num_slots, num_swapped = kept.config.num_state_slots, kept.config.num_swap_state_slots
    assert num_slots == 1 + 2 * SETTINGS["max_num_seqs"]
    num_layers = config["layer_types"].count("full_attention")
    if config["model_type"] == "lfm2":
        per_layer = 4 * (config["conv_L_cache"] - 1) * config["hidden_size"]
    else:
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        per_layer = 4 * (config["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
        per_layer += 4 * values * config["linear_key_head_dim"]
    per_seq = per_layer * (len(config["layer_types"]) - num_layers)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_block = 4 * 2 * num_layers * config["num_key_value_heads"] * SIZE * size
    assert runner.context.layout.state_bytes == per_seq
    held = sum(array.nbytes for array in runner.arrays["kv_cache"])
    assert held == kept.config.kv_cache_bytes == num_slots * per_seq + kept.config.num_blocks * per_block
    assert 0 < num_swapped <= SETTINGS["max_num_seqs"]


def test_what_states_rule_out(engine: LLMEngine, cases: Any) -> None:
    add(engine, greedy(cases[0][5:6]))
    for _ in range(4):
        engine.step()
    for refused in (
        lambda: engine.verify("0", [1, 2]),
        lambda: engine.inspect("0", layers=[0]),
        lambda: engine.drop_kv("0", [0]),
        engine.state,
        lambda: engine.kv(
            "0", engine.executor.runner.context.layout.locations.index(KVLocation(1, NO_GROUP))
        ),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match=r"without recurrent layers for \w+\(\)|with a recurrent state"):
            refused()
    keys, values = engine.kv("0", 1)
    assert keys.shape == values.shape
    assert np.isfinite(keys).all()
    assert list(finished_outputs(engine)["0"].outputs[0].token_ids) == cases[1][5]


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        {"batch_invariant": True},
        {"pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_settings_that_states_rule_out(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name}.*recurrent layers"):
        make_engine(FIXTURES / "lfm2", **(SETTINGS | settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_nested", "lfm2_biases_old_config"])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_steps_ahead_and_bursts(name: str, num_steps: int) -> None:
    prompts, expected = cases_of(name)
    settings = SETTINGS | {"num_scheduler_steps": num_steps, "async_scheduling": True}
    with make_engine(FIXTURES / name, **settings) as engine:
        engine.executor.runner.fill_kv_cache(jnp.nan)  # pyright: ignore[reportAttributeAccessIssue]
        assert tokens_of(run(engine, greedy(prompts))) == expected
        assert tokens_of(run(engine, greedy(prompts[::-1]))) == expected[::-1]


@pytest.mark.slow
def test_a_worker_of_its_own() -> None:
    """What moves states passes a leader, though it has no followers."""
    prompts, expected = cases_of("qwen3_5")
    how = {"dtype": "float32", "distributed_executor_backend": "mp", "max_compile_s": 0}
    settings = {name: value for name, value in SETTINGS.items() if name != "few_buckets"}
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=20)
    requests = [Request(p, params) for p in prompts if len(p) in (33, 47, 64, 79)]
    with LLMEngine(EngineArgs(str(FIXTURES / "qwen3_5"), **settings, **how)) as engine:
        assert tokens_of(run(engine, greedy(prompts))) == expected
        alone = [run(engine, [request])[0] for request in requests]
        reschedule(engine, num_blocks=22, preemption_mode="swap")
        outputs = run(engine, requests)
    assert any(output.metrics.num_preemptions for output in outputs if output.metrics)
    for output, one in zip(outputs, alone, strict=True):
        assert [x.token_ids for x in output.outputs] == [x.token_ids for x in one.outputs]


def _without_copies(states: StateSlots, patch: pytest.MonkeyPatch) -> None:
    """What is shared is written to."""

    def prepare(rows: Any) -> bool:
        for seq, num_tokens in rows:
            states._positions[seq] = seq.next_position + num_tokens
        return True

    patch.setattr(states, "prepare", prepare)


def _checkpoint_too_early(states: StateSlots, patch: pytest.MonkeyPatch) -> None:
    begin = states.begin_checkpoint

    def late(seq: Any, start: int, stop: int) -> tuple[int, int]:
        num_before, slot = begin(seq, start, stop)
        return max(0, num_before - 1), slot

    patch.setattr(states, "begin_checkpoint", late)


def _swapped_to_another_place(states: StateSlots, patch: pytest.MonkeyPatch) -> None:
    take = states.take_moves

    def wrongly() -> Any:
        moves = take()
        return moves._replace(
            swap_in=[(source, target) for source, (_, target) in zip([1] * 9, moves.swap_in, strict=False)]
        )

    patch.setattr(states, "take_moves", wrongly)


@pytest.mark.parametrize("damage", [_without_copies, _checkpoint_too_early, _swapped_to_another_place])
def test_a_mistake_is_noticed(
    engine: LLMEngine, cases: Any, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [p for p in cases[0] if len(p) in (33, 47, 64, 79)]
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=20)
    requests = [Request(p, params) for p in prompts]

    def texts() -> list[list[int]]:
        reschedule(engine, num_blocks=22, preemption_mode="swap")
        damaged = engine.scheduler.block_manager.states
        with monkeypatch.context() as patch:
            damage(damaged, patch)
            add(engine, requests)
            finished_outputs(engine)
            add(engine, requests)
            outputs = finished_outputs(engine)
        return [list(x.token_ids) for i in range(len(requests)) for x in outputs[str(i)].outputs]

    reschedule(engine, enable_prefix_caching=False)
    expected = [list(x.token_ids) for request in requests for x in run(engine, [request])[0].outputs]
    assert texts() != expected
