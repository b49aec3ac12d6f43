"""Forks, rollbacks and drafts: what a request draws afterwards is what it would have drawn anyway.

Tokens and texts are equal to the bit. So are log-probabilities where the same programs compute them; in
another bucket, XLA adds up in another order.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.edited_engine import idle_engine, session_engine
from helpers.real_model import TOLERANCE, VOCAB_SIZE, finished_outputs, log_softmax, make_engine
from helpers.windowed_model import write_windowed_checkpoint

from jax_paged import BeamSearchParams, SamplingParams
from jax_paged.lab.recording import replay
from jax_paged.sampling_params import RequestOutputKind

pytestmark = pytest.mark.thorough

__all__ = ["idle_engine", "session_engine"]  # fixtures
PROMPT = np.random.default_rng(0).integers(8, VOCAB_SIZE, 21).tolist()
LONG = {"max_tokens": 24, "ignore_eos": True}
PARAMS = {
    "greedy": SamplingParams(temperature=0, logprobs=3, **LONG),
    "drawn": SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=2**40 + 7, logprobs=2, **LONG),
    "biased": SamplingParams(
        seed=5, min_tokens=24, stop_token_ids=list(range(64)), logit_bias={9: 4.0}, **LONG
    ),
    "masked": SamplingParams(seed=6, allowed_token_ids=list(range(100, 130)), prompt_logprobs=1, **LONG),
    "bad words": SamplingParams(temperature=0, bad_words=["a", "bb"], logprobs=0, **LONG),
    "stop string": SamplingParams(seed=11, stop=["never to be seen in any text"], **LONG),
    "penalties": SamplingParams(
        seed=3, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3, logprobs=1, **LONG
    ),
}
SALTS = itertools.count()
DRAFTABLE = [name for name in PARAMS if name != "penalties"]


def add(engine, request_id, params):
    """Adds a request that finds nothing in the prefix cache."""
    engine.add_request(request_id, PROMPT, params, cache_salt=str(next(SALTS)))


def assert_equal(engine, output, expected, *, is_same_program=True):
    """Compares two outputs; their log-probabilities to the bit if the same programs have computed them."""
    assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    assert output.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=24 * TOLERANCE)
    if is_same_program and engine.args.num_scheduler_steps == 1:
        assert output == expected


def drawn_alone(engine):
    """Returns the tokens of the request "drawn" in an engine of its own."""
    add(engine, "alone", PARAMS["drawn"])
    return finished_outputs(engine)["alone"].outputs[0].token_ids


def num_output_tokens(engine, request_id):
    return len(engine.page_table(request_id).tokens) - len(PROMPT)


@pytest.fixture(scope="module")
def expected(session_engine):
    """What each request draws if it is left alone."""
    out = {}
    for name, params in PARAMS.items():
        add(session_engine, name, params)
        out[name] = finished_outputs(session_engine)[name].outputs[0]
        assert len(out[name].token_ids) == 24, "the cases below cut into the middle of it"
    return out


@pytest.mark.parametrize("num_steps", [0, 1, 4])
@pytest.mark.parametrize("name", PARAMS)
def test_a_fork_of_the_same_seed_draws_the_same(engine, expected, name, num_steps):
    add(engine, "a", PARAMS[name])
    for _ in range(num_steps):
        engine.step()
    seed = PARAMS[name].seed
    same = engine.fork("a", seed=0 if seed is None else seed)
    other = engine.fork(same, "other", seed=77)
    outputs = finished_outputs(engine)
    assert_equal(engine, outputs["a"].outputs[0], expected[name])
    assert_equal(engine, outputs[same].outputs[0], expected[name], is_same_program=num_steps > 0)
    assert outputs[same].prompt_logprobs == outputs["a"].prompt_logprobs
    is_greedy = PARAMS[name].temperature == 0
    assert (outputs[other].outputs[0].token_ids == expected[name].token_ids) == is_greedy


def test_a_fork_of_another_seed_draws_what_a_prompt_of_its_text_would(engine):
    params = PARAMS["drawn"]
    add(engine, "a", params)
    for _ in range(3):
        engine.step()
    engine.fork("a", "b", seed=123)
    n = num_output_tokens(engine, "b")
    token_ids = list(finished_outputs(engine)["b"].outputs[0].token_ids)
    continued = dataclasses.replace(params, seed=123, max_tokens=24 - n)
    engine.add_request("c", PROMPT + token_ids[:n], continued)
    assert list(finished_outputs(engine)["c"].outputs[0].token_ids) == token_ids[n:]


def test_a_fork_shares_all_blocks_until_it_writes(engine):
    add(engine, "a", PARAMS["drawn"])
    for _ in range(2):
        engine.step()
    before = engine.page_table("a").entries
    engine.fork("a", "b", seed=1)
    engine.fork("b", "c", seed=2)
    tables = [engine.page_table(name).entries for name in "abc"]
    num_held = int(np.sum(before["num_tokens"] > 0))
    for table in tables:
        assert table["block_id"][:num_held].tolist() == before["block_id"][:num_held].tolist()
        assert (table["ref_count"][:num_held] == 3).all()
    for _ in range(2):
        engine.step()
    tables = [engine.page_table(name) for name in "abc"]
    num_full = int(before["num_tokens"].sum()) // 4
    for table in tables:
        assert (table.entries["ref_count"][:num_full] == 3).all()
        assert (table.entries["ref_count"][num_full:] == 1).all(), "each has a copy of what it wrote to"
    assert "3" in tables[0]._repr_html_()
    finished_outputs(engine)


def test_best_of_n_with_a_scorer_of_ones_own(engine):
    """Ten lines: eight branches, of which the one that a user's function likes best goes on."""
    add(engine, "root", PARAMS["drawn"])
    engine.step()
    branches = ["root", *(engine.fork("root", seed=i) for i in range(7))]
    outputs = {}
    for _ in range(3):
        outputs |= {output.request_id: output for output in engine.step()}
    best = max(branches, key=lambda name: sum(outputs[name].outputs[0].token_ids))
    engine.abort_request(set(branches) - {best})
    (output,) = finished_outputs(engine).values()
    assert output.request_id == best
    assert output.outputs[0].text.startswith(outputs[best].outputs[0].text)


@pytest.mark.parametrize("name", PARAMS)
def test_what_is_rolled_back_is_drawn_again(engine, expected, name):
    for num_steps, share in ((1, 1.0), (3, 0.5), (4, 1.0), (5, 0.0)):
        add(engine, "a", PARAMS[name])
        for _ in range(num_steps):
            engine.step()
        n = num_output_tokens(engine, "a")
        taken = max(1, round(share * n))
        engine.rollback("a", taken)
        assert num_output_tokens(engine, "a") == n - taken
        (output,) = engine.step()
        assert expected[name].text.startswith(output.outputs[0].text)
        output = finished_outputs(engine).get("a", output).outputs[0]
        assert_equal(engine, output, expected[name], is_same_program=taken < n)


def test_a_rollback_before_the_first_step_and_of_a_fork(engine, expected):
    add(engine, "a", PARAMS["drawn"])
    engine.rollback("a", 0)
    with pytest.raises(ValueError, match=r"`num_tokens` must be an integer in \[0, 0\].*got 1"):
        engine.rollback("a", 1)
    for _ in range(3):
        engine.step()
    engine.fork("a", "b", seed=PARAMS["drawn"].seed)
    engine.rollback("b", 2)
    engine.rollback("b", 1)
    outputs = finished_outputs(engine)
    for name in "ab":
        assert_equal(engine, outputs[name].outputs[0], expected["drawn"], is_same_program=name == "a")


def test_a_fork_of_what_was_rolled_back_leaves_no_stale_block(engine, expected):
    """Two texts part where tokens were taken back; the cache then serves either, and never a mixture."""
    salt = str(next(SALTS))
    engine.add_request("a", PROMPT, PARAMS["drawn"], cache_salt=salt)
    engine.step()
    while num_output_tokens(engine, "a") < 9:
        engine.step()
    engine.fork("a", "b", seed=4)
    engine.rollback("b", 7)
    texts = {name: output.outputs[0].token_ids for name, output in finished_outputs(engine).items()}
    assert texts["a"] == expected["drawn"].token_ids
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for token_ids in texts.values():
        engine.add_request("cached", PROMPT + token_ids, greedy, cache_salt=salt)
        engine.add_request("alone", PROMPT + token_ids, greedy, cache_salt=str(next(SALTS)))
        outputs = finished_outputs(engine)
        assert outputs["cached"].num_cached_tokens == (len(PROMPT) + 23) // 4 * 4
        assert outputs["alone"].num_cached_tokens == 0
        assert outputs["cached"].outputs[0].token_ids == outputs["alone"].outputs[0].token_ids


def test_deltas_go_on_behind_what_is_left(engine, expected):
    params = dataclasses.replace(PARAMS["drawn"], output_kind=RequestOutputKind.DELTA)
    add(engine, "a", params)
    shown = []
    for _ in range(2):
        shown += [token for output in engine.step() for token in output.outputs[0].token_ids]
    engine.rollback("a", num_output_tokens(engine, "a"))
    rest = []
    while engine.has_unfinished_requests():
        rest += [token for output in engine.step() for token in output.outputs[0].token_ids]
    assert shown == expected["drawn"].token_ids[: len(shown)]
    assert rest == expected["drawn"].token_ids


@pytest.mark.parametrize("name", DRAFTABLE)
def test_a_draft_changes_nothing_but_the_number_of_steps(engine, expected, dense, name):
    text = expected[name].token_ids
    for num_right, num_wrong in ((0, 1), (1, 0), (3, 3), (7, 0)):
        add(engine, "a", PARAMS[name])
        for _ in range(2):
            engine.step()
        n = num_output_tokens(engine, "a")
        draft = [*text[n : n + num_right], *[(text[n + num_right] + 1) % VOCAB_SIZE] * num_wrong]
        found = engine.verify("a", draft)
        assert found.num_accepted == num_right
        assert found.token_ids == text[n : n + num_right + 1]
        logits = dense.logits([PROMPT + text[:n] + draft])[0][len(PROMPT) + n - 1 : -1]
        want = log_softmax(logits)[np.arange(len(draft)), draft]
        np.testing.assert_allclose(found.logprobs, want, atol=TOLERANCE)
        output = finished_outputs(engine)["a"].outputs[0]
        assert (output.token_ids, output.text) == (text, expected[name].text)
        assert output.cumulative_logprob == pytest.approx(
            expected[name].cumulative_logprob, abs=24 * TOLERANCE
        )


def test_a_draft_ends_where_the_request_ends(engine, expected):
    text = expected["drawn"].token_ids
    for params in (
        dataclasses.replace(PARAMS["drawn"], max_tokens=8),
        dataclasses.replace(PARAMS["drawn"], stop_token_ids=[text[7]]),
    ):
        add(engine, "a", params)
        engine.step()
        n = num_output_tokens(engine, "a")
        end = text.index(text[7]) + 1
        if n >= end:
            continue
        found = engine.verify("a", text[n : n + 7])
        assert found.token_ids == text[n : min(n + 8, end)]
        assert len(found.logprobs) == 7
        (output,) = finished_outputs(engine).values()
        assert output.outputs[0].token_ids == text[:end]


def test_verify_advances_no_other_request(engine, expected):
    for name in ("greedy", "drawn"):
        add(engine, name, PARAMS[name])
    for _ in range(2):
        engine.step()
    n = num_output_tokens(engine, "drawn")
    lengths = num_output_tokens(engine, "greedy")
    engine.verify("drawn", expected["drawn"].token_ids[n : n + 4])
    assert num_output_tokens(engine, "greedy") == lengths
    outputs = finished_outputs(engine)
    for name, output in outputs.items():
        assert output.outputs[0].token_ids == expected[name].token_ids


def test_a_recording_of_all_of_it_replays(checkpoint):
    lines = []
    with make_engine(checkpoint, few_buckets=True, block_size=4, max_num_seqs=4, max_num_batched_tokens=64,
                     num_gpu_blocks_override=40) as engine:  # fmt: skip
        want = drawn_alone(engine)
        engine.record(lines.append)
        add(engine, "a", PARAMS["drawn"])
        for _ in range(3):
            engine.step()
        for seed in range(5):  # more than there are seats
            engine.fork("a", f"b{seed}", seed=seed)
        engine.rollback("b0", 2)
        n = num_output_tokens(engine, "a")
        engine.verify("a", want[n : n + 2])
        engine.drop_kv("b1", [0, len(engine.page_table("b1").entries) - 1])
        outputs = finished_outputs(engine)
        assert len(outputs) == 6
        assert outputs["a"].outputs[0].token_ids == want
    kinds = [json.loads(line)["event"] for line in lines]
    assert kinds.count("edit_request") == 7
    assert replay(lines).num_steps == kinds.count("schedule") + kinds.count("draft")
    with pytest.raises(
        ValueError,
        match="`lines` must be a recording without manual edits or weight updates, got 'edit_request'",
    ):
        replay(lines, max_num_seqs=7)


def test_forks_without_a_seat_or_without_blocks_wait(checkpoint):
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 30}
    with make_engine(checkpoint, few_buckets=True, block_size=4, **settings) as engine:
        want = drawn_alone(engine)
        add(engine, "a", PARAMS["drawn"])
        for _ in range(3):
            engine.step()
        names = [engine.fork("a", seed=PARAMS["drawn"].seed) for _ in range(5)]
        with pytest.raises(ValueError, match="must be the id of a running request"):
            engine.page_table(names[-1])
        engine.rollback(names[-1], 2)
        outputs = finished_outputs(engine)
        assert [outputs[name].outputs[0].token_ids for name in names] == [want] * 5


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_what_was_preempted_is_forked_and_rolled_back_too(checkpoint, preemption_mode):
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 26}
    with make_engine(
        checkpoint, few_buckets=True, block_size=4, preemption_mode=preemption_mode, **settings
    ) as engine:
        names = [str(i) for i in range(4)]
        for name in names:
            engine.add_request(name, [*PROMPT, int(name)], PARAMS["drawn"])
        want = {}
        for name in names:
            engine.abort_request(names)
            engine.add_request(name, [*PROMPT, int(name)], PARAMS["drawn"])
            want[name] = finished_outputs(engine)[name].outputs[0].token_ids
        for name in names:
            engine.add_request(name, [*PROMPT, int(name)], PARAMS["drawn"])
        outputs, forks = {}, {}
        for _ in range(200):
            outputs |= {output.request_id: output for output in engine.step()}
            for name in names:
                output = outputs.get(name)
                if name in forks or output is None or output.finished:
                    continue
                if output.metrics.num_preemptions and len(output.outputs[0].token_ids) > 4:
                    forks[name] = engine.fork(name, seed=PARAMS["drawn"].seed)
                    engine.rollback(name, 3)
                    engine.rollback(forks[name], 1)
            if not engine.has_unfinished_requests():
                break
        assert forks, "somebody was preempted"
        for name in names:
            assert outputs[name].outputs[0].token_ids == want[name]
        for name, fork in forks.items():
            assert outputs[fork].outputs[0].token_ids == want[name]


def test_what_waits_for_blocks_finds_no_prefix_that_was_taken_back(checkpoint):
    """It waits with a prefix in the cache, which was looked up while the others left it no room."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 26}
    with make_engine(checkpoint, few_buckets=True, block_size=4, **settings) as engine:
        want = drawn_alone(engine)
        for name in "ab":
            add(engine, name, PARAMS["drawn"])
        add(engine, "c", dataclasses.replace(PARAMS["drawn"], seed=1))
        queues = engine.scheduler.queues
        while "c" not in queues.waiting or not queues.waiting["c"].metrics.num_preemptions:
            outputs = {output.request_id: output for output in engine.step()}
        engine.step()
        engine.rollback("c", len(queues.waiting["c"].sequences[0].output_token_ids))
        outputs = finished_outputs(engine)
        assert [outputs[name].outputs[0].token_ids for name in "ab"] == [want] * 2
        add(engine, "alone", dataclasses.replace(PARAMS["drawn"], seed=1))
        assert outputs["c"].outputs[0].token_ids == finished_outputs(engine)["alone"].outputs[0].token_ids
        assert outputs["c"].num_cached_tokens <= len(PROMPT) - 1


def test_windows_and_encoders_are_exact(tmp_path):
    write_windowed_checkpoint(tmp_path, 9)
    t5 = Path(__file__).parent.parent / "models" / "fixtures" / "t5_tied"
    windows = {"prompt_token_ids": [i % 190 + 3 for i in range(40)]}
    encoder = {
        "encoder_prompt": {"prompt_token_ids": [5, 6, 7, 8, 9, 10]},
        "decoder_prompt": {"prompt_token_ids": [0, 3, 4, 5, 6]},
    }
    for folder, prompt in ((tmp_path, windows), (t5, encoder)):
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 300}
        with make_engine(
            folder, few_buckets=True, block_size=4, skip_tokenizer_init=True, max_model_len=128, **settings
        ) as engine:
            params = SamplingParams(temperature=0.8, seed=9, max_tokens=30, ignore_eos=True)
            engine.add_request("want", prompt, params)
            want = list(finished_outputs(engine)["want"].outputs[0].token_ids)
            engine.add_request("a", prompt, params)
            for _ in range(20):
                engine.step()
            engine.fork("a", "b", seed=9)
            engine.rollback("a", 1)
            engine.fork("b", "c", seed=9)
            engine.rollback("c", 18)  # far behind the window
            assert engine.verify("b", [*want[20:23], 3]).token_ids == want[20:24]
            outputs = finished_outputs(engine)
            assert [list(outputs[name].outputs[0].token_ids) for name in "abc"] == [want] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda e: e.fork("nobody"),
            "`request_id` must be the id of an unfinished request .*got 'nobody'",
        ),
        (
            lambda e: e.fork("a", "beams"),
            "`new_id` must be a string that is not the id of another unfinished request, got 'beams'",
        ),
        (lambda e: e.fork("a", seed=-2), "`seed` must be .*got -2"),
        (
            lambda e: e.fork("beams"),
            "`request_id` must be the id of a request without beam search, got 'beams'",
        ),
        (
            lambda e: e.rollback("samples", 1),
            "`request_id` must be the id of a request with n=1 and best_of=1, got 'samples'",
        ),
        (lambda e: e.rollback("a", 50), r"`num_tokens` must be an integer in \[0, .*got 50"),
        (lambda e: e.verify("a", []), r"`draft` must be 1 to 7 token ids in \[0, 383\].*got \[\]"),
        (lambda e: e.verify("a", [1] * 8), "must be 1 to 7 token ids"),
        (lambda e: e.verify("a", [384]), r"must be 1 to 7 token ids in \[0, 383\]"),
        (lambda e: e.verify("a", [1.5]), "must be 1 to 7 token ids"),
        (lambda e: e.verify("penalties", [1]), "must be the id of a request without penalties"),
        (
            lambda e: e.verify("waiting", [1]),
            r"must be the id of a running request with one token left to compute \(it is waiting",
        ),
    ],
)
def test_errors_name_what_is_allowed_and_change_nothing(engine, expected, call, message):
    add(engine, "a", PARAMS["drawn"])
    add(engine, "penalties", PARAMS["penalties"])
    engine.add_request("beams", PROMPT, BeamSearchParams(beam_width=2, max_tokens=9))
    engine.add_request("samples", PROMPT, SamplingParams(n=2, max_tokens=9, seed=1))
    engine.step()
    add(engine, "waiting", PARAMS["greedy"])
    with pytest.raises(ValueError, match=message):
        call(engine)
    outputs = finished_outputs(engine)
    for name, other in (("a", "drawn"), ("penalties", "penalties")):
        assert_equal(engine, outputs[name].outputs[0], expected[other], is_same_program=False)
