"""Requests whose blocks a user has dropped, where the pool is short."""

from helpers.scheduling import found, make_group, make_scheduler, step

from jax_paged.core.features.interactive.request_edits import DropBlocks, Fork


def test_it_waits_where_another_is_swapped_in() -> None:
    """It can't be swapped out in that step, as host blocks that are read are not written, nor recomputed."""
    sched = make_scheduler(10, 4, False, max_num_seqs=8, num_swap_blocks=50, preemption_mode="swap")
    for i, length in enumerate((7, 14, 9)):
        sched.add(make_group(i, [10 + i] * length, max_tokens=12))
    while "r2" not in sched.queues.swapped:
        step(sched)
    (seq,) = sched.queues.running["r1"].sequences
    last = sched.block_manager.num_blocks_of(seq.num_computed_tokens) - 1
    sched.edit_request(DropBlocks("r1", (0, last)))
    names = ["f0", "f1", "f2", "f3"]
    for i, name in enumerate(names):  # behind the one that is swapped out, and yet running
        sched.edit_request(Fork("r1", name, i, 0.0))
    sched.abort("r0")
    output = step(sched)
    assert output.blocks_to_swap_in
    computed = {found(sched, row.seq_id)[0].request_id for row in output.scheduled}
    assert computed == {"r1", "r2", "f0", "f1", "f2"}, "each fork writes to a copy, and there is none for f3"
    assert not output.preempted
    assert not output.ended
    assert "f3" in step(sched).preempted
    assert "f3" in sched.queues.swapped
