"""The paper's own examples of sharing (Figures 8 and 9), and what a sequence group is made of."""

import math
import random

import pytest
from helpers import scheduling
from helpers.scheduling import TableMirror, found, samples_per_row, take_in
from helpers.toy_device import EOS, VOCAB_SIZE, ToyDevice, reference_beams, root, top_logprobs

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.features import beam_search
from jax_paged.core.model_runner_output import TokenLogprobs
from jax_paged.core.request import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.sampling_params import BeamSearchParams

NO_EOS: frozenset[int] = frozenset()


def make_group(prompt: list[int], beams: BeamSearchParams | None = None, **values) -> SequenceGroup:
    return scheduling.make_group(0, prompt, beams=beams, **values)


def make_scheduler(num_blocks: int, block_size: int = 4, max_num_seqs: int = 4, **settings) -> Scheduler:
    return scheduling.make_scheduler(
        num_blocks,
        block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=64,
        num_swap_blocks=50,
        **settings,
    )


def tables_of(sched: Scheduler, group: SequenceGroup) -> list[list[int]]:
    return [list(sched.block_manager.block_tables[seq][0]) for seq in group.sequences]


def counts_of(sched: Scheduler, blocks: list[int]) -> list[int]:
    return [sched.block_manager.pool.ref_counts[block] for block in blocks]


def update(sched: Scheduler, output: SchedulerOutput, *tops: list[tuple[int, float]]) -> None:
    """Hands back a step: the most likely tokens of each row, of which the first is drawn."""
    logprobs = [TokenLogprobs(top[0][1], 1, [t for t, _ in top], [x for _, x in top]) for top in tops]
    take_in(sched, output, [top[0][0] for top in tops], 0.0, logprobs)
    sched.block_manager.check_integrity()


def test_figure_8_parallel_sampling():
    """Two samples share a prompt of seven tokens; the first to write to its last block copies it."""
    sched = make_scheduler(num_blocks=20)
    group = make_group([4, 20, 5, 7, 70, 80, 90], n=2)
    sched.add(group)
    output = sched.schedule(0.0)
    ((full, last),) = {tuple(table) for table in tables_of(sched, group)}
    assert counts_of(sched, [full, last]) == [2, 2]
    mirror = TableMirror()
    mirror.update(output)
    assert samples_per_row(output) == [2]  # one prefill for both
    update(sched, output, [(30, -1.0)], [(31, -1.0)])
    assert [seq.output_token_ids for seq in group.sequences] == [[30], [31]]
    assert [seq.seed for seq in group.sequences] == [group.sampling_params.seed_of(i) for i in (0, 1)]

    output = sched.schedule(0.0)  # the eighth token goes into the shared block
    new = tables_of(sched, group)[0][1]
    assert output.blocks_to_copy == ((last, new),)
    assert tables_of(sched, group) == [[full, new], [full, last]]
    assert counts_of(sched, [full, last, new]) == [2, 1, 1]
    mirror.update(output)
    assert [mirror.tables[row.seq_id] for row in output.scheduled] == [[[full, new]], [[full, last]]]
    update(sched, output, [(32, -1.0)], [(33, -1.0)])

    output = sched.schedule(0.0)  # the ninth begins a block: nothing to copy
    assert output.blocks_to_copy == ()
    (_, _, a), (_, _, b) = tables_of(sched, group)
    assert len({full, last, new, a, b}) == 5
    assert counts_of(sched, [full, last, new, a, b]) == [2, 1, 1, 1, 1]
    sched.abort("r0")
    assert sched.block_manager.num_free_blocks == 14  # the step in flight may still write to its blocks
    update(sched, output, [(34, -1.0)], [(35, -1.0)])
    assert sched.block_manager.num_free_blocks == 19


@pytest.mark.parametrize("n", [2, 3, 5])
def test_all_but_one_copy_a_shared_last_block(n):
    sched = make_scheduler(num_blocks=40, max_num_seqs=5)
    group = make_group([1] * 6, n=n)
    sched.add(group)
    update(sched, sched.schedule(0.0), *[[(9, -1.0)]] * n)
    ((full, last),) = {tuple(table) for table in tables_of(sched, group)}
    output = sched.schedule(0.0)
    assert [source for source, _ in output.blocks_to_copy] == [last] * (n - 1)
    tables = tables_of(sched, group)
    assert len({table[1] for table in tables}) == n
    assert tables[-1] == [full, last]
    assert sched.block_manager.num_free_blocks == 39 - 1 - n


def test_a_full_prompt_block_is_never_copied():
    sched = make_scheduler(num_blocks=20)
    group = make_group([1] * 8, n=3)
    sched.add(group)
    update(sched, sched.schedule(0.0), *[[(9, -1.0)]] * 3)
    output = sched.schedule(0.0)
    assert output.blocks_to_copy == ()
    shared = tables_of(sched, group)[0][:2]
    assert [table[:2] for table in tables_of(sched, group)] == [shared] * 3
    assert counts_of(sched, shared) == [3, 3]


def test_the_last_sample_left_writes_in_place():
    sched = make_scheduler(num_blocks=20)
    group = make_group([1] * 6, n=2)
    sched.add(group)
    update(sched, sched.schedule(0.0), [(EOS, -1.0)], [(9, -1.0)])
    assert [seq.status.name for seq in group.sequences] == ["FINISHED_STOPPED", "RUNNING"]
    assert sched.schedule(0.0).blocks_to_copy == ()


def test_figure_9_beam_search():
    """Width 4. Beams 0 to 2 share three blocks and part at the fourth, beam 3 parted after the first.

    Then all of the best four continue beams 1 and 2: the blocks that only 0 and 3 had are free, those of 1
    and 2 shared by two beams each, and four new blocks begin.
    """
    manager = BlockManager(13, 4, False)

    def grow(seq: Sequence, tokens: list[int]) -> list[int]:
        seq.output_token_ids += tokens
        assert manager.append_slots([(seq, len(seq) - seq.num_computed_tokens)]) == []
        seq.num_computed_tokens = len(seq)
        return manager.block_tables[seq][0]

    beams = [Sequence([0] * 4)]
    assert manager.allocate(beams[0], "", use_cache=True, num_reserved=0)
    beams[0].num_computed_tokens = 4
    beams.append(beams[0].fork(0, 0))
    assert manager.fork(beams[0], beams[1], 4)
    digressing = beams.pop()
    grow(beams[0], [1] * 8)
    for _ in range(2):
        beams.append(beams[0].fork(0, 0))
        assert manager.fork(beams[0], beams[-1], 12)
    beams.append(digressing)
    tables = [grow(beam, [2 + i] * n) for i, (beam, n) in enumerate(zip(beams, (4, 4, 4, 12), strict=True))]
    manager.check_integrity()
    common, parted = tables[0][:3], tables[3][1:]
    fourth = [table[3] for table in tables[:3]]
    assert [table[:3] for table in tables[:3]] == [common] * 3
    assert tables[3][0] == common[0]
    assert len({*common, *parted, *fourth}) == 9
    counts = manager.pool.ref_counts
    assert [counts[b] for b in common] == [4, 3, 3]
    assert [counts[b] for b in parted + fourth] == [1] * 6
    assert manager.num_free_blocks == 3

    children = [beams[1].fork(0, 0), beams[2].fork(0, 0)]
    for parent, child in zip(beams[1:3], children, strict=True):
        assert manager.fork(parent, child, 16)
    for beam in (beams[0], beams[3]):
        manager.free(beam)
    manager.check_integrity()
    assert [counts[b] for b in common] == [4, 4, 4]
    assert [counts[b] for b in fourth] == [0, 2, 2]
    assert [counts[b] for b in parted] == [0, 0, 0]
    assert manager.num_free_blocks == 7
    survivors = [beams[1], children[0], beams[2], children[1]]
    for i, beam in enumerate(survivors):
        beam.output_token_ids.append(50 + i)
    assert manager.append_slots([(beam, 1) for beam in survivors]) == []  # full blocks are not copied
    manager.check_integrity()
    assert [manager.block_tables[b][0][:4] for b in survivors] == [[*common, fourth[1]]] * 2 + [
        [*common, fourth[2]]
    ] * 2
    new = [manager.block_tables[b][0][4] for b in survivors]
    assert len({*new, *common, *fourth[1:]}) == 9
    assert [counts[b] for b in new] == [1] * 4
    assert manager.num_free_blocks == 3


def test_beams_are_forked_copied_and_freed_by_the_scheduler():
    """As Figure 9, from the prompt on, with a last block that is partly filled: it is copied once a fork."""
    sched = make_scheduler(num_blocks=30)
    group = make_group([1] * 4, BeamSearchParams(beam_width=4, max_tokens=20))
    sched.add(group)
    first = [(10 + i, -1.0 - i) for i in range(8)]
    update(sched, sched.schedule(0.0), first)
    assert [seq.output_token_ids for seq in group.sequences] == [[10], [11], [12], [13]]
    assert [seq.cumulative_logprob for seq in group.sequences] == [-1.0, -2.0, -3.0, -4.0]
    (prompt_block,) = {block for table in tables_of(sched, group) for block in table}
    assert counts_of(sched, [prompt_block]) == [4]

    # Each goes on by itself: four blocks of their own, the prompt's is shared.
    go_on = [[(5, -0.1), *((20 + i, -50.0) for i in range(7))]] * 4
    output = sched.schedule(0.0)
    assert output.blocks_to_copy == ()
    tables = tables_of(sched, group)
    assert len({*(b for t in tables for b in t)}) == 5
    update(sched, output, *go_on)
    assert tables_of(sched, group) == tables

    # Now beams 1 and 2 have all of the best four continuations.
    old = list(group.sequences)
    two = [[(6, -0.1), (7, -0.2), *((20 + i, -50.0) for i in range(6))]] * 2
    none = [[(20 + i, -50.0 - i) for i in range(8)]]
    update(sched, sched.schedule(0.0), *none, *two, *none)
    assert [seq.output_token_ids for seq in group.sequences] == [
        [11, 5, 6], [11, 5, 7], [12, 5, 6], [12, 5, 7]
    ]  # fmt: skip
    own = [table[1] for table in tables]
    assert [table[1] for table in tables_of(sched, group)] == [own[1], own[1], own[2], own[2]]
    assert counts_of(sched, [prompt_block, *own]) == [4, 0, 2, 2, 0]
    assert [seq in sched.block_manager.block_tables for seq in old] == [False, True, True, False]

    output = sched.schedule(0.0)
    after = [table[1] for table in tables_of(sched, group)]
    assert sorted(source for source, _ in output.blocks_to_copy) == sorted([own[1], own[2]])
    assert {target for _, target in output.blocks_to_copy} == set(after) - {own[1], own[2]}
    assert len(set(after)) == 4
    assert counts_of(sched, [prompt_block, *after]) == [4, 1, 1, 1, 1]
    update(sched, output, *go_on)
    sched.abort("r0")
    assert sched.block_manager.num_free_blocks == 29
    assert {seq.status for seq in group.sequences} == {SequenceStatus.FINISHED_ABORTED}


def test_beams_that_end_hold_no_blocks_and_are_ranked():
    sched = make_scheduler(num_blocks=30)
    group = make_group([1] * 4, BeamSearchParams(beam_width=2, max_tokens=20))
    sched.add(group)
    update(sched, sched.schedule(0.0), [(EOS, -1.0), (5, -2.0), (6, -3.0), (7, -9.0)])
    assert [seq.output_token_ids for seq in group.completed] == [[EOS]]
    assert [seq.output_token_ids for seq in group.sequences] == [[5], [6]]
    assert set(sched.block_manager.block_tables) == set(group.sequences)
    # One more ends. No beam can score better than -2.1 / 24 now, which both -1 / 4 and -2.1 / 5 do not beat.
    update(
        sched,
        sched.schedule(0.0),
        [(EOS, -0.1), (7, -0.2), (8, -5.0), (9, -6.0)],
        [(7, -0.3), (8, -1.0), (9, -2.0), (10, -3.0)],
    )
    assert [seq.cumulative_logprob for seq in group.completed] == [-1.0, -2.1]
    assert not group.is_finished
    while sched.has_unfinished:
        output = sched.schedule(0.0)
        update(sched, output, *[[(t, -40.0) for t in (7, 8, 9, 10)]] * len(output.scheduled))
    assert [seq.output_token_ids for seq in group.sequences] == [[EOS], [5, EOS]]
    assert [seq.status.finish_reason for seq in group.sequences] == ["stop", "stop"]
    assert sched.block_manager.num_free_blocks == 29


@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_beam_search_finds_what_a_plain_one_finds(width):
    """With the end when it is decided, in place of the last step."""
    rng = random.Random(width)
    num_early = 0
    for _ in range(40):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=rng.choice([1, 5, 16]),
            ignore_eos=rng.random() < 0.2,
            length_penalty=rng.choice([0.0, 0.5, 1.0, 2.0, -1.0]),
        )
        group = make_group(prompt, params, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
        sched = make_scheduler(num_blocks=60, max_num_seqs=6)
        sched.add(group)
        device = ToyDevice(sched.block_manager)
        num_steps = 0
        while sched.has_unfinished:
            output = sched.schedule(0.0)
            device.execute(output, sched)
            seqs = [found(sched, row.seq_id)[1] for row in output.scheduled]
            chains = [device.chain(root(""), seq, len(seq) - 1) for seq in seqs]
            update(sched, output, *[list(zip(*top_logprobs(c, 2 * width), strict=True)) for c in chains])
            num_steps += 1
        expected = reference_beams(root(""), prompt, params, 64)
        assert [(seq.output_token_ids, seq.cumulative_logprob) for seq in group.sequences] == expected
        num_early += num_steps < params.max_tokens
    assert num_early > 5


def test_scores_by_hand():
    group = make_group([1, 1], BeamSearchParams(beam_width=2, length_penalty=2.0))
    seq = Sequence([1, 1], output_token_ids=[5, EOS], cumulative_logprobs=[-9.0])
    assert beam_search.score(group, seq, frozenset({EOS})) == -1.0  # the end token is not counted
    assert beam_search.score(group, seq, NO_EOS) == -9.0 / 16
    parent = Sequence([1, 1], cumulative_logprobs=[-1.0])
    going, complete = beam_search.select(
        group, [(parent, [EOS, 5, 6, 7], [-0.5, -1.0, -2.0, -3.0])], frozenset({EOS})
    )
    assert [(c.token_id, c.cumulative_logprob) for c in going] == [(5, -2.0), (6, -3.0)]
    assert [(c.token_id, c.cumulative_logprob) for c in complete] == [(EOS, -1.5)]


def test_a_search_is_decided_only_when_nothing_can_come():
    group = make_group([1] * 4, BeamSearchParams(beam_width=1, length_penalty=1.0))
    group.completed = [Sequence([1] * 4, output_token_ids=[5, EOS], cumulative_logprobs=[-5.0])]  # scores -1
    eos = frozenset({EOS})
    group.sequences = [Sequence([1] * 4, output_token_ids=[5, 6], cumulative_logprobs=[-6.1])]
    assert beam_search.is_decided(group, 6, eos)
    assert not beam_search.is_decided(group, 7, eos)  # -6.1 / 7 would be better
    group.completed = []
    assert not beam_search.is_decided(group, 6, eos)


def test_sequences_and_their_groups():
    seq = Sequence([1, 2, 3], output_token_ids=[4, 5], block_hashes=[b"h"], num_computed_tokens=4)
    child = seq.fork(2, 77)
    assert (child.index, child.seed, child.num_computed_tokens, child.cumulative_logprob) == (2, 77, 4, 0.0)
    child.output_token_ids[1] = 9
    child.block_hashes.append(b"i")
    assert (seq.output_token_ids, seq.block_hashes) == ([4, 5], [b"h"])
    assert seq.num_common_tokens(child) == 4
    assert seq.num_common_tokens(seq) == len(seq) == 5
    for start in range(6):
        for stop in range(start, 6):
            assert seq.tokens(start, stop) == [1, 2, 3, 4, 5][start:stop]
    assert make_group([1], n=2).max_num_seqs == 2
    assert make_group([1], n=2, best_of=5).max_num_seqs == 5
    assert make_group([1], BeamSearchParams(beam_width=3)).max_num_seqs == 3
    group = make_group([1])
    group.key, group.arrival = 2, 5
    assert group.order == (2, 5)
    assert group.unfinished == group.sequences
    group.sequences[0].status = SequenceStatus.FINISHED_STOPPED
    assert group.is_finished
    assert group.unfinished == []
    assert {s.name: s.finish_reason for s in SequenceStatus if s.is_finished} == {
        "FINISHED_STOPPED": "stop",
        "FINISHED_LENGTH_CAPPED": "length",
        "FINISHED_ABORTED": "abort",
        "FINISHED_IGNORED": "error",
    }
    assert math.isclose(
        sum(math.exp(x) for x in top_logprobs(1, VOCAB_SIZE)[1]), 1
    )  # the toy model is a model
