"""The host's work for a step (schedule, build, update) follows the new tokens and not the context.

Work is counted, not timed: the bytecode instructions that Python runs, and the bytes that it and NumPy
allocate, both by the interpreter's own hooks.
"""

import sys
import tracemalloc
from collections.abc import Callable
from typing import NamedTuple

import pytest
from helpers.scheduling import make_group, make_scheduler, result_of

from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.worker.batch_builder import BatchBuilder
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.step_rows import plan_logits_rows

MAX_MODEL_LEN, NUM_SEQS, BUDGET, BLOCK_SIZE = 140_000, 4, 512, 16
NUM_BLOCKS = 40_000
TOOL = 4  # of sys.monitoring's, one that nobody has claimed


class Work(NamedTuple):
    """What was counted."""

    instructions: int
    allocated_bytes: int


def counted(run: Callable[[], object]) -> Work:
    """Runs something and counts its work: instructions, and the peak of what it allocates."""
    count = 0

    def note(code: object, offset: int) -> None:
        nonlocal count
        count += 1

    events = sys.monitoring.events.INSTRUCTION
    sys.monitoring.use_tool_id(TOOL, "host cost")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        sys.monitoring.register_callback(TOOL, events, note)
        sys.monitoring.set_events(TOOL, events)
        run()
        sys.monitoring.set_events(TOOL, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        sys.monitoring.set_events(TOOL, 0)
        sys.monitoring.register_callback(TOOL, events, None)
        sys.monitoring.free_tool_id(TOOL)
        tracemalloc.stop()
    return Work(count, peak - before)


class Host:
    """All of the host that a step passes through, without a device.

    Args:
        context_len: Tokens of the prompts; the last ones are still to be computed.
        num_left: How many of them, per request.
        values: Sampling parameters of the requests.
    """

    def __init__(self, context_len: int, num_left: int, **values: object) -> None:
        self.sched: Scheduler = make_scheduler(
            NUM_BLOCKS, BLOCK_SIZE, budget=BUDGET, max_model_len=MAX_MODEL_LEN, max_num_seqs=NUM_SEQS
        )
        self.batch_slots = InputBatch(
            max_num_seqs=NUM_SEQS,
            num_groups=1,
            max_blocks_per_seq=-(-MAX_MODEL_LEN // BLOCK_SIZE),
            num_blocks=NUM_BLOCKS,
            vocab_size=1000,
            features=FeatureRows(NUM_SEQS),
        )
        self.builder = BatchBuilder(
            self.batch_slots,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            groups=self.sched.block_manager.groups,
            vocab_size=1000,
        )
        for index in range(NUM_SEQS):
            prompt = [index * 7 + i % 1000 for i in range(context_len)]
            self.sched.add(make_group(index, prompt, max_tokens=None, **values))
        while any(
            seq.num_new_tokens > num_left
            for group in [*self.sched.queues.waiting.values(), *self.sched.queues.running.values()]
            for seq in group.sequences
        ):
            self.step()

    def step(self) -> SchedulerOutput:
        output = self.sched.schedule(0.0)
        self.batch_slots.update(output)
        is_decode = output.num_batched_tokens == len(output.scheduled)
        bucket = Bucket(is_decode, NUM_SEQS if is_decode else BUDGET, NUM_SEQS)
        self.builder.build(output, plan_logits_rows(output), bucket)
        self.sched.update(output, result_of(output, [5] * len(output.samples)), 0.0)
        return output


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"frequency_penalty": 0.5, "presence_penalty": 0.1, "repetition_penalty": 1.1},
        {"min_tokens": 100_000, "stop_token_ids": [9], "logit_bias": {3: 1.0}},
        {"allowed_token_ids": [5, 6, 7]},
    ],
    ids=["plain", "penalties", "biases", "allowed"],
)
def test_decode_steps_cost_the_same_at_any_context(values: dict[str, object]) -> None:
    short, long = (Host(n, 1, **values) for n in (32_000, 131_200))
    for host in (short, long):
        host.step()
    works = [(counted(short.step), counted(long.step)) for _ in range(2 * BLOCK_SIZE)]
    # Each request's blocks become full twice on the way, in other steps here and there.
    instructions = [sum(work.instructions for work in each) for each in zip(*works, strict=True)]
    assert instructions[1] <= 1.02 * instructions[0], instructions
    allocated = [max(work.allocated_bytes for work in each) for each in zip(*works, strict=True)]
    assert allocated[1] <= 1.05 * allocated[0], allocated


@pytest.mark.parametrize("context_len", [32_000, 131_200])
def test_a_chunk_of_a_prompt_costs_what_its_tokens_do(context_len: int) -> None:
    host = Host(context_len, 3 * BUDGET)
    work = counted(host.step)
    assert work.instructions < 400 * BUDGET
    assert work.allocated_bytes < 400 * BUDGET


def test_what_is_counted_follows_the_context_where_work_does() -> None:
    """The counters see a list that is copied, and a loop that walks it."""
    tokens = [*range(131_200)]
    assert counted(lambda: tokens[:]).allocated_bytes > 8 * 131_200
    assert counted(lambda: [t + 1 for t in tokens]).instructions > 131_200
    assert counted(lambda: None).instructions < 100
