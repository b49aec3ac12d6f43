"""What a request has in the pool, and what it makes of it, against a Llama in NumPy float64."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.edited_engine import SIZES, idle_engine, session_engine
from helpers.numpy_llama import forward
from helpers.oracle import TOLERANCE as RELATIVE
from helpers.oracle import relative_error
from helpers.real_model import (
    TOLERANCE,
    VOCAB_SIZE,
    DenseModel,
    finished_outputs,
    log_softmax,
    make_engine,
)
from helpers.windowed_model import write_windowed_checkpoint

from jax_paged import SamplingParams

pytestmark = pytest.mark.thorough

__all__ = ["idle_engine", "session_engine"]  # fixtures
SIZE = SIZES["block_size"]
PROMPT = np.random.default_rng(1).integers(8, VOCAB_SIZE, 30).tolist()
DRAWN = SamplingParams(temperature=0.8, seed=4, max_tokens=40, ignore_eos=True, logprobs=2)
SALTS = itertools.count()
# Two sums in another order per layer, and as many layers before a value as after it.
KV_ERROR = 4 * RELATIVE["float32"]


def start(engine, request_id="a", params=DRAWN, num_steps=3):
    """Adds a request that finds nothing in the prefix cache, and runs some steps; returns its length."""
    engine.add_request(request_id, PROMPT, params, cache_salt=str(next(SALTS)))
    for _ in range(num_steps):
        engine.step()
    return len(engine.page_table(request_id).tokens)


def test_keys_and_values_are_those_of_the_text(engine, checkpoint):
    n = start(engine)
    found = [engine.kv("a", layer) for layer in range(2)]
    text = PROMPT + list(finished_outputs(engine)["a"].outputs[0].token_ids)
    want = forward(checkpoint, text[: n - 1])
    for (keys, values), want_keys, want_values in zip(found, want.keys, want.values, strict=True):
        assert keys.shape == values.shape == (n - 1, 2, 16)
        assert keys.dtype == np.float32
        assert relative_error(keys, want_keys) < KV_ERROR
        assert relative_error(values, want_values) < KV_ERROR


def test_logits_and_attention_are_those_of_the_next_token(engine, checkpoint):
    alone = finish_after(engine, lambda: None)
    n = start(engine, params=dataclasses.replace(DRAWN, temperature=0))
    last, every = engine.inspect("a", [1]), engine.inspect("a", [0, 1], [0, 3], num_queries=None)
    output = finished_outputs(engine)["a"].outputs[0]
    text = PROMPT + list(output.token_ids)
    want = forward(checkpoint, text[:n])
    assert int(last.logits.argmax()) == text[n]
    for found in (last, every):
        assert found.logits.shape == (VOCAB_SIZE,)
        np.testing.assert_allclose(log_softmax(found.logits), log_softmax(want.logits[-1]), atol=TOLERANCE)
        assert found.positions.tolist() == list(range(n))
    logprob = output.logprobs[n - len(PROMPT)][text[n]].logprob
    assert log_softmax(last.logits)[text[n]] == pytest.approx(logprob, abs=TOLERANCE)
    assert last.attention[1].shape == (4, 1, n)
    np.testing.assert_allclose(last.attention[1][:, 0], want.attention[1][:, -1], atol=TOLERANCE)
    for layer, found in every.attention.items():
        assert found.shape == (2, n, n)
        np.testing.assert_allclose(found, want.attention[layer][[0, 3]], atol=TOLERANCE)
        np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
    looked_at = finish_after(engine, lambda: (engine.inspect("a", [0], num_queries=5), engine.kv("a", 1)))
    assert looked_at == alone


def finish_after(engine, look):
    start(engine)
    look()
    return finished_outputs(engine)["a"].outputs[0]


def visible_after(text_len, drops):
    """Which token attended to which, if at a length of the text some positions were dropped."""
    visible = np.tril(np.ones((text_len, text_len), bool))
    for length, positions in drops:
        # The last token of the text is not computed yet, and the first one that attends to what is left.
        visible[length - 1 :, positions] = False
    return visible


def last_block(engine, request_id):
    """The place in its page table of the last block that holds a token."""
    return (len(engine.kv(request_id, 0)[0]) - 1) // SIZE


def drop_blocks(engine, request_id, keep):
    """Drops blocks; returns the length of the text then, and which positions are gone."""
    before = engine.inspect(request_id).positions.tolist()
    engine.drop_kv(request_id, keep)
    after = engine.inspect(request_id).positions.tolist()
    return before[-1] + 1, sorted(set(before) - set(after))


def check_against_reference(checkpoint, output, drops):
    text = PROMPT + list(output.token_ids)
    want = log_softmax(forward(checkpoint, text, visible_after(len(text), drops)).logits)
    for i, (token_id, entries) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        for other, entry in entries.items():
            assert entry.logprob == pytest.approx(want[len(PROMPT) + i - 1, other], abs=TOLERANCE), i
        assert token_id in entries
    return want


def test_later_tokens_do_not_see_what_was_dropped(engine, checkpoint):
    """A sink and the latest blocks (StreamingLLM), then blocks chosen one by one (H2O), twice."""
    start(engine)
    num_blocks = last_block(engine, "a") + 1
    drops = [drop_blocks(engine, "a", [0, *range(num_blocks - 3, num_blocks)])]
    engine.step()
    held = last_block(engine, "a") + 1
    drops.append(drop_blocks(engine, "a", [0, 2, *range(4, held)] if held > 5 else [0, *range(2, held)]))
    n, positions = drops[-1][0], engine.inspect("a", [0])
    output = finished_outputs(engine)["a"].outputs[0]
    check_against_reference(checkpoint, output, drops)
    text = PROMPT + list(output.token_ids)
    want = forward(checkpoint, text[:n], visible_after(n, drops))
    shown = want.attention[0][:, -1, positions.positions]
    np.testing.assert_allclose(positions.attention[0][:, 0], shown, atol=TOLERANCE)


def test_a_drop_is_seen(checkpoint, engine):
    """The reference without the drop differs by far more than the tolerance."""
    start(engine)
    drops = [drop_blocks(engine, "a", [0, last_block(engine, "a")])]
    output = finished_outputs(engine)["a"].outputs[0]
    check_against_reference(checkpoint, output, drops)
    with pytest.raises(AssertionError):
        check_against_reference(checkpoint, output, [])


def test_forks_drafts_and_rollbacks_of_what_is_left(engine, checkpoint):
    start(engine)
    drops = [drop_blocks(engine, "a", [1, 3, last_block(engine, "a")])]
    with pytest.raises(ValueError, match=r"`num_tokens` must be an integer in \[0, .*got 20"):
        engine.rollback("a", 20)
    engine.fork("a", "same", seed=4)
    engine.fork("a", "drafted", seed=4)
    engine.fork("a", "rolled back", seed=4)
    engine.fork("a", "other", seed=5)  # writes other tokens, to a copy of the last block
    n = len(engine.page_table("a").tokens) - len(PROMPT)
    engine.step()
    engine.rollback("rolled back", 1)
    outputs = finished_outputs(engine)
    expected = outputs["a"].outputs[0]
    assert outputs["same"].outputs[0] == expected
    assert outputs["rolled back"].outputs[0].token_ids == expected.token_ids
    for output in outputs.values():
        check_against_reference(checkpoint, output.outputs[0], drops)
    start(engine)
    keep = [1, 3, last_block(engine, "a")]
    engine.drop_kv("a", keep)
    found = engine.verify("a", [*expected.token_ids[n : n + 5], 9])
    assert found.token_ids == expected.token_ids[n : n + 6]
    assert found.num_accepted == 5
    assert finished_outputs(engine)["a"].outputs[0].token_ids == expected.token_ids


def test_the_token_before_the_last_kept_block_stays(engine, checkpoint):
    n = start(engine)
    positions = drop_blocks(engine, "a", [0, last_block(engine, "a")])[1]
    kept = int(engine.page_table("a").entries["position"][-1])
    most = n - kept - 2
    with pytest.raises(
        ValueError, match=rf"`num_tokens` must be an integer in \[0, {most}\].*got {most + 1}"
    ):
        engine.rollback("a", most + 1)
    engine.rollback("a", most)
    assert len(engine.page_table("a").entries) == 2
    output = finished_outputs(engine)["a"].outputs[0]
    assert len(output.token_ids) == 40
    check_against_reference(checkpoint, output, [(kept + 2, positions)])


def test_no_later_block_is_found_in_the_prefix_cache(engine):
    engine.add_request("a", PROMPT, DRAWN, cache_salt="dropped")
    for _ in range(2):
        engine.step()
    n = len(engine.page_table("a").tokens)
    engine.drop_kv("a", [0, last_block(engine, "a")])
    table = engine.page_table("a")
    assert table.entries["position"].tolist() == [0, (n - 2) // SIZE * SIZE]
    assert "dropped" not in table._repr_html_()
    text = PROMPT + list(finished_outputs(engine)["a"].outputs[0].token_ids)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request("cached", text, greedy, cache_salt="dropped")
    engine.add_request("alone", text, greedy, cache_salt=str(next(SALTS)))
    outputs = finished_outputs(engine)
    assert outputs["cached"].num_cached_tokens == (n - 1) // SIZE * SIZE
    assert outputs["cached"].outputs[0].token_ids == outputs["alone"].outputs[0].token_ids


def pressed(checkpoint, num_host_bytes, **settings):
    """Runs requests of which one has dropped blocks, in a pool that does not hold them all."""
    sizes = SIZES | {"num_gpu_blocks_override": 36, "swap_space": num_host_bytes / 2**30}
    with make_engine(checkpoint, few_buckets=True, **(sizes | settings)) as engine:
        for i in range(3):
            engine.add_request(str(i), PROMPT, DRAWN, cache_salt=str(i))
        for _ in range(3):
            engine.step()
        drops = [drop_blocks(engine, "2", [0, *range(4, last_block(engine, "2") + 1)])]
        return drops, finished_outputs(engine)


@pytest.mark.parametrize("preemption_mode", [None, "recompute"])
def test_what_has_dropped_blocks_is_preempted_by_swap(checkpoint, preemption_mode):
    drops, outputs = pressed(checkpoint, 2**20, preemption_mode=preemption_mode)
    assert outputs["2"].metrics.num_preemptions > 0
    assert outputs["2"].outputs[0].finish_reason == "length"
    assert outputs["2"].outputs[0].stop_reason is None
    check_against_reference(checkpoint, outputs["2"].outputs[0], drops)
    check_against_reference(checkpoint, outputs["1"].outputs[0], [])


def test_without_host_memory_it_ends_and_says_so(checkpoint):
    drops, outputs = pressed(checkpoint, 0)
    output = outputs["2"].outputs[0]
    assert output.stop_reason == (
        "host memory is too small to swap out a request with dropped blocks; increase swap_space"
    )
    assert 0 < len(output.token_ids) < 40
    check_against_reference(checkpoint, output, drops)
    for name in "01":
        assert len(outputs[name].outputs[0].token_ids) == 40


def test_a_fork_of_it_does_not_wait(checkpoint):
    with make_engine(checkpoint, few_buckets=True, **(SIZES | {"max_num_seqs": 1})) as engine:
        start(engine)
        engine.drop_kv("a", [0, last_block(engine, "a")])
        with pytest.raises(ValueError, match=r"because no batch slot is free \(max_num_seqs\), and a fork"):
            engine.fork("a")


def test_windows_and_samples(tmp_path):
    write_windowed_checkpoint(tmp_path, 9)
    dense = DenseModel(tmp_path, max_len=80)
    prompt = [i % 190 + 3 for i in range(40)]
    with make_engine(
        tmp_path, few_buckets=True, skip_tokenizer_init=True, max_model_len=128, **SIZES
    ) as engine:
        engine.add_request("a", prompt, SamplingParams(n=2, seed=9, max_tokens=20, ignore_eos=True))
        for _ in range(12):
            engine.step()
        found = [engine.inspect("a", [0, 1], num_queries=3, index=i) for i in range(2)]
        held = engine.kv("a", 0), engine.kv("a", 1)
        table = engine.page_table("a", index=1)
        with pytest.raises(ValueError, match=r"`num_queries` must be smaller .*got 30"):
            engine.inspect("a", [0], num_queries=30)
        with pytest.raises(ValueError, match="must be the id of a request with n=1"):
            engine.drop_kv("a", [0])
        n = 40 + 12
        for i, output in enumerate(finished_outputs(engine)["a"].outputs):
            want = dense.logits([prompt + list(output.token_ids)])[0][n - 1]
            np.testing.assert_allclose(log_softmax(found[i].logits), log_softmax(want), atol=TOLERANCE)
            windowed, full = found[i].attention[0], found[i].attention[1]
            assert windowed.shape == full.shape == (4, 3, n)
            assert not windowed[:, 2, : n - 9].any()
            assert windowed[:, 2, n - 9 :].all()
            assert full[:, 2].all()
            np.testing.assert_allclose(windowed.sum(-1), 1, atol=1e-6)
        assert {len(keys) for keys, _ in held} == {n - 1, n - 1 - (n - 9) // SIZE * SIZE}
        assert (table.entries["ref_count"] == 2).any()
        assert "left the sliding window" in table._repr_html_()
        engine.add_request("b", prompt, SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
        engine.step()
        with pytest.raises(ValueError, match="must be a model in which every layer uses full attention"):
            engine.drop_kv("b", [9])
        finished_outputs(engine)


def test_an_encoder_decoder_model():
    folder = Path(__file__).parent.parent / "models" / "fixtures" / "t5_tied"
    cases = json.loads((folder / "reference.json").read_text(encoding="utf-8"))["cases"]
    case = max(cases, key=lambda case: len(case.get("encoder_token_ids") or case["prompt_token_ids"]))
    encoder = case.get("encoder_token_ids") or case["prompt_token_ids"]
    with make_engine(
        folder, few_buckets=True, skip_tokenizer_init=True, max_model_len=128, **SIZES
    ) as engine:
        engine.add_request("a", {"prompt_token_ids": encoder}, SamplingParams(temperature=0, max_tokens=12))
        for i in range(1, 8):
            engine.step()
            found = engine.inspect("a", [0], num_queries=None)
            assert int(found.logits.argmax()) == case["token_ids"][i]
            np.testing.assert_allclose(found.attention[0].sum(-1), 1, atol=1e-6)
        assert sorted({len(engine.kv("a", layer)[0]) for layer in range(4)}) == sorted({7, len(encoder)})
        with pytest.raises(ValueError, match="must be a model in which every layer uses full attention"):
            engine.drop_kv("a", [1])
        with pytest.raises(ValueError, match=r"`layers` must be .*got 2"):
            engine.inspect("a", [2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda e: e.kv("nobody", 0),
            "`request_id` must be the id of an unfinished request .*got 'nobody'",
        ),
        (lambda e: e.kv("a", 2), r"`layer` must be an integer in \[0, 1\], got 2"),
        (lambda e: e.kv("a", 0, index=1), r"`index` must be an integer in \[0, 0\], got 1"),
        (
            lambda e: e.page_table("waiting"),
            r"must be the id of a running request \(its sequence 0 is waiting\)",
        ),
        (lambda e: e.inspect("a", [2]), r"`layers` must be an integer in \[0, 1\], got 2"),
        (lambda e: e.inspect("a", [0], [4]), r"`heads` must be an integer in \[0, 3\], got 4"),
        (lambda e: e.inspect("a", [0], num_queries=0), "`num_queries` must be an integer in .*got 0"),
        (
            lambda e: e.inspect("dropped", [0], num_queries=2),
            r"`num_queries` must be an integer in \[1, 1\], got 2",
        ),
        (lambda e: e.drop_kv("a", [0]), r"`keep` must be ascending block indices below .*got \(0,\)"),
        (lambda e: e.drop_kv("a", [3, 1]), "must be ascending block indices"),
        (lambda e: e.drop_kv("a", []), "must be ascending block indices"),
        (lambda e: e.drop_kv("waiting", [0]), "must be the id of a running request with one token left"),
    ],
)
def test_errors_name_what_is_allowed_and_change_nothing(engine, call, message):
    expected = finish_after(engine, lambda: None)
    start(engine)
    start(engine, "dropped", num_steps=1)
    engine.drop_kv("dropped", [len(engine.page_table("dropped").entries) - 1])
    engine.add_request("waiting", PROMPT, DRAWN)
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert finished_outputs(engine)["a"].outputs[0].token_ids == expected.token_ids
