"""Processes the results of steps: sequences receive tokens, fork, end and release their blocks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jax_paged.core.batch_slots import BatchSlot, BatchSlots
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.model_runner_output import NO_TOKEN, ModelRunnerOutput, TokenLogprobs
from jax_paged.core.request import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED, NON_FINITE, Ending, StopConditions

if TYPE_CHECKING:
    from jax_paged.core.features.beam_search import BeamSearch

_NO_TOKEN_LEFT: Ending = (SequenceStatus.FINISHED_ABORTED, NO_TOKEN_ALLOWED)


class StepTokens(NamedTuple):
    """The tokens sampled in a step, in one format for ordinary steps, multi-steps and draft verification.

    All lists have one entry per entry of SchedulerOutput.samples.

    Args:
        token_ids: The sampled tokens, without tokens sampled after a rejected draft token. A list may end
            with NO_TOKEN.
        logprobs: Log-probabilities of these tokens.
        num_computed: Number of tokens of the sequence that the step has computed, without draft tokens.
        num_pending: Number of pending tokens that were added to the sequence when the step was scheduled.
        failures: Stop reasons of requests that fail during a multi-step.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    num_computed: list[int]
    num_pending: list[int]
    failures: Mapping[SequenceGroup, str]


# Returns the sampled tokens of a multi-step or of a step with draft tokens.
ReadStepTokens = Callable[[SchedulerOutput, ModelRunnerOutput, Mapping[int, BatchSlot]], StepTokens]


class NewTokens(NamedTuple):
    """The tokens that a sequence accepted in one step, in order, and their log-probabilities."""

    group: SequenceGroup
    seq: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class StepUpdate(NamedTuple):
    """The changes caused by the result of a step.

    Args:
        new_tokens: Accepted tokens, in the order of SchedulerOutput.samples, without those of beams.
        changed: Requests that received a token or ended, without duplicates.
        ended: Requests in which a sequence has ended, without duplicates.
        prompt_logprobs: (request, first position that the step computed, log-probabilities of the prompt
            tokens after that position).
        captured: (request, sequence, first position, arrays captured by hooks for the tokens from that
            position).
    """

    new_tokens: list[NewTokens]
    changed: list[SequenceGroup]
    ended: list[SequenceGroup]
    prompt_logprobs: list[tuple[SequenceGroup, int, list[TokenLogprobs]]]
    captured: list[tuple[SequenceGroup, Sequence, int, dict[str, Any]]]


@dataclasses.dataclass(slots=True)
class _Changes:
    """Changes collected while a result is processed. The dictionaries serve as ordered sets."""

    new_tokens: list[NewTokens] = dataclasses.field(default_factory=list)
    changed: dict[SequenceGroup, None] = dataclasses.field(default_factory=dict)
    ended: dict[SequenceGroup, None] = dataclasses.field(default_factory=dict)
    candidates: dict[SequenceGroup, list[tuple[Sequence, TokenLogprobs]]] = dataclasses.field(
        default_factory=dict
    )


class ResultUpdater:
    """Processor of step results for the scheduler.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests. Requests that end are removed from it.
        batch_slots: Maps ids to sequences.
        stop_conditions: Decides when a sequence ends.
        read_planned: Returns the sampled tokens of a multi-step or of a step with draft tokens.
        beam_search: Selects the beams that continue.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        batch_slots: BatchSlots,
        stop_conditions: StopConditions,
        *,
        read_planned: ReadStepTokens,
        beam_search: "BeamSearch",
    ) -> None:
        self.block_manager = block_manager
        self.queues = queues
        self.batch_slots = batch_slots
        self.stop_conditions = stop_conditions
        self._read_planned = read_planned
        self._beam_search = beam_search
        self._block_size = block_manager.block_size

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """Processes the result of a step; see Scheduler.update.

        1. Free the blocks that were held back for this step.
        2. Abort the requests whose sequences have errors or logits that are not finite.
        3. Collect prompt log-probabilities and captured arrays.
        4. Count the computed tokens of sequences that do not sample, such as chunks of prompts.
        5. Accept the sampled tokens of each sequence, up to the one that ends it.
        6. Abort the requests that fail during a multi-step.
        7. Advance beam searches.
        """
        assert result.step_id == output.step_id, f"result of step {result.step_id}, expected {output.step_id}"
        assert len(result.token_ids) == len(output.samples), "result and step have different samples"
        changes = _Changes()
        self.block_manager.end_step(output.step_id)
        self._abort_failed(output, result, changes, now)
        prompt_logprobs = self._prompt_logprobs(output, result)
        captured = self._captured(output, result)
        self._record_chunks(output)
        tokens = self._sampled_tokens(output, result)
        self._accept_all(output, tokens, changes, now)
        for group, reason in tokens.failures.items():
            self.end_group(group, SequenceStatus.FINISHED_ABORTED, now, reason)
            changes.ended[group] = None
        if changes.candidates:
            self._advance_beams(changes, now)
        new_tokens, changed, ended = changes.new_tokens, list(changes.changed), list(changes.ended)
        return StepUpdate(new_tokens, changed, ended, prompt_logprobs, captured)

    def _abort_failed(
        self, output: SchedulerOutput, result: ModelRunnerOutput, changes: _Changes, now: float
    ) -> None:
        errors = result.errors
        if not all(result.is_finite):
            errors = _non_finite(output, result) | errors
        for i, reason in sorted(errors.items()):
            slot = self.batch_slots.by_id.get(output.scheduled[i].seq_id)
            if slot is not None and not slot.seq.status.is_finished:
                self.end_group(slot.group, SequenceStatus.FINISHED_ABORTED, now, reason)
                changes.changed[slot.group] = changes.ended[slot.group] = None

    def _prompt_logprobs(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[tuple[SequenceGroup, int, list[TokenLogprobs]]]:
        found: list[tuple[SequenceGroup, int, list[TokenLogprobs]]] = []
        if any(result.prompt_logprobs):
            for row, entries in zip(output.scheduled, result.prompt_logprobs, strict=True):
                slot = self.batch_slots.by_id.get(row.seq_id) if entries else None
                if slot is not None and not slot.group.is_finished:
                    found.append((slot.group, row.start, entries))
        return found

    def _captured(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> list[tuple[SequenceGroup, Sequence, int, dict[str, Any]]]:
        rows = ((output.scheduled[i], arrays) for i, arrays in result.captured.items())
        slots = ((self.batch_slots.by_id.get(row.seq_id), row.start, arrays) for row, arrays in rows)
        return [
            (slot.group, slot.seq, start, arrays)
            for slot, start, arrays in slots
            if slot is not None and slot.seq.status is SequenceStatus.RUNNING
        ]

    def _record_chunks(self, output: SchedulerOutput) -> None:
        """Records the computed tokens of sequences without a sample, which are in chunks of their prompts."""
        sampled = {sample.scheduled_index for sample in output.samples}
        if len(sampled) == len(output.scheduled):
            return
        for i, row in enumerate(output.scheduled):
            slot = None if i in sampled else self.batch_slots.by_id.get(row.seq_id)
            if slot is not None and slot.seq.status is SequenceStatus.RUNNING:
                slot.seq.num_in_flight_tokens -= row.num_tokens
                self._record_computed(slot.group, slot.seq, row.start, row.start + row.num_tokens)

    def _sampled_tokens(self, output: SchedulerOutput, result: ModelRunnerOutput) -> StepTokens:
        scheduled, samples = output.scheduled, output.samples
        has_multi_token = output.num_batched_tokens > len(scheduled)
        if output.num_multi_step_tokens or (has_multi_token and any(n > 1 for _, _, n in samples)):
            return self._read_planned(output, result, self.batch_slots.by_id)
        num_computed = ones = [1] * len(samples)
        if has_multi_token:
            num_computed = [len(scheduled[row].token_ids) for row, _, _ in samples]
        return StepTokens(result.token_ids, result.logprobs, num_computed, ones, {})

    def _accept_all(self, output: SchedulerOutput, tokens: StepTokens, changes: _Changes, now: float) -> None:
        """Appends the sampled tokens to their sequences, and ends the sequences that are finished."""
        slots, after_token = self.batch_slots.by_id, self.stop_conditions.after_token
        samples = zip(
            output.samples,
            tokens.token_ids,
            tokens.logprobs,
            tokens.num_computed,
            tokens.num_pending,
            strict=True,
        )
        for (i, seq_id, _), token_ids, logprobs, num_computed, num_pending in samples:
            slot = slots.get(seq_id)
            if slot is None or slot.seq.status is not SequenceStatus.RUNNING:
                continue
            group, seq, row = slot.group, slot.seq, output.scheduled[i]
            seq.num_in_flight_tokens -= num_computed
            seq.num_pending_tokens -= num_pending
            changes.changed[group] = None
            if group.metrics.first_token_time is None and token_ids[0] != NO_TOKEN:
                group.metrics.first_token_time = now
            if group.request.features is not None and group.beam_params is not None:
                self._record_computed(group, seq, row.start, row.start + len(row.token_ids))
                changes.candidates.setdefault(group, []).append((seq, logprobs[0]))
                continue
            if len(token_ids) == 1 and token_ids[0] != NO_TOKEN:  # the common case
                seq.append(token_ids[0], logprobs[0].logprob)
                ending = after_token(group, seq)
            else:
                n, ending = self._accept(group, seq, token_ids, logprobs)
                token_ids, logprobs = token_ids[:n], logprobs[:n]
            if seq_id == row.seq_id:
                self._record_computed(group, seq, seq.num_computed_tokens, len(seq) - 1)
            else:  # a fork: the scheduled sequence caches the blocks that they share
                seq.num_computed_tokens = len(seq) - 1
            if ending is not None:
                changes.ended[group] = None
                if ending is _NO_TOKEN_LEFT:  # all samples of the request have the same parameters
                    self.end_group(group, SequenceStatus.FINISHED_ABORTED, now, NO_TOKEN_ALLOWED)
                else:
                    self.end(group, seq, ending[0], now, ending[1])
            if token_ids:
                changes.new_tokens.append(NewTokens(group, seq, token_ids, logprobs))

    def _accept(
        self, group: SequenceGroup, seq: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs]
    ) -> tuple[int, Ending | None]:
        """Appends the tokens of a step to a sequence, up to the token that ends it.

        Returns:
            The number of accepted tokens, and the status and stop reason if the sequence ends.
        """
        ending, n = None, 0
        for token_id in token_ids:
            if token_id == NO_TOKEN:
                return n, _NO_TOKEN_LEFT
            seq.append(token_id, logprobs[n].logprob)
            n += 1
            ending = self.stop_conditions.after_token(group, seq)
            if ending is not None:
                break
        return n, ending

    def _advance_beams(self, changes: _Changes, now: float) -> None:
        for group, candidates in changes.candidates.items():
            if self._beam_search.advance(group, candidates):
                self.end_group(group, SequenceStatus.FINISHED_LENGTH_CAPPED, now)
                changes.ended[group] = None

    def _record_computed(self, group: SequenceGroup, seq: Sequence, start: int, stop: int) -> None:
        """Records that tokens [start, stop) have been computed, and caches the blocks that became full."""
        seq.num_computed_tokens = stop
        size = self._block_size
        if start // size != stop // size:
            self.block_manager.cache_full_blocks(seq, group.cache_salt, start, stop)

    def end(
        self,
        group: SequenceGroup,
        seq: Sequence,
        status: SequenceStatus,
        now: float | None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Ends a sequence and frees its blocks.

        If it is the last sequence of its request, the request leaves the queues.
        """
        manager = self.block_manager
        if seq in manager.block_tables or seq in manager.swapped_tables:
            manager.free(seq)
        self.batch_slots.record_end(seq)
        seq.status, seq.stop_reason = status, stop_reason
        if group.is_finished:
            self.queues.remove(group)
            group.metrics.finished_time = now
        else:
            self.queues.release_reserved_slots(group)

    def end_group(
        self, group: SequenceGroup, status: SequenceStatus, now: float | None, stop_reason: str | None = None
    ) -> None:
        """Ends all unfinished sequences of a request. A finished beam search keeps its best hypotheses."""
        seqs = group.unfinished
        for seq in seqs:
            self.end(group, seq, status, now, stop_reason)
        if not seqs:
            self.queues.remove(group)
            group.metrics.finished_time = now
        if group.beam_params and status is SequenceStatus.FINISHED_LENGTH_CAPPED:
            self._beam_search.finish(group, seqs)


def _non_finite(output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, str]:
    """Returns the scheduled sequences whose logits are not finite, with the stop reason.

    The result is empty for a multi-step: StepTokens.failures then contains the requests to end, because
    they first accept the tokens before the failure.
    """
    rows = () if output.num_multi_step_tokens else enumerate(result.is_finite)
    return {i: NON_FINITE for i, is_finite in rows if not is_finite}
