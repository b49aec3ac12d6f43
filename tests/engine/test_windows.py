"""Layers with a sliding window hold only the window's blocks while a request runs, and share no less."""

import itertools

import numpy as np
import pytest
from helpers.real_model import DenseModel, assert_no_block_lost, make_engine, reschedule, steps_of
from helpers.windowed_model import write_windowed_checkpoint

from jax_paged import SamplingParams

WINDOW, BLOCK_SIZE, CHUNK = 24, 4, 16
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    write_windowed_checkpoint(folder, WINDOW)
    return folder


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(3, 199, n).tolist() for n in (8 * WINDOW, 5, WINDOW, WINDOW + 1, 100)]


@pytest.fixture(scope="module")
def want(folder, prompts):
    """Greedy texts from the dense call, token by token."""
    model, texts = DenseModel(folder, max_len=320), [list(p) for p in prompts]
    for _ in range(GREEDY.max_tokens or 0):
        for text, logits in zip(texts, model.logits(texts), strict=True):
            text.append(int(logits[-1].argmax()))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.fixture(scope="module")
def session_engine(folder):
    """In place of the engine that all tests share: one of a model with windows."""
    with make_engine(
        folder,
        few_buckets=True,
        max_model_len=320,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=400,
        num_scheduler_steps=8,
        skip_tokenizer_init=True,
    ) as engine:
        yield engine


@pytest.mark.thorough
def test_no_more_than_the_window_and_a_block_is_held(engine, prompts, want):
    reschedule(engine, num_blocks=200, num_scheduler_steps=1)
    manager = engine.scheduler.block_manager
    engine.add_request("long", prompts[0], GREEDY)
    most_in_prefill = most_in_decode = num_tokens = 0
    while engine.has_unfinished_requests():
        output = engine.step()[0:]
        for seq, tables in manager.block_tables.items():
            held = [sum(b != 0 for b in t) for t, g in zip(tables, manager.groups, strict=True) if g.window]
            if seq.output_token_ids[1:]:
                most_in_decode = max(most_in_decode, *held)
            else:
                most_in_prefill = max(most_in_prefill, *held)
            full = next(t for t, g in zip(tables, manager.groups, strict=True) if not g.window)
            assert 0 not in full
        num_tokens = len(output[0].outputs[0].token_ids) if output else num_tokens
    assert num_tokens == 60
    assert list(output[0].outputs[0].token_ids) == want[0]
    assert most_in_decode == WINDOW // BLOCK_SIZE + 1
    assert most_in_prefill <= (WINDOW + CHUNK) // BLOCK_SIZE + 1
    assert_no_block_lost(engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_scheduler_steps": 1},
        {"num_scheduler_steps": 1, "enable_prefix_caching": False},
        {"num_scheduler_steps": 1, "num_blocks": 130},
        {"num_scheduler_steps": 1, "num_blocks": 130, "preemption_mode": "swap"},
        {"num_scheduler_steps": 8},
        {"num_scheduler_steps": 8, "num_blocks": 130},
    ],
)
def test_output_is_that_of_the_dense_call(engine, monkeypatch, prompts, want, settings):
    reschedule(engine, **settings)
    outputs, steps = {}, steps_of(engine, monkeypatch)
    for run in range(2):  # the second one finds prefixes in the cache
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{run} {i}", prompt, GREEDY)
        while engine.has_unfinished_requests():
            outputs |= {o.request_id: o for o in engine.step() if o.finished}
    for run, i in itertools.product(range(2), range(len(prompts))):
        assert list(outputs[f"{run} {i}"].outputs[0].token_ids) == want[i]
    assert any(step.num_multi_step_tokens for step in steps) == (settings["num_scheduler_steps"] > 1)
    if settings.get("num_blocks"):
        assert sum(o.metrics.num_preemptions for o in outputs.values())
    elif "enable_prefix_caching" not in settings:
        assert all(outputs[f"1 {i}"].num_cached_tokens >= len(prompts[i]) - BLOCK_SIZE for i in (0, 4))
    assert_no_block_lost(engine)
