"""Multi-step decoding: several decode steps of all running sequences in one step of the executor."""

from collections.abc import Mapping
from typing import NamedTuple

from jax_paged.core.batch_slots import BatchSlot, PlannedStep, StepEntry
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.model_runner_output import NO_TOKEN, ModelRunnerOutput
from jax_paged.core.request import SequenceGroup, SequenceStatus
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.result_updater import StepTokens
from jax_paged.core.scheduler_output import MAX_END_TOKENS, SchedulerOutput
from jax_paged.core.step_builder import StepBuilder
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED, NON_FINITE, StopConditions


class Failure(NamedTuple):
    """The point at which a request fails during a multi-step.

    The failures of one request are compared as tuples: the earliest one counts.

    Args:
        num_steps: Number of decode steps before the one that fails.
        sample_index: Index of the sample that fails. Samples with a lower index still receive their token of
            this decode step, because an ordinary step would have processed them before the failure. -1 if the
            logits are not finite: no sample of the request then receives a token of this decode step.
        reason: Stop reason.
    """

    num_steps: int
    sample_index: int
    reason: str


class MultiStepPlanner:
    """Planner of multi-steps. It allocates the blocks for all tokens of a multi-step in advance.

    A sequence that does not end in a multi-step uses all of these blocks. If a sequence ends early, its
    blocks are freed, and held back while the step is in flight. The next step can therefore be scheduled
    before the result has arrived.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        stop_conditions: Provides the number of tokens that a sequence may still receive.
        num_steps: Maximum number of decode steps in a multi-step, at least 2.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        stop_conditions: StopConditions,
        *,
        num_steps: int,
    ) -> None:
        self.num_steps = num_steps
        self._manager = block_manager
        self._queues = queues
        self._stop_conditions = stop_conditions

    def plan(self, step: StepBuilder) -> bool:
        """Plans a multi-step of all running sequences.

        Nothing is planned if a request waits, if a sequence does not decode or needs the host for its next
        token, or if there are not enough free blocks.

        Returns:
            True if a multi-step was planned. If not, nothing has changed, except that blocks outside of
            windows may have been freed.
        """
        queues, stop_conditions, tables = self._queues, self._stop_conditions, self._manager.block_tables
        if queues.waiting or queues.swapped:
            return False
        rows: list[StepEntry] = []
        for group in queues.running.values():
            for seq in group.unfinished:
                num_left = stop_conditions.num_left(group, seq)
                if num_left <= 0:
                    continue  # it ends with the tokens that are being sampled
                decodes = seq.has_output and seq.num_new_tokens == 1 and seq in tables
                # End tokens become allowed at min_tokens, which must not happen during a multi-step.
                has_min_tokens = seq.num_output_tokens >= group.sampling_params.min_tokens
                if not (decodes and has_min_tokens and group.allows_multi_step):
                    return False
                rows.append((group, seq, min(self.num_steps, num_left), (seq,)))
        if len(rows) > step.budget or all(num_tokens == 1 for _, _, num_tokens, _ in rows):
            return False
        copies = self._manager.append_slots([(seq, num_tokens) for _, seq, num_tokens, _ in rows])
        if copies is None:
            return False
        step.planned = PlannedStep(is_multi_step=True)
        step.single_token_sequences += rows
        step.copies += copies
        step.budget -= len(rows)
        return True

    def set_flag(self, group: SequenceGroup) -> None:
        """Sets allows_multi_step if the device alone can choose the next tokens and detect the last one."""
        params = group.sampling_params
        num_end_tokens = len(self._stop_conditions.eos_of(group)) + len(params.stop_token_ids or ())
        group.allows_multi_step = num_end_tokens <= MAX_END_TOKENS and not group.needs_tokens_on_host


def sampled_tokens(
    output: SchedulerOutput, result: ModelRunnerOutput, slots: Mapping[int, BatchSlot]
) -> StepTokens:
    """Returns the tokens that a multi-step has sampled, up to the failure if a request fails."""
    token_ids, logprobs, num_tokens = result.token_ids, result.logprobs, list(output.num_multi_step_tokens)
    failures = _failures(output, result, slots)
    if failures:
        token_ids = list(token_ids)
        for i, sample in enumerate(output.samples):
            slot = slots.get(sample.seq_id)
            failure = None if slot is None else failures.get(slot.group)
            if failure is not None:
                token_ids[i] = token_ids[i][: failure.num_steps + (i < failure.sample_index)]
        logprobs = [entries[: len(ids)] for ids, entries in zip(token_ids, logprobs, strict=True)]
    reasons = {group: failure.reason for group, failure in failures.items()}
    return StepTokens(token_ids, logprobs, num_tokens, num_tokens, reasons)


def _failures(
    output: SchedulerOutput, result: ModelRunnerOutput, slots: Mapping[int, BatchSlot]
) -> dict[SequenceGroup, Failure]:
    """Returns the requests that fail in a multi-step: no token is allowed, or logits are not finite."""
    failures: dict[SequenceGroup, Failure] = {}
    samples = zip(output.samples, result.token_ids, result.is_finite, strict=True)
    for i, (sample, token_ids, is_finite) in enumerate(samples):
        if is_finite and (not token_ids or token_ids[-1] != NO_TOKEN):
            continue
        slot = slots.get(sample.seq_id)
        if slot is not None and slot.seq.status is SequenceStatus.RUNNING:
            failure = Failure(len(token_ids) - 1, i, NO_TOKEN_ALLOWED)
            if not is_finite:
                failure = Failure(len(token_ids), -1, NON_FINITE)
            failures[slot.group] = min(failures.get(slot.group, failure), failure)
    return failures
