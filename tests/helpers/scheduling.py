"""Schedulers, requests and results of steps for tests that have no device."""

from collections.abc import Sequence as Items
from typing import Any

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.request import Request, RequestFeatures, Sequence, SequenceGroup
from jax_paged.core.result_updater import StepUpdate
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import BlockTables, SchedulerOutput
from jax_paged.sampling_params import BeamSearchParams, SamplingParams

EOS = 2
NO_LOGPROBS = TokenLogprobs(0.0, 0, [], [])


def make_group(
    index: int,
    prompt: list[int],
    *,
    salt: str = "",
    priority: int = 0,
    arrival: float = 0.0,
    beams: BeamSearchParams | None = None,
    encoder_token_ids: Items[int] = (),
    adapter: str = "",
    **values: Any,
) -> SequenceGroup:
    """Returns a request "r{index}" of at most 8 output tokens, unless `values` (SamplingParams) say else."""
    features = None
    if beams is not None or encoder_token_ids or adapter:
        features = RequestFeatures(beams, list(encoder_token_ids), adapter)
    if beams is not None:  # as the engine does it
        values["logprobs"] = 2 * beams.beam_width
    params = SamplingParams(**{"max_tokens": 8, "seed": 0, **values})
    request = Request(f"r{index}", prompt, params, salt, priority, features)
    return SequenceGroup.from_request(request, arrival)


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    caching: bool = True,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 256,
    watermark: float = 0.0,
    num_swap_blocks: int = 0,
    groups: tuple[CacheGroup, ...] = (CacheGroup(),),
    num_state_slots: int = 0,
    **settings: Any,
) -> Scheduler:
    return Scheduler(
        block_manager=BlockManager(
            num_blocks,
            block_size,
            caching,
            groups=groups,
            num_swap_blocks=num_swap_blocks,
            num_state_slots=num_state_slots,
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        eos_token_ids=frozenset({EOS}),
        watermark=watermark,
        **settings,
    )


def result_of(
    output: SchedulerOutput,
    token_ids: Items[int | list[int]],
    logprobs: Items[TokenLogprobs | list[TokenLogprobs]] | None = None,
    is_finite: list[bool] | None = None,
) -> ModelRunnerOutput:
    """Returns the result of a step.

    Args:
        output: The step.
        token_ids: One (or a list) per sample.
        logprobs: In the same nesting; None gives zeros.
        is_finite: One per row; None means all.
    """
    tokens = [[t] if isinstance(t, int) else t for t in token_ids]
    entries = [[NO_LOGPROBS] * len(t) for t in tokens]
    if logprobs is not None:
        entries = [[x] if isinstance(x, TokenLogprobs) else x for x in logprobs]
    assert len(tokens) == len(output.samples)
    num_rows = len(output.scheduled)
    return ModelRunnerOutput(output.step_id, tokens, entries, is_finite or [True] * num_rows, [[]] * num_rows)


def take_in(
    sched: Scheduler,
    output: SchedulerOutput,
    token_ids: int | list[int],
    now: float = 0.0,
    logprobs: list[TokenLogprobs] | None = None,
) -> StepUpdate:
    """Hands a step back, with a token per sample, or the same for all."""
    tokens = [token_ids] * len(output.samples) if isinstance(token_ids, int) else token_ids
    return sched.update(output, result_of(output, tokens, logprobs), now)


def step(sched: Scheduler, token_id: int = 5, now: float = 0.0) -> SchedulerOutput:
    """Runs a step in which every sequence that samples gets the same token."""
    output = sched.schedule(now)
    take_in(sched, output, token_id, now)
    sched.block_manager.check_integrity()
    return output


def found(sched: Scheduler, seq_id: int) -> tuple[SequenceGroup, Sequence]:
    """Returns the sequence that a step names, with its request, before the next step is scheduled."""
    pair = sched.find(seq_id)
    assert pair is not None, f"sequence {seq_id} has no seat"
    return pair


def rows(sched: Scheduler, output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """Returns (request id, start, number of tokens) of each row."""
    return [(found(sched, r.seq_id)[0].request_id, r.start, r.num_tokens) for r in output.scheduled]


def samples_per_row(output: SchedulerOutput) -> list[int]:
    """Returns how many sequences draw from each row."""
    drawn_from = [sample.scheduled_index for sample in output.samples]
    return [drawn_from.count(i) for i in range(len(output.scheduled))]


class TableMirror:
    """Block tables as an executor knows them: built from the news of each step alone."""

    def __init__(self) -> None:
        self.tables: dict[int, BlockTables] = {}

    def update(self, output: SchedulerOutput) -> None:
        for seq_id in output.released_seq_ids:
            del self.tables[seq_id]
        for new in output.new_sequences:
            assert new.seq_id not in self.tables, "a seat is taken twice"
            self.tables[new.seq_id] = [list(table) for table in new.block_tables]
        for row in output.scheduled:
            tables = self.tables[row.seq_id]
            for table, blocks in zip(tables, row.new_blocks, strict=True):
                table.extend(blocks)
            for group, index, block in row.replaced_blocks:
                tables[group][index] = block

    def check(self, sched: Scheduler, output: SchedulerOutput) -> None:
        """Asserts that the tables of a step's rows are those of the block manager."""
        for row in output.scheduled:
            _, seq = found(sched, row.seq_id)
            assert self.tables[row.seq_id] == sched.block_manager.block_tables[seq]
