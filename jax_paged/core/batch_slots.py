"""Which sequences the executor knows, by which ids, and how much of their block tables."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.features.lora import AdapterSlots
from jax_paged.core.kv_cache.state_slots import StateMoves
from jax_paged.core.model_runner_output import NO_TOKEN
from jax_paged.core.scheduler_output import BlockTables, NewSequence, Sample, ScheduledSequence
from jax_paged.core.sequence import Sequence, SequenceGroup
from jax_paged.core.stop_conditions import StopConditions

# What one sequence computes: its request, the sequence, how many tokens, and the sequences that get a token,
# each drawn from the logits of the last token computed: none before the end of the prompt, all samples of the
# request there, later the sequence alone. (A plain tuple: a step makes hundreds, and they are cheap.)
Row = tuple[SequenceGroup, Sequence, int, tuple[Sequence, ...]]


class SeatedRows(NamedTuple):
    """The rows of a step in terms of ids; see SchedulerOutput."""

    new_sequences: list[NewSequence]
    scheduled: list[ScheduledSequence]
    samples: list[Sample]


@dataclasses.dataclass(slots=True)
class Seat:
    """What the executor was told of a sequence: its tables are told as far as `num_told`, per group."""

    group: SequenceGroup
    seq: Sequence
    tables: BlockTables
    num_told: list[int]


class Seats:
    """Turns sequences and their block tables into what has changed since the executor was told last.

    A sequence has a seat from the step that first computes or samples it until it loses its blocks. One that
    comes back with other blocks takes a new seat, under a new id.

    Args:
        block_manager: Owner of the block tables; notes what has changed in them until it is told.
        stop_conditions: Tell the tokens that are held back until min_tokens.
        adapters: Owner of the slots of adapters.
    """

    def __init__(
        self, block_manager: BlockManager, stop_conditions: StopConditions, adapters: AdapterSlots
    ) -> None:
        self._manager = block_manager
        self.adapters = adapters
        self._stop_conditions = stop_conditions
        self._seats: dict[Sequence, Seat] = {}
        self.by_id: dict[int, Seat] = {}  # read-only for others
        self._ids = itertools.count(1)
        # Shared by all rows without news; read-only.
        self._nothing_new: BlockTables = [[] for _ in block_manager.groups]
        self._nothing_replaced: list[tuple[int, int, int]] = []
        self._pending_token = [NO_TOKEN]
        self._ended: list[int] = []

    def find(self, seq_id: int) -> tuple[SequenceGroup, Sequence] | None:
        """Returns the sequence of an id, with its request; None if it has left its seat."""
        seat = self.by_id.get(seq_id)
        return None if seat is None else (seat.group, seat.seq)

    def release(self) -> tuple[int, ...]:
        """Takes the seats of sequences that have lost their blocks; returns their ids."""
        lost = self._manager.lost
        left = [seat for seq in lost if (seat := self._seats.pop(seq, None)) is not None]
        lost.clear()
        for seat in left:
            del self.by_id[seat.seq.seq_id]
        return tuple([seat.seq.seq_id for seat in left])

    def take_state_moves(self) -> StateMoves:
        """Returns what has to be moved between slots of states."""
        return self._manager.states.take_moves()

    def note_end(self, seq: Sequence) -> None:
        """Notes that a sequence has ended; it may have had a seat."""
        if seq.seq_id:
            self._ended.append(seq.seq_id)

    def take_ended(self) -> tuple[int, ...]:
        """Returns the ids of the sequences that have ended since the last call."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def rows(
        self, rows: Iterable[Row], *, is_burst: bool, drafts: Mapping[Sequence, list[int]]
    ) -> SeatedRows:
        """Seats the sequences of a step that have no seat yet; returns the step in terms of ids.

        Notes in the sequences what the step computes and draws, now that it is in flight.

        Args:
            rows: In the order in which they are computed.
            is_burst: Whether of each row all tokens but the first are drawn in this step.
            drafts: Of sequences that sample, tokens to compute after those that they have.
        """
        seats, changed, states = self._seats, self._manager.changed, self._manager.states
        new: list[NewSequence] = []
        scheduled: list[ScheduledSequence] = []
        samples: list[Sample] = []
        for i, (group, seq, num_tokens, sampling) in enumerate(rows):
            seat = seats.get(seq)
            if seat is None:
                seat = self._take(group, seq, new)
            new_blocks, replaced = self._nothing_new, self._nothing_replaced
            if seq in changed:
                replaced = changed.pop(seq)
                new_blocks = [t[n:] for t, n in zip(seat.tables, seat.num_told, strict=True)]
                seat.num_told = list(map(len, seat.tables))
            start = seq.num_computed_tokens + seq.num_in_flight
            if seq.num_pending:
                token_ids = self._pending_token
            elif is_burst or (num_tokens == 1 and sampling):
                token_ids = (seq.output_token_ids or seq.prompt_token_ids)[-1:]
            else:
                token_ids = seq.tokens(start, start + num_tokens)
            num_logits = 1
            if seq in drafts:
                token_ids = token_ids + drafts[seq]
                num_logits += len(drafts[seq])
            at = states.begin_checkpoint(seq, start, start + num_tokens) if not is_burst else (0, 0)
            row = seq.seq_id, start, token_ids, new_blocks, replaced, states.slot_of(seq), at
            scheduled.append(ScheduledSequence(*row))
            seq.num_in_flight += num_tokens
            for sample in sampling:
                if sample is not seq:
                    sample.num_in_flight += num_tokens
                    if sample not in seats:
                        self._take(group, sample, new)
                sample.num_pending += num_tokens if is_burst else 1
                samples.append(Sample(i, sample.seq_id, num_logits))
        return SeatedRows(new, scheduled, samples)

    def _take(self, group: SequenceGroup, seq: Sequence, new: list[NewSequence]) -> Seat:
        """Gives a sequence a seat; appends to `new` what the executor has to know of it."""
        tables, params, beams = self._manager.block_tables[seq], group.sampling_params, group.beam_params
        self._manager.changed.pop(seq, None)
        former_id, seq.seq_id = seq.seq_id, next(self._ids)
        seat = Seat(group, seq, tables, list(map(len, tables)))
        self._seats[seq] = self.by_id[seq.seq_id] = seat
        entry = NewSequence(
            seq_id=seq.seq_id,
            request_id=group.request_id,
            prompt_token_ids=seq.prompt_token_ids,
            output_token_ids=list(seq.output_token_ids),
            sampling_params=params,
            seed=seq.seed,
            end_token_ids=self._stop_conditions.end_token_ids(group),
            num_top_logprobs=2 * beams.beam_width if beams else params.logprobs,
            logprob_temperature=(beams.temperature if beams else 0) or 1.0,
            num_encoder_tokens=len(group.encoder_token_ids),
            block_tables=[list(table) for table in tables],
            num_dropped_tokens=seq.num_dropped_tokens,
            former_id=former_id,
            adapter_slot=self.adapters.place(group.adapter) if group.adapter else 0,
            prompt_embeds=group.prompt_embeds,
            stand_ins=seq.stand_ins,
        )
        new.append(entry)
        return seat
