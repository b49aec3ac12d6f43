"""Who runs, who waits and at what cost, where requests compete for seats, blocks and tokens."""

import random

import pytest
from helpers.scheduling import EOS, make_group, make_scheduler, rows, step, take_in

from jax_paged.core.block_pool import BlockPool
from jax_paged.core.cache_group import CacheGroup
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.sequence import SequenceStatus
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
    assert sched.queues.num_seats_taken == 8


def test_beams_keep_their_seats() -> None:
    """A search may have fewer beams for a while, and comes back to its width."""
    sched = make_scheduler(max_num_seqs=4)
    group = make_group(0, [0] * 4, beams=BeamSearchParams(4, max_tokens=8))
    sched.add(group)
    assert group.num_seats == 4
    sched.schedule(0.0)
    assert sched.queues.num_seats_taken == 4


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_nobody_is_preempted_for_one_that_does_not_fit_even_so(mode: str) -> None:
    """r0 can't be preempted (its priority is higher), and without its blocks r2 does not fit."""
    sched = make_scheduler(
        num_blocks=11,
        block_size=4,
        policy="priority",
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


def test_as_many_are_preempted_as_it_takes_and_no_more() -> None:
    sched = make_scheduler(num_blocks=13, block_size=4, policy="priority", caching=False)
    for index in range(4):
        sched.add(make_group(index, [index] * 9, priority=2, max_tokens=20))  # three blocks each
    step(sched)
    sched.add(make_group(4, [4] * 20, priority=1))
    output = sched.schedule(0.0)
    assert output.preempted == ("r3", "r2")
    assert ("r4", 0, 20) in rows(sched, output)


def test_seats_alone_can_be_what_is_missing() -> None:
    sched = make_scheduler(max_num_seqs=4, policy="priority")
    for index in range(4):
        sched.add(make_group(index, [index] * 3, priority=index))
    step(sched)
    sched.add(make_group(4, [4] * 3, n=3, priority=2))  # of r2's and r3's seats only r3's are to be had
    assert step(sched).preempted == ()
    sched.add(make_group(5, [5] * 3, n=2, priority=1))  # goes before r4, and takes those of both
    assert step(sched).preempted == ("r3", "r2")


def test_a_shared_prefix_counts_once_when_blocks_are_taken_for_another() -> None:
    """The victims share their prompt with the newcomer too: little is gained, and little is needed."""
    sched = make_scheduler(num_blocks=8, block_size=4, policy="priority")
    prompt = [7] * 16
    for index in range(3):
        sched.add(make_group(index, [*prompt, index], priority=2, max_tokens=9))
        step(sched)
    assert sched.block_manager.num_free_blocks == 0
    sched.add(make_group(3, [*prompt, 99], priority=1))  # needs one block of its own
    output = sched.schedule(0.0)
    assert output.preempted == ("r2",)
    assert ("r3", 16, 1) in rows(sched, output)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_long_prompt_leaves_tokens_to_those_that_decode(policy: str) -> None:
    sched = make_scheduler(num_blocks=2000, budget=16, policy=policy, max_model_len=2000)
    decoding = [make_group(i, [i] * 2, priority=int(policy == "priority"), max_tokens=400) for i in range(6)]
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
    find = BlockPool.find
    monkeypatch.setattr(
        BlockPool, "find", lambda pool, content: (lookups.append(content), find(pool, content))[1]
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


@pytest.mark.parametrize("seed", range(5))
def test_a_walk_that_is_kept_finds_what_a_new_one_does(seed: int) -> None:
    """Blocks are cached and evicted between the look-ups of one prompt."""
    rng = random.Random(seed)
    for groups in ((CacheGroup(),), (CacheGroup(), CacheGroup(window=9)), (CacheGroup(window=9),)):
        sched = make_scheduler(num_blocks=40 * len(groups), groups=groups, max_num_seqs=3, block_size=2)
        prefixes, prompt = sched.block_manager.prefixes, [i % 3 for i in range(30)]
        kept = make_group(99, prompt).sequences[0]
        for index in range(60):
            shared = prompt[: rng.choice([0, 4, 12, 29])]
            sched.add(make_group(index, [*shared, *(rng.randrange(3) for _ in range(6))], max_tokens=3))
            for _ in range(rng.randint(1, 3)):
                step(sched)
                prefixes_found = prefixes.longest(kept, "")
                prefixes.forget_walk()
                assert prefixes.longest(make_group(98, prompt).sequences[0], "") == prefixes_found
                prefixes.forget_walk()
                assert prefixes.longest(kept, "") == prefixes_found  # kept until the next step's changes


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
        queues.run(groups[0])
        queues.wait(groups[0])
    assert len(queues._heap) == 3
    assert queues.first_waiting() is groups[0]


def drain(sched: Scheduler) -> None:
    while sched.has_unfinished:
        step(sched)
    assert sched.block_manager.num_free_blocks == sched.block_manager.num_usable_blocks
