"""What the tokens of a step do to sequences: they grow, fork, end, and give back their blocks."""

from typing import Any, NamedTuple

from jax_paged.core.batch_slots import Seats
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.features import beam_search
from jax_paged.core.features.beam_search import Candidate
from jax_paged.core.model_runner_output import NO_TOKEN, ModelRunnerOutput, TokenLogprobs
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED, NON_FINITE, Ending, StopConditions

_NO_TOKEN_LEFT: Ending = (SequenceStatus.FINISHED_ABORTED, NO_TOKEN_ALLOWED)


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


class SequenceUpdater:
    """Takes in the results of steps, for the scheduler.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests; those that end are taken out.
        seats: Says which sequence an id names.
        stop_conditions: Say when a sequence ends.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        seats: Seats,
        stop_conditions: StopConditions,
    ) -> None:
        self.block_manager = block_manager
        self.queues = queues
        self.seats = seats
        self.stop_conditions = stop_conditions
        self._block_size = block_manager.block_size

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """See Scheduler.update."""
        assert result.step_id == output.step_id, (result.step_id, output.step_id)
        assert len(result.token_ids) == len(output.samples), "a list of tokens per sample"
        self.block_manager.end_step(output.step_id)
        find, seats, scheduled = self.seats.find, self.seats.by_id, output.scheduled
        after_token = self.stop_conditions.after_token
        changed: dict[SequenceGroup, None] = {}
        ended: dict[SequenceGroup, None] = {}
        errors = dict(result.errors)
        if not output.burst and not all(result.is_finite):
            bad = (i for i, is_finite in enumerate(result.is_finite) if not is_finite)
            errors = dict.fromkeys(bad, NON_FINITE) | errors
        for i, reason in sorted(errors.items()):
            found = find(scheduled[i].seq_id)
            if found is not None and not found[1].status.is_finished:
                self.end_group(found[0], SequenceStatus.FINISHED_ABORTED, now, reason)
                changed[found[0]] = ended[found[0]] = None
        broken = self._broken(output, result) if output.burst else {}
        prompt_logprobs: list[tuple[SequenceGroup, int, list[TokenLogprobs]]] = []
        if any(result.prompt_logprobs):
            for row, entries in zip(scheduled, result.prompt_logprobs, strict=True):
                found = find(row.seq_id) if entries else None
                if found is not None and not found[0].is_finished:
                    prompt_logprobs.append((found[0], row.start, entries))
        captured: list[tuple[SequenceGroup, Sequence, int, dict[str, Any]]] = []
        for i, arrays in result.captured.items():
            found = find(scheduled[i].seq_id)
            if found is not None and found[1].status is SequenceStatus.RUNNING:
                captured.append((*found, scheduled[i].start, arrays))
        # Tokens of a sequence that samples count once it has accepted what it got.
        sampled = {sample.row for sample in output.samples}
        if len(sampled) < len(scheduled):
            for i, row in enumerate(scheduled):
                found = None if i in sampled else find(row.seq_id)
                if found is not None and found[1].status is SequenceStatus.RUNNING:
                    found[1].num_in_flight -= row.num_tokens
                    self._note_computed(*found, row.start, row.start + row.num_tokens)
        new_tokens: list[NewTokens] = []
        beams: dict[SequenceGroup, list[tuple[Sequence, list[int], list[float]]]] = {}
        samples = zip(output.samples, result.token_ids, result.logprobs, strict=True)
        for place, ((i, seq_id, num_logits), token_ids, logprobs) in enumerate(samples):
            seat = seats.get(seq_id)
            if seat is None or seat.seq.status is not SequenceStatus.RUNNING:
                continue
            group, seq, row = seat.group, seat.seq, scheduled[i]
            if output.burst:
                seq.num_in_flight -= output.burst[i]
                seq.num_pending -= output.burst[i]
            else:
                seq.num_in_flight -= len(row.token_ids) + 1 - num_logits  # drafts are not its tokens yet
                seq.num_pending -= 1
            changed[group] = None
            if broken and group in broken:
                num_steps, breaks_at, _ = broken[group]
                token_ids = token_ids[: num_steps + (i < breaks_at)]
                logprobs = logprobs[: len(token_ids)]
            if group.metrics.first_token_time is None and token_ids[0] != NO_TOKEN:
                group.metrics.first_token_time = now
            if group.beam_params:
                (top,) = logprobs
                self._note_computed(group, seq, row.start, row.start + row.num_tokens)
                beams.setdefault(group, []).append((seq, top.top_token_ids, top.top_logprobs))
                continue
            if num_logits == 1 and len(token_ids) == 1 and token_ids[0] != NO_TOKEN:
                seq.append(token_ids[0], logprobs[0].logprob)
                ending = after_token(group, seq)
            else:
                drafts = row.token_ids[len(row.token_ids) + 1 - num_logits :]
                if result.drafts:
                    drafts = result.drafts[place]
                n, ending = self._accept(group, seq, token_ids, logprobs, drafts)
                token_ids, logprobs = token_ids[:n], logprobs[:n]
            if seq_id == row.seq_id:
                self._note_computed(group, seq, seq.num_computed_tokens, len(seq) - 1)
            else:  # a fork, whose blocks are those of the row's own sequence
                seq.num_computed_tokens = len(seq) - 1
            if ending is not None:
                ended[group] = None
                if ending is _NO_TOKEN_LEFT:  # all samples of the request have the same parameters
                    self.end_group(group, SequenceStatus.FINISHED_ABORTED, now, NO_TOKEN_ALLOWED)
                else:
                    self.end(group, seq, ending[0], now, ending[1])
            if token_ids:
                new_tokens.append(NewTokens(group, seq, token_ids, logprobs))
        for group, (_, _, reason) in broken.items():
            self.end_group(group, SequenceStatus.FINISHED_ABORTED, now, reason)
            ended[group] = None
        for group, candidates in beams.items():
            self._advance_beams(group, candidates, now)
            if group.is_finished:
                ended[group] = None
        return StepUpdate(new_tokens, list(changed), list(ended), prompt_logprobs, captured)

    def _broken(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[SequenceGroup, tuple[int, int, str]]:
        """Returns the requests that end as a whole in the middle of a burst.

        Returns:
            After how many steps of the burst each ends, up to which sample that step still counts, and why:
            as if the steps had come one by one.
        """
        broken: dict[SequenceGroup, tuple[int, int, str]] = {}
        drawn = zip(output.samples, result.token_ids, result.is_finite, strict=True)
        for i, (sample, token_ids, is_finite) in enumerate(drawn):
            if is_finite and (not token_ids or token_ids[-1] != NO_TOKEN):
                continue
            seat = self.seats.by_id.get(sample.seq_id)
            if seat is not None and seat.seq.status is SequenceStatus.RUNNING:
                end = (len(token_ids) - 1, i, NO_TOKEN_ALLOWED)
                if not is_finite:
                    end = (len(token_ids), -1, NON_FINITE)
                broken[seat.group] = min(broken.get(seat.group, end), end)
        return broken

    def _accept(
        self,
        group: SequenceGroup,
        seq: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        drafts: list[int],
    ) -> tuple[int, Ending | None]:
        """Appends the tokens of a step to a sequence, up to one that ends it or was not drafted so.

        A token that was drawn after a draft counts only if that draft was drawn in its place: so the output
        is what it would be without drafts.

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
            if ending is not None or (n <= len(drafts) and drafts[n - 1] != token_id):
                break
        return n, ending

    def _note_computed(self, group: SequenceGroup, seq: Sequence, start: int, stop: int) -> None:
        """Notes that keys and values of tokens [start, stop) are in the pool, and caches full blocks."""
        seq.num_computed_tokens = stop
        size = self._block_size
        if start // size != stop // size:
            self.block_manager.cache_full_blocks(seq, group.cache_salt, start, stop)

    def _advance_beams(
        self, group: SequenceGroup, beams: list[tuple[Sequence, list[int], list[float]]], now: float
    ) -> None:
        """Replaces the beams of a search by the best continuations: forks some beams, frees others."""
        assert group.beam_params is not None, "a beam search"
        eos_token_ids = self.stop_conditions.eos_of(group)
        going, complete = beam_search.select(group, beams, eos_token_ids)
        ended = [_extended(c.parent.fork(0, 0), c, SequenceStatus.FINISHED_STOPPED) for c in complete]
        beam_search.complete(group, ended, eos_token_ids)
        parents: set[Sequence] = set()
        continued: list[tuple[Sequence, Candidate]] = []
        for candidate in going:
            seq = parent = candidate.parent
            if parent in parents:
                seq = parent.fork(0, 0)
                self.block_manager.fork(parent, seq, parent.num_computed_tokens)
            parents.add(parent)
            continued.append((seq, candidate))
        for seq, _, _ in beams:
            if seq not in parents:
                self.block_manager.free(seq)
        group.sequences = [_extended(seq, c, SequenceStatus.RUNNING) for seq, c in continued]
        max_len = min(
            self.stop_conditions.max_model_len,
            len(beams[0][0].prompt_token_ids) + group.beam_params.max_tokens,
        )
        is_done = not going or len(group.sequences[0]) >= max_len
        if is_done or beam_search.is_decided(group, max_len, eos_token_ids):
            self.end_group(group, SequenceStatus.FINISHED_LENGTH_CAPPED, now)

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
        self.seats.note_end(seq)
        seq.status, seq.stop_reason = status, stop_reason
        if group.is_finished:
            self.queues.remove(group)
            group.metrics.finished_time = now
        else:
            self.queues.give_up_seats(group)

    def end_group(
        self,
        group: SequenceGroup,
        status: SequenceStatus,
        now: float | None,
        stop_reason: str | None = None,
    ) -> None:
        """Ends all sequences of a request that have not ended; of a beam search, the best are left."""
        seqs = group.unfinished
        for seq in seqs:
            self.end(group, seq, status, now, stop_reason)
        if not seqs:
            self.queues.remove(group)
            group.metrics.finished_time = now
        if group.beam_params and status is SequenceStatus.FINISHED_LENGTH_CAPPED:
            beam_search.complete(group, seqs, self.stop_conditions.eos_of(group))
            group.sequences = group.completed


def _extended(seq: Sequence, candidate: Candidate, status: SequenceStatus) -> Sequence:
    """Appends a candidate's token to a sequence with its parent's tokens; returns the sequence."""
    seq.output_token_ids.append(candidate.token_id)
    seq.cumulative_logprobs.append(candidate.cumulative_logprob)
    seq.status = status
    return seq
