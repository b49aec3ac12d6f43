"""Who runs, who waits and at what cost, where requests compete for seats, blocks and tokens."""

import itertools
import random

import pytest
from helpers.scheduling import EOS, make_group, make_scheduler, rows, step, take_in

from jax_paged.core.kv_cache.block_pool import BlockPool
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.kv_cache.prefix_cache import STATE_GROUP, CachedPrefix, PrefixCache
from jax_paged.core.kv_cache.state_slots import StateSlots
from jax_paged.core.request import Sequence, SequenceStatus
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.stop_conditions import POOL_TOO_SMALL
from jax_paged.sampling_params import BeamSearchParams


def test_samples_that_ended_give_their_seats_back() -> None:
    """One of eight samples goes on for long; the seven seats of the others are for other requests."""
    sched = make_scheduler(max_num_seqs=8, num_blocks=400)
    sched.add(make_group(0, [0] * 4, n=8, max_tokens=40))
    output = sched.schedule(0.0)
    take_in(sched, output, [5] + [EOS] * 7)
    for index in range(1, 9):
        sched.add(make_group(index, [index] * 4, max_tokens=40))
    output = step(sched)
    assert len(output.scheduled) == 8
    assert set(sched.queues.running) == {f"r{i}" for i in range(8)}
    assert sched.queues.num_reserved_slots == 8


def test_beams_keep_their_batch_slots() -> None:
    """A search may have fewer beams for a while, and comes back to its width."""
    sched = make_scheduler(max_num_seqs=4)
    group = make_group(0, [0] * 4, beams=BeamSearchParams(4, max_tokens=8))
    sched.add(group)
    assert group.num_reserved_slots == 4
    sched.schedule(0.0)
    assert sched.queues.num_reserved_slots == 4


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_nobody_is_preempted_for_one_that_does_not_fit_even_so(mode: str) -> None:
    """r0 can't be preempted (its priority is higher), and without its blocks r2 does not fit."""
    sched = make_scheduler(
        num_blocks=11,
        block_size=4,
        scheduling_policy="priority",
        preemption_mode=mode,
        num_swap_blocks=50,
        caching=False,
    )
    sched.add(make_group(0, [0] * 16, priority=0, max_tokens=9))
    sched.add(make_group(1, [1] * 12, priority=2, max_tokens=9))
    step(sched)
    sched.add(make_group(2, [2] * 28, priority=1))  # seven blocks: six are not r0's
    for _ in range(3):
        output = step(sched)
        assert output.preempted == ()
        assert len(output.scheduled) == 2
    assert set(sched.queues.waiting) == {"r2"}


def test_nobody_is_preempted_for_blocks_that_another_holds_too() -> None:
    """r1 shares four of its five blocks with r0, which goes before r2: one is all that it would give up."""
    sched = make_scheduler(num_blocks=8, block_size=4, scheduling_policy="priority")
    prompt = [7] * 16
    for index, priority in enumerate([0, 2]):
        sched.add(make_group(index, [*prompt, index], priority=priority, max_tokens=3))
        step(sched)
    assert sched.block_manager.num_free_blocks == 1
    sched.add(make_group(2, [9] * 12, priority=1))
    output = step(sched)
    assert output.preempted == ()
    assert len(output.scheduled) == 2


def test_as_many_are_preempted_as_it_takes_and_no_more() -> None:
    sched = make_scheduler(num_blocks=13, block_size=4, scheduling_policy="priority", caching=False)
    for index in range(4):
        sched.add(make_group(index, [index] * 9, priority=2, max_tokens=20))  # three blocks each
    step(sched)
    sched.add(make_group(4, [4] * 20, priority=1))
    output = sched.schedule(0.0)
    assert output.preempted == ("r3", "r2")
    assert ("r4", 0, 20) in rows(sched, output)


def test_seats_alone_can_be_what_is_missing() -> None:
    sched = make_scheduler(max_num_seqs=4, scheduling_policy="priority")
    for index in range(4):
        sched.add(make_group(index, [index] * 3, priority=index))
    step(sched)
    sched.add(make_group(4, [4] * 3, n=3, priority=2))  # of r2's and r3's seats only r3's are to be had
    assert step(sched).preempted == ()
    sched.add(make_group(5, [5] * 3, n=2, priority=1))  # goes before r4, and takes those of both
    assert step(sched).preempted == ("r3", "r2")


def test_a_shared_prefix_counts_once_when_blocks_are_taken_for_another() -> None:
    """The victims share their prompt with the newcomer too: little is gained, and little is needed."""
    sched = make_scheduler(num_blocks=8, block_size=4, scheduling_policy="priority")
    prompt = [7] * 16
    for index in range(3):
        sched.add(make_group(index, [*prompt, index], priority=2, max_tokens=9))
        step(sched)
    assert sched.block_manager.num_free_blocks == 0
    sched.add(make_group(3, [*prompt, 99], priority=1))  # needs one block of its own
    output = sched.schedule(0.0)
    assert output.preempted == ("r2",)
    assert ("r3", 16, 1) in rows(sched, output)


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_a_long_prompt_leaves_tokens_to_those_that_decode(scheduling_policy: str) -> None:
    sched = make_scheduler(
        num_blocks=2000, budget=16, scheduling_policy=scheduling_policy, max_model_len=2000
    )
    decoding = [
        make_group(i, [i] * 2, priority=int(scheduling_policy == "priority"), max_tokens=400)
        for i in range(6)
    ]
    for group in decoding:
        sched.add(group)
    step(sched)
    long = make_group(6, [6] * 1500, max_tokens=4)
    sched.add(long)
    num_steps = 0
    while not long.sequences[0].output_token_ids:
        before = [len(group.sequences[0]) for group in decoding]
        output = step(sched)
        num_steps += 1
        assert output.num_batched_tokens == 16 or long.sequences[0].output_token_ids
        assert [len(group.sequences[0]) for group in decoding] == [n + 1 for n in before]
    assert num_steps == 150  # ten tokens of the prompt in each step, beside six that decode


def test_newcomers_leave_tokens_to_those_that_decode_behind_them() -> None:
    """Three prompts of a higher priority come at once, to a budget that the decodes nearly fill."""
    sched = make_scheduler(num_blocks=200, budget=10, scheduling_policy="priority", max_num_seqs=9)
    decoding = [make_group(i, [i] * 3, priority=1, max_tokens=60) for i in range(6)]
    for group in decoding:
        sched.add(group)
    while any(not group.sequences[0].output_token_ids for group in decoding):
        step(sched)
    for index in range(6, 9):
        sched.add(make_group(index, [index] * 60))
    for _ in range(20):
        before = [len(group.sequences[0]) for group in decoding]
        output = step(sched)
        assert output.preempted == ()
        assert [len(group.sequences[0]) for group in decoding] == [n + 1 for n in before]
        scheduled = {sched.find(row.seq_id)[0].request_id for row in output.scheduled}
        assert sched.queues.running.keys() <= scheduled, "a request holds blocks and computes nothing"


def test_a_cached_prompt_takes_no_token_of_those_that_decode() -> None:
    """One token of it is left to compute, and a long prompt before it takes all but those of two that run."""
    sched = make_scheduler(num_blocks=200, budget=5, scheduling_policy="priority", max_num_seqs=5)
    sched.add(make_group(0, [7] * 9, max_tokens=1))
    while sched.has_unfinished:
        step(sched)
    decoding = [make_group(i, [i] * 2, priority=1, max_tokens=60) for i in range(1, 3)]
    for group in decoding:
        sched.add(group)
    while any(not group.sequences[0].output_token_ids for group in decoding):
        step(sched)
    sched.add(make_group(3, [3] * 60))
    for index in range(4, 6):
        sched.add(make_group(index, [7] * 9))
    before = [len(group.sequences[0]) for group in decoding]
    output = step(sched)
    assert [len(group.sequences[0]) for group in decoding] == [n + 1 for n in before]
    assert output.num_batched_tokens == 5


def test_no_prompt_preempts_for_a_step_that_has_no_tokens_for_it() -> None:
    """Without chunks: the first newcomer's prompt takes the step, the second one's would not fit into it."""
    sched = make_scheduler(
        num_blocks=31,
        block_size=4,
        budget=64,
        max_model_len=64,
        scheduling_policy="priority",
        enable_chunked_prefill=False,
    )
    sched.add(make_group(0, [0] * 40, priority=2, max_tokens=9))
    step(sched)
    sched.add(make_group(1, [1] * 40, priority=1))
    sched.add(make_group(2, [2] * 40, priority=0))
    output = step(sched)
    assert output.preempted == ()


def test_a_step_that_needs_the_results_is_not_scheduled_before_them() -> None:
    """The first takes the last block of the second, which may be about to end."""
    sched = make_scheduler(num_blocks=5, block_size=4, caching=False)
    sched.add(make_group(0, [1] * 7))
    sched.add(make_group(1, [2] * 8))
    sched.schedule(0.0)
    assert sched.can_run_ahead
    sched.schedule(0.0)
    assert not sched.can_run_ahead
    with pytest.raises(AssertionError, match="requires results of steps in flight"):
        sched.schedule(0.0)


def test_a_request_that_never_runs_is_an_error() -> None:
    """All blocks but one are pinned: not the length of its output ends it."""
    sched = make_scheduler(num_blocks=6, block_size=4)
    sched.add(make_group(0, [0] * 17, max_tokens=1))
    step(sched)
    sched.block_manager.pin("all", [0] * 16, "")
    group = make_group(1, [1] * 9)
    sched.add(group)
    output = step(sched)
    assert output.ended == ("r1",)
    (seq,) = group.sequences
    assert (seq.status, seq.stop_reason) == (SequenceStatus.FINISHED_IGNORED, POOL_TOO_SMALL)
    assert seq.status.finish_reason == "error"


def count_lookups(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    lookups: list[object] = []
    find = BlockPool.find_cached
    monkeypatch.setattr(
        BlockPool, "find_cached", lambda pool, content: (lookups.append(content), find(pool, content))[1]
    )
    return lookups


@pytest.mark.parametrize("groups", [(CacheGroup(),), (CacheGroup(), CacheGroup(window=40))])
def test_a_long_prompt_that_waits_is_looked_up_once(
    groups: tuple[CacheGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares 200 blocks with a request that runs, and lacks room for those of its own."""
    sched = make_scheduler(
        num_blocks=400 * len(groups), budget=2000, max_model_len=2000, groups=groups, max_num_seqs=4
    )
    prefix = [i % 50 for i in range(800)]
    for index, tokens in enumerate(([*prefix, 1], [99] * 100, [98] * 30)):
        sched.add(make_group(index, tokens, max_tokens=500))
    step(sched)
    lookups = count_lookups(monkeypatch)
    manager, waiting = sched.block_manager, make_group(3, [*prefix, *[77] * 90]).sequences[0]
    for i in range(60):  # blocks become full and are cached, others are evicted, step by step
        num_reserved = manager.num_free_blocks - 2
        assert not manager.allocate(waiting, "", use_cache=True, num_reserved=num_reserved)
        if i == 0:
            first = len(lookups)
            assert first >= 200
        step(sched)
        if i % 20 == 5:  # blocks behind the 790th token, of which it needs other ones, come and go
            sched.add(make_group(10 + i, [*prefix[:790], *[i] * 30], max_tokens=1))
    # Each newcomer is looked up, and after it the other once more; 60 times 200 without what is kept.
    assert len(lookups) - first <= (3 * 410 + 20) * len(groups)


def kept_and_fresh(prefixes: PrefixCache, kept: Sequence) -> tuple[CachedPrefix, CachedPrefix]:
    """Returns what the walk that is kept finds, and what a new one does."""
    found = prefixes.longest(kept, "")
    walk, prefixes._lookup = prefixes._lookup, None
    fresh = prefixes.longest(Sequence(kept.prompt_token_ids), "")
    prefixes._lookup = walk
    return found, fresh


@pytest.mark.parametrize("seed", range(20))
def test_a_walk_that_is_kept_finds_what_a_new_one_does(seed: int) -> None:
    """Blocks of a prompt enter and leave the cache between two look-ups, in any order."""
    rng = random.Random(seed)
    several = (CacheGroup(),), (CacheGroup(), CacheGroup(window=9)), (CacheGroup(window=9),)
    for groups, num_slots in itertools.product(several, (0, 100)):
        states, num_blocks = StateSlots(num_slots, 0, 2, makes_checkpoints=True), 15
        pools = dict.fromkeys(range(len(groups)), BlockPool(100)) | (
            {STATE_GROUP: states.pool} if num_slots else {}
        )
        prefixes = PrefixCache(pools[0], groups, 2, states)
        kept = Sequence([i % 3 for i in range(2 * num_blocks + 1)])
        held: dict[tuple[int, int], int] = {}  # block by position and cache group
        for _ in range(400):
            for _ in range(rng.randint(1, 4)):
                i, g = place = rng.randrange(num_blocks), rng.choice(list(pools))
                if place in held:
                    pools[g].remove_from_cache(held[place])
                    pools[g].release(held.pop(place))
                elif rng.random() < 0.7:
                    held[place] = pools[g].allocate()
                    content = prefixes._content(kept, i, "")._replace(group=g)
                    pools[g].add_to_cache(held[place], content)
            found, fresh = kept_and_fresh(prefixes, kept)
            assert found == fresh


def test_a_walk_does_not_go_on_behind_a_hole() -> None:
    """The cache loses a block of a kept prefix, then gains one behind the hole."""
    sched = make_scheduler(num_blocks=30, block_size=4)
    prompt = list(range(24))
    sched.add(make_group(0, [*prompt, 99], max_tokens=1))
    step(sched)
    pool, kept = sched.block_manager.pool, Sequence([*prompt, 98])
    assert sched.block_manager.prefixes.longest(kept, "").num_blocks == 6
    blocks = {tuple(content.tokens): b for b, content in enumerate(pool.contents) if content is not None}
    last = pool.contents[blocks[20, 21, 22, 23]]
    pool.remove_from_cache(blocks[12, 13, 14, 15])
    assert sched.block_manager.prefixes.longest(kept, "").num_blocks == 3
    pool.remove_from_cache(blocks[20, 21, 22, 23])
    pool.add_to_cache(blocks[20, 21, 22, 23], last)
    found, fresh = kept_and_fresh(sched.block_manager.prefixes, kept)
    assert found == fresh
    assert found.num_blocks == 3
    assert 0 not in found.tables[0]


def test_entries_of_aborted_requests_are_dropped() -> None:
    queues = RequestQueues()
    first = make_group(0, [1])
    queues.add(first)
    for index in range(1, 5000):
        group = make_group(index, [1])
        queues.add(group)
        queues.remove(group)
        assert len(queues._heap) < 100
    assert queues.first_waiting() is first
    assert len(queues._in_heap) == len(queues._heap)


def test_a_request_that_is_tried_again_has_one_entry() -> None:
    """Under a window the prompt gets its first blocks, and then not those of its chunk: it waits again."""
    queues = RequestQueues()
    groups = [make_group(index, [1]) for index in range(3)]
    for group in groups:
        queues.add(group)
    for _ in range(50):
        queues.move_to_running(groups[0])
        queues.move_to_waiting(groups[0])
    assert len(queues._heap) == 3
    assert queues.first_waiting() is groups[0]


def drain(sched: Scheduler) -> None:
    while sched.has_unfinished:
        step(sched)
    assert sched.block_manager.num_free_blocks == sched.block_manager.num_usable_blocks
