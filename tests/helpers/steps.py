"""Steps made by hand, for a runner without a scheduler."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.request import PlaceholderData, Request, RequestFeatures
from jax_paged.core.scheduler_output import (
    BlockTables,
    EncoderInput,
    NewSequence,
    Sample,
    ScheduledSequence,
    SchedulerOutput,
)
from jax_paged.sampling_params import BeamSearchParams, SamplingParams


def new_sequence(
    seq_id: int,
    prompt: list[int],
    output: Iterable[int] = (),
    *,
    tables: BlockTables,
    end_token_ids: Iterable[int] = (),
    num_top_logprobs: int | None = None,
    logprob_temperature: float = 1.0,
    num_encoder_tokens: int = 0,
    placeholder_data: tuple[PlaceholderData, ...] = (),
    **params: Any,
) -> NewSequence:
    """A sequence that takes a seat; the parameters are those of SamplingParams, greedy by default."""
    if num_top_logprobs is not None:
        params["logprobs"] = num_top_logprobs
    settings = SamplingParams(**({"temperature": 0.0, "seed": 0, "max_tokens": None} | params))
    features = None
    if logprob_temperature != 1 or num_encoder_tokens or placeholder_data:
        beams = BeamSearchParams(1, max_tokens=1, temperature=logprob_temperature)
        beams = beams if logprob_temperature != 1 else None
        features = RequestFeatures(beams, [0] * num_encoder_tokens, placeholder_data=placeholder_data)
    return NewSequence(
        seq_id=seq_id,
        request=Request(f"r{seq_id}", prompt, settings, features=features),
        output_token_ids=list(output),
        seed=settings.seed or 0,
        end_token_ids=frozenset(end_token_ids),
        block_tables=tables,
    )


def make_row(
    seq_id: int,
    start: int,
    token_ids: list[int],
    *,
    new_blocks: BlockTables | None = None,
    replaced_blocks: Iterable[tuple[int, int, int]] = (),
) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, token_ids, new_blocks or [], list(replaced_blocks))


def make_output(
    rows: Sequence[ScheduledSequence] = (),
    samples: Sequence[Sample] = (),
    *,
    new: Sequence[NewSequence] = (),
    released: Sequence[int] = (),
    swap_out: Sequence[tuple[int, int]] = (),
    swap_in: Sequence[tuple[int, int]] = (),
    copies: Sequence[tuple[int, int]] = (),
    to_encode: Sequence[EncoderInput] = (),
    step_id: int = 1,
) -> SchedulerOutput:
    """A step, not the first of its scheduler; its counts follow from the rows and the samples."""
    num_unsampled = len(set(range(len(rows))) - {sample.scheduled_index for sample in samples})
    return SchedulerOutput(
        step_id=step_id,
        scheduled=tuple(rows),
        samples=tuple(samples),
        new_sequences=tuple(new),
        released_seq_ids=tuple(released),
        blocks_to_swap_out=tuple(swap_out),
        blocks_to_swap_in=tuple(swap_in),
        blocks_to_copy=tuple(copies),
        encoder_inputs=tuple(to_encode),
        preempted=(),
        ended=(),
        num_batched_tokens=sum(row.num_tokens for row in rows),
        num_logits_rows=sum(sample.num_logits for sample in samples) + num_unsampled,
    )


def execute(runner: Any, output: SchedulerOutput) -> ModelRunnerOutput:
    """Runs one step and waits for its result."""
    runner.dispatch(output)
    return runner.result()
