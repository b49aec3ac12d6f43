"""What crosses the border between scheduler and executor: values, several tokens, steps in flight."""

import dataclasses
import pickle
import random

import pytest
from helpers.scheduling import (
    EOS,
    TableMirror,
    found,
    make_group,
    make_scheduler,
    result_of,
    rows,
    step,
    take_in,
)

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.model_runner_output import NO_TOKEN, TokenLogprobs
from jax_paged.core.request import SequenceGroup, SequenceStatus
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED, NON_FINITE
from jax_paged.sampling_params import BeamSearchParams


def test_a_step_survives_pickling() -> None:
    sched = make_scheduler(num_blocks=30, num_swap_blocks=20, groups=(CacheGroup(), CacheGroup(window=6)))
    sched.add(make_group(0, [1] * 9, n=3))
    sched.add(make_group(1, [2] * 5, beams=BeamSearchParams(2, max_tokens=4), seed=0))
    sched.add(make_group(2, [3] * 5, stop_token_ids=[7], logit_bias={4: 1.0}, logprobs=2))
    for _ in range(6):
        output = sched.schedule(0.0)
        assert pickle.loads(pickle.dumps(output)) == output
        tops = [TokenLogprobs(-1.0, 1, [5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0])] * len(output.samples)
        result = result_of(output, [5] * len(output.samples), tops)
        assert pickle.loads(pickle.dumps(result)) == result
        sched.update(output, result, 0.0)


def test_a_step_does_not_change_after_it_was_scheduled() -> None:
    sched = make_scheduler(groups=(CacheGroup(), CacheGroup(is_cross=True)), block_size=2)
    group = make_group(0, [1] * 3, encoder_token_ids=[5, 6, 7])
    sched.add(group)
    output = sched.schedule(0.0)
    as_scheduled = pickle.dumps(output)
    for _ in range(4):
        take_in(sched, output, 5)
        output, first = sched.schedule(0.0), output if output.step_id == 0 else first
    assert pickle.dumps(first) == as_scheduled


def test_what_the_executor_is_told_of_a_sequence() -> None:
    sched = make_scheduler()
    sched.add(make_group(0, [1] * 9, n=2, stop_token_ids=[7], logprobs=3))
    sched.add(make_group(1, [2] * 3, ignore_eos=True))
    sched.add(make_group(2, [3] * 3, beams=BeamSearchParams(2, max_tokens=4, temperature=2.0)))
    output = sched.schedule(0.0)
    first, second, other, beams = output.new_sequences
    assert [s.request.request_id for s in output.new_sequences] == ["r0", "r0", "r1", "r2"]
    assert first.request.prompt_token_ids == [1] * 9
    assert first.end_token_ids == {EOS, 7}
    assert (first.request.sampling_params.logprobs, first.request.features) == (3, None)
    assert second.seed != first.seed
    assert second.block_tables == first.block_tables
    assert (other.end_token_ids, other.request.sampling_params.logprobs) == (frozenset(), None)
    assert beams.request.sampling_params.logprobs == 4
    assert beams.request.features is not None
    assert beams.request.features.logprob_temperature == 2.0
    assert [(s.scheduled_index, s.seq_id) for s in output.samples] == [
        (0, first.seq_id),
        (0, second.seq_id),
        (1, other.seq_id),
        (2, beams.seq_id),
    ]


def test_a_step_tells_what_is_new_and_nothing_else() -> None:
    sched = make_scheduler(block_size=4, budget=8)
    group = make_group(0, list(range(10, 22)), max_tokens=12)
    sched.add(group)
    outputs = []
    for _ in range(9):
        outputs.append(sched.schedule(0.0))
        take_in(sched, outputs[-1], 5)
    assert [len(output.new_sequences) for output in outputs] == [1] + [0] * 8
    assert [output.scheduled[0].token_ids for output in outputs[:3]] == [
        [*range(10, 18)],
        [*range(18, 22)],
        [5],
    ]
    news = [len(output.scheduled[0].new_blocks[0]) for output in outputs]
    assert news == [0, 0, 1, 0, 0, 0, 1, 0, 0]  # the prompt's three blocks are in the first message
    assert len({len(pickle.dumps(output)) for output in outputs[3:6]}) == 1


def test_seats_are_given_up_by_those_that_end_or_lose_their_blocks() -> None:
    sched = make_scheduler(num_blocks=7, block_size=2, caching=False)
    for index in range(3):
        sched.add(make_group(index, [index] * 3, max_tokens=4))
    ids = {s.request.request_id: s.seq_id for s in step(sched).new_sequences}
    step(sched)
    output = step(sched)
    assert output.preempted == ("r2",)
    assert output.released_seq_ids == (ids["r2"],)
    sched.abort("r1")
    output = step(sched)
    assert output.released_seq_ids == (ids["r1"],)
    (back,) = output.new_sequences
    assert back.request.request_id == "r2"
    assert back.seq_id not in ids.values()
    assert back.output_token_ids == [5, 5]


@pytest.mark.parametrize("seed", range(6))
def test_tables_made_of_the_news_are_those_of_the_block_manager(seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice([(CacheGroup(),), (CacheGroup(), CacheGroup(window=5)), (CacheGroup(window=3),)])
    sched = make_scheduler(
        num_blocks=30 * len(groups), block_size=2, groups=groups, num_swap_blocks=40, budget=20
    )
    mirror, tokens = TableMirror(), [5, 6, 7, 8, 9, 10, 11, 12]
    for index in range(60):
        beams = BeamSearchParams(3, max_tokens=6) if rng.random() < 0.2 else None
        n = 1 if beams else rng.choice([1, 1, 3])
        sched.add(make_group(index, [index % 4] * rng.randint(1, 14), beams=beams, n=n))
        for _ in range(rng.randint(1, 3)):
            output = sched.schedule(0.0)
            mirror.update(output)
            mirror.check(sched, output)
            if rng.random() < 0.1:
                sched.abort(f"r{rng.randint(0, index)}")
            tops = [
                TokenLogprobs(-1.0, 1, tokens[:6], [-1.0 - rng.random() - i for i in range(6)])
                for _ in output.samples
            ]
            drawn = [rng.choice([*tokens, EOS]) for _ in output.samples]
            sched.update(output, result_of(output, drawn, tops), 0.0)
            sched.block_manager.check_integrity()


def running(num_drafts: int = 0, **values) -> tuple[Scheduler, SequenceGroup, SchedulerOutput]:
    """Returns a request of six prompt tokens and one of output, and its next step, made one with drafts.

    The drafts are 20, 21 and so on, computed after the last token; each has a row of logits.
    """
    sched = make_scheduler(block_size=4)
    group = make_group(0, [9] * 6, **values)
    sched.add(group)
    step(sched, token_id=19)
    seq = group.sequences[0]
    drafts = [20 + i for i in range(num_drafts)]
    copies = sched.block_manager.append_slots([(seq, 1 + num_drafts)])
    assert copies == []
    output = sched.schedule(0.0)
    row, sample = output.scheduled[0], output.samples[0]
    return (
        sched,
        group,
        dataclasses.replace(
            output,
            scheduled=(row._replace(token_ids=[*row.token_ids, *drafts]),),
            samples=(sample._replace(num_logits=1 + num_drafts),),
            num_batched_tokens=1 + num_drafts,
        ),
    )


@pytest.mark.parametrize(
    ("drawn", "accepted"),
    [
        ([20, 21, 22, 30], [20, 21, 22, 30]),  # all drafts were right, and one more comes for nothing
        ([20, 21, 29, 30], [20, 21, 29]),
        ([29, 21, 22, 23], [29]),
        ([20, EOS, 22, 23], [20, EOS]),
    ],
)
def test_drafts_count_as_far_as_they_are_drawn(drawn: list[int], accepted: list[int]) -> None:
    sched, group, output = running(num_drafts=3)
    logprobs = [TokenLogprobs(-0.5 - i, 1, [], []) for i in range(4)]
    update = sched.update(output, result_of(output, [drawn], [logprobs]), 0.0)
    seq = group.sequences[0]
    assert seq.output_token_ids == [19, *accepted]
    ((_, _, token_ids, entries),) = update.new_tokens
    assert token_ids == accepted
    assert entries == logprobs[: len(accepted)]
    assert seq.cumulative_logprob == pytest.approx(sum(e.logprob for e in entries))
    sched.block_manager.check_integrity()
    # Positions 0 to 3 and 4 to 7 are the full blocks, if their tokens count.
    cached = [c.tokens for c in sched.block_manager.pool.contents if c is not None]
    tokens = seq.tokens(0, len(seq))
    full = [tokens[i : i + 4] for i in range(0, seq.num_computed_tokens // 4 * 4, 4)]
    assert sorted(cached) == sorted(full)
    if accepted[-1] != EOS:
        assert seq.num_computed_tokens == len(seq) - 1
        assert rows(sched, sched.schedule(0.0)) == [("r0", len(seq) - 1, 1)]


def test_several_tokens_without_drafts_are_all_accepted_up_to_the_end() -> None:
    """As a burst of decode steps brings them."""
    sched, group, output = running(num_drafts=0, max_tokens=4)
    sched.update(output, result_of(output, [[5, 6, 7, 8, 9]]), 1.0)
    seq = group.sequences[0]
    assert seq.output_token_ids == [19, 5, 6, 7]
    assert seq.status is SequenceStatus.FINISHED_LENGTH_CAPPED
    assert not sched.has_unfinished


def test_tokens_after_a_stop_string_are_dropped() -> None:
    sched, group, output = running(num_drafts=0)
    entries = [TokenLogprobs(-1.0, 1, [], []), TokenLogprobs(-0.3, 1, [], []), TokenLogprobs(-0.7, 1, [], [])]
    sched.update(output, result_of(output, [[5, 6, 7]], [entries]), 1.0)
    seq = group.sequences[0]
    alone = -1.0 + -0.3
    sched.finish(group, seq, SequenceStatus.FINISHED_STOPPED, 1.0, "text", num_output_tokens=3)
    assert seq.output_token_ids == [19, 5, 6]
    assert seq.cumulative_logprob == alone  # to the bit, as if the third had never come
    assert (seq.status, seq.stop_reason) == (SequenceStatus.FINISHED_STOPPED, "text")


def test_non_finite_logits_end_the_request_and_cache_nothing() -> None:
    sched = make_scheduler()
    groups = [make_group(index, [index] * 8, n=2) for index in range(2)]
    for group in groups:
        sched.add(group)
    output = sched.schedule(0.0)
    update = sched.update(output, result_of(output, [5] * 4, is_finite=[False, True]), 3.0)
    assert update.ended == [groups[0]]
    assert update.changed == groups
    assert [new.group for new in update.new_tokens] == [groups[1]] * 2
    assert {(s.status, s.stop_reason) for s in groups[0].sequences} == {
        (SequenceStatus.FINISHED_ABORTED, NON_FINITE)
    }
    cached = [c.tokens for c in sched.block_manager.pool.contents if c is not None]
    assert cached == [[1] * 4, [1] * 4]
    assert groups[0].metrics.finished_time == 3.0


@pytest.mark.parametrize("burst", [False, True])
def test_a_row_that_could_not_be_prepared_ends_its_request_and_caches_nothing(burst: bool) -> None:
    sched = make_scheduler()
    groups = [make_group(index, [index] * 8, n=2) for index in range(2)]
    for group in groups:
        sched.add(group)
    output = sched.schedule(0.0)
    if burst:
        sched.update(output, result_of(output, [5] * 4), 1.0)
        output = sched.schedule(2.0)
    result = dataclasses.replace(result_of(output, [5] * 4), errors={0: "no such image"})
    update = sched.update(output, result, 3.0)
    assert update.ended == [groups[0]]
    assert [new.group for new in update.new_tokens] == [groups[1]] * 2
    assert {(s.status, s.stop_reason) for s in groups[0].sequences} == {
        (SequenceStatus.FINISHED_ABORTED, "no such image")
    }
    if not burst:
        cached = [c.tokens for c in sched.block_manager.pool.contents if c is not None]
        assert cached == [[1] * 4, [1] * 4]
    sched.block_manager.check_integrity()


@pytest.mark.parametrize("index", [0, 1])
def test_a_request_that_allows_no_token_ends(index: int) -> None:
    """All of its samples do, at whichever of them it is noticed first; the other request goes on."""
    sched = make_scheduler()
    groups = [make_group(i, [i] * 8, n=2) for i in range(2)]
    for group in groups:
        sched.add(group)
    output = sched.schedule(0.0)
    tokens = [5] * 4
    tokens[index] = NO_TOKEN
    update = sched.update(output, result_of(output, tokens), 3.0)
    assert update.changed == groups
    assert [(new.seq.index, new.token_ids) for new in update.new_tokens if new.group is groups[0]] == [
        (i, [5]) for i in range(index)
    ]
    assert [new.token_ids for new in update.new_tokens if new.group is groups[1]] == [[5], [5]]
    ends = {(s.status, s.stop_reason) for s in groups[0].sequences}
    assert ends == {(SequenceStatus.FINISHED_ABORTED, NO_TOKEN_ALLOWED)}
    assert [group.metrics.first_token_time for group in groups] == [3.0 if index else None, 3.0]
    assert groups[0].metrics.finished_time == 3.0
    sched.block_manager.check_integrity()
    assert [request_id for request_id, _, _ in rows(sched, sched.schedule(4.0))] == ["r1", "r1"]


@pytest.mark.parametrize(
    ("drawn", "accepted", "ends"),
    [
        ([NO_TOKEN, 21, 22, 23], [], True),
        ([20, 21, NO_TOKEN, 23], [20, 21], True),
        ([20, 29, NO_TOKEN, 23], [20, 29], False),  # after a draft that was wrong, nothing counts
        ([20, EOS, NO_TOKEN, 23], [20, EOS], False),
    ],
)
def test_no_token_after_a_draft_counts_if_the_draft_does(
    drawn: list[int], accepted: list[int], ends: bool
) -> None:
    sched, group, output = running(num_drafts=3)
    update = sched.update(output, result_of(output, [drawn]), 1.0)
    (seq,) = group.sequences
    assert [new.token_ids for new in update.new_tokens] == ([accepted] if accepted else [])
    assert seq.output_token_ids == [19, *accepted]
    assert (seq.stop_reason == NO_TOKEN_ALLOWED) == ends
    assert sched.has_unfinished == (not ends and EOS not in accepted)
    sched.block_manager.check_integrity()


def test_blocks_are_held_back_until_the_steps_that_may_write_to_them_have_returned() -> None:
    sched = make_scheduler(num_blocks=10, caching=False)
    pool = sched.block_manager.pool
    for index in range(2):
        sched.add(make_group(index, [index] * 8))
    output = sched.schedule(0.0)
    assert pool.num_free == 5
    sched.abort("r0")
    assert (pool.num_free, pool.num_held) == (5, 2)
    sched.block_manager.check_integrity()
    take_in(sched, output, 5)
    assert (pool.num_free, pool.num_held) == (7, 0)
    sched.abort("r1")  # between two steps: nothing is in flight
    assert (pool.num_free, pool.num_held) == (9, 0)


def test_a_block_waits_for_the_latest_step_in_flight() -> None:
    pool = make_scheduler(num_blocks=10).block_manager.pool
    a, b, c = (pool.allocate() for _ in range(3))
    pool.begin_step(1)
    pool.release(a)
    pool.begin_step(2)
    pool.release(b)
    pool.end_step(1)
    assert (pool.num_free, pool.num_held) == (7, 1)  # b may be written to by step 2
    pool.release(c)
    pool.end_step(2)
    assert (pool.num_free, pool.num_held) == (9, 0)
    pool.check_integrity([0] * 10, 4)


def test_a_held_block_that_is_cached_can_be_shared_at_once() -> None:
    sched = make_scheduler(num_blocks=10, block_size=4)
    sched.add(make_group(0, [3] * 9, max_tokens=9))
    step(sched)
    output = sched.schedule(0.0)
    sched.abort("r0")
    pool = sched.block_manager.pool
    assert pool.num_held == 3
    again = make_group(1, [3] * 9).sequences[0]
    assert sched.block_manager.allocate(again, "", use_cache=True, num_reserved=0)
    assert again.num_computed_tokens == 8
    assert pool.num_held == 1
    sched.block_manager.check_integrity()
    take_in(sched, output, 5)
    sched.block_manager.free(again)
    assert pool.num_free == pool.num_usable


def test_ids_name_sequences_as_long_as_they_have_a_seat() -> None:
    sched = make_scheduler()
    group = make_group(0, [1] * 3, max_tokens=2)
    sched.add(group)
    output = step(sched)
    (new,) = output.new_sequences
    assert found(sched, new.seq_id) == (group, group.sequences[0])
    step(sched)
    assert group.is_finished
    sched.schedule(0.0)
    assert sched.find(new.seq_id) is None
