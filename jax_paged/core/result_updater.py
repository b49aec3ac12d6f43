"""What the tokens of a step do to sequences: they grow, fork, end, and give back their blocks."""

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


class DrawnTokens(NamedTuple):
    """What a step has drawn, in the same form for single steps, multi-steps and steps that verify drafts.

    All lists have one entry per entry of SchedulerOutput.samples.

    Args:
        token_ids: The tokens, without those drawn after a wrong draft. A list may end with NO_TOKEN.
        logprobs: Log-probabilities of these tokens.
        num_computed: Tokens of the sequence that the step has computed, without drafts.
        num_drawn: Tokens that were pending for the sequence because of this step.
        failures: Requests that fail in the middle of a multi-step, with the stop reason.
    """

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    num_computed: list[int]
    num_drawn: list[int]
    failures: Mapping[SequenceGroup, str]


# Returns what was drawn in a step that a StepPlanner has planned.
ReadDrawn = Callable[[SchedulerOutput, ModelRunnerOutput, Mapping[int, BatchSlot]], DrawnTokens]


class NewTokens(NamedTuple):
    """The tokens that a sequence got in a step and accepted, in order, and their log-probabilities."""

    group: SequenceGroup
    seq: Sequence
    token_ids: list[int]
    logprobs: list[TokenLogprobs]


class StepUpdate(NamedTuple):
    """What a step has changed.

    Args:
        new_tokens: In the order of SchedulerOutput.samples; beams are not in it.
        changed: The requests that got a token or ended, each once.
        ended: The requests of which a sequence has ended, each once.
        prompt_logprobs: (request, first position of the row, log-probabilities of the prompt tokens at the
            positions after it).
        captured: (request, sequence, first position, what hooks captured of the tokens from there on).
    """

    new_tokens: list[NewTokens]
    changed: list[SequenceGroup]
    ended: list[SequenceGroup]
    prompt_logprobs: list[tuple[SequenceGroup, int, list[TokenLogprobs]]]
    captured: list[tuple[SequenceGroup, Sequence, int, dict[str, Any]]]


@dataclasses.dataclass(slots=True)
class _Changes:
    """What a step has changed so far; the dictionaries are ordered sets."""

    new_tokens: list[NewTokens] = dataclasses.field(default_factory=list)
    changed: dict[SequenceGroup, None] = dataclasses.field(default_factory=dict)
    ended: dict[SequenceGroup, None] = dataclasses.field(default_factory=dict)
    candidates: dict[SequenceGroup, list[tuple[Sequence, TokenLogprobs]]] = dataclasses.field(
        default_factory=dict
    )


class ResultUpdater:
    """Takes in the results of steps, for the scheduler.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests; those that end are taken out.
        batch_slots: Maps ids to sequences.
        stop_conditions: Decides when a sequence ends.
        read_planned: Returns what was drawn in a step that a StepPlanner has planned.
        beam_search: Selects the beams that go on.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        batch_slots: BatchSlots,
        stop_conditions: StopConditions,
        *,
        read_planned: ReadDrawn,
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
        """Takes in the result of a step; see Scheduler.update.

        1. Free the blocks that were held back for this step.
        2. Abort the requests whose rows have errors or logits that are not finite.
        3. Collect prompt log-probabilities and captured arrays.
        4. Count the tokens of rows that draw nothing, such as chunks of prompts.
        5. Normalize what was drawn, and accept the tokens of each sample up to the one that ends it.
        6. Abort the requests that fail in the middle of a multi-step.
        7. Advance beam searches.
        """
        assert result.step_id == output.step_id, (result.step_id, output.step_id)
        assert len(result.token_ids) == len(output.samples), "a list of tokens per sample"
        changes = _Changes()
        self.block_manager.end_step(output.step_id)
        self._abort_failed_rows(output, result, changes, now)
        prompt_logprobs = self._prompt_logprobs(output, result)
        captured = self._captured(output, result)
        self._count_rows_without_samples(output)
        drawn = self._drawn(output, result)
        self._accept_all(output, drawn, changes, now)
        for group, reason in drawn.failures.items():
            self.end_group(group, SequenceStatus.FINISHED_ABORTED, now, reason)
            changes.ended[group] = None
        if changes.candidates:
            self._advance_beams(changes, now)
        new_tokens, changed, ended = changes.new_tokens, list(changes.changed), list(changes.ended)
        return StepUpdate(new_tokens, changed, ended, prompt_logprobs, captured)

    def _abort_failed_rows(
        self, output: SchedulerOutput, result: ModelRunnerOutput, changes: _Changes, now: float
    ) -> None:
        errors = result.errors
        if not all(result.is_finite):
            errors = _non_finite_rows(output, result) | errors
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

    def _count_rows_without_samples(self, output: SchedulerOutput) -> None:
        sampled = {sample.row for sample in output.samples}
        if len(sampled) == len(output.scheduled):
            return
        for i, row in enumerate(output.scheduled):
            slot = None if i in sampled else self.batch_slots.by_id.get(row.seq_id)
            if slot is not None and slot.seq.status is SequenceStatus.RUNNING:
                slot.seq.num_in_flight -= row.num_tokens
                self._note_computed(slot.group, slot.seq, row.start, row.start + row.num_tokens)

    def _drawn(self, output: SchedulerOutput, result: ModelRunnerOutput) -> DrawnTokens:
        scheduled, samples = output.scheduled, output.samples
        has_longer_rows = output.num_batched_tokens > len(scheduled)
        if output.burst or (has_longer_rows and any(num_logits > 1 for _, _, num_logits in samples)):
            return self._read_planned(output, result, self.batch_slots.by_id)
        num_computed = ones = [1] * len(samples)
        if has_longer_rows:
            num_computed = [len(scheduled[row].token_ids) for row, _, _ in samples]
        return DrawnTokens(result.token_ids, result.logprobs, num_computed, ones, {})

    def _accept_all(self, output: SchedulerOutput, drawn: DrawnTokens, changes: _Changes, now: float) -> None:
        """Appends the tokens that were drawn to their sequences, and ends those that are done."""
        slots, after_token = self.batch_slots.by_id, self.stop_conditions.after_token
        samples = zip(
            output.samples,
            drawn.token_ids,
            drawn.logprobs,
            drawn.num_computed,
            drawn.num_drawn,
            strict=True,
        )
        for (i, seq_id, _), token_ids, logprobs, num_computed, num_drawn in samples:
            slot = slots.get(seq_id)
            if slot is None or slot.seq.status is not SequenceStatus.RUNNING:
                continue
            group, seq, row = slot.group, slot.seq, output.scheduled[i]
            seq.num_in_flight -= num_computed
            seq.num_pending -= num_drawn
            changes.changed[group] = None
            if group.metrics.first_token_time is None and token_ids[0] != NO_TOKEN:
                group.metrics.first_token_time = now
            if group.request.features is not None and group.beam_params is not None:
                self._note_computed(group, seq, row.start, row.start + len(row.token_ids))
                changes.candidates.setdefault(group, []).append((seq, logprobs[0]))
                continue
            if len(token_ids) == 1 and token_ids[0] != NO_TOKEN:  # nearly all samples
                seq.append(token_ids[0], logprobs[0].logprob)
                ending = after_token(group, seq)
            else:
                n, ending = self._accept(group, seq, token_ids, logprobs)
                token_ids, logprobs = token_ids[:n], logprobs[:n]
            if seq_id == row.seq_id:
                self._note_computed(group, seq, seq.num_computed_tokens, len(seq) - 1)
            else:  # a fork, whose blocks are those of the row's own sequence
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
        """Appends the tokens of a step to a sequence, up to one that ends it.

        Returns:
            How many tokens the sequence has accepted, and how it ends then, if it does.
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

    def _note_computed(self, group: SequenceGroup, seq: Sequence, start: int, stop: int) -> None:
        """Notes that keys and values of tokens [start, stop) are in the pool, and caches full blocks."""
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
        """Ends a sequence and frees its blocks; its request leaves the queues with the last one."""
        manager = self.block_manager
        if seq in manager.block_tables or seq in manager.swapped_tables:
            manager.free(seq)
        self.batch_slots.note_end(seq)
        seq.status, seq.stop_reason = status, stop_reason
        if group.is_finished:
            self.queues.remove(group)
            group.metrics.finished_time = now
        else:
            self.queues.release_reserved_slots(group)

    def end_group(
        self, group: SequenceGroup, status: SequenceStatus, now: float | None, stop_reason: str | None = None
    ) -> None:
        """Ends all sequences of a request that have not ended; of a beam search, the best are left."""
        seqs = group.unfinished
        for seq in seqs:
            self.end(group, seq, status, now, stop_reason)
        if not seqs:
            self.queues.remove(group)
            group.metrics.finished_time = now
        if group.beam_params and status is SequenceStatus.FINISHED_LENGTH_CAPPED:
            self._beam_search.finish(group, seqs)


def _non_finite_rows(output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, str]:
    """Returns the rows whose logits are not finite; in a multi-step, these end when tokens are accepted."""
    rows = () if output.burst else enumerate(result.is_finite)
    return {i: NON_FINITE for i, is_finite in rows if not is_finite}
