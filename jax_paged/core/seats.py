"""Which sequences the executor knows, by which ids, and how much of their block tables."""

import dataclasses
import itertools

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.scheduler_output import BlockTables, NewSequence, ScheduledSequence
from jax_paged.core.sequence import Sequence, SequenceGroup
from jax_paged.core.stop_conditions import StopConditions


@dataclasses.dataclass(slots=True)
class _Seat:
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
        block_manager: Owner of the block tables; only read.
        stop_conditions: Tell the tokens that are held back until min_tokens.
    """

    def __init__(self, block_manager: BlockManager, stop_conditions: StopConditions) -> None:
        self._manager = block_manager
        self._stop_conditions = stop_conditions
        self._seats: dict[Sequence, _Seat] = {}
        self._by_id: dict[int, _Seat] = {}
        self._ids = itertools.count(1)
        # Shared by all rows without news; read-only.
        self._nothing_new: BlockTables = [[] for _ in block_manager.groups]
        self._nothing_replaced: list[tuple[int, int, int]] = []

    def find(self, seq_id: int) -> tuple[SequenceGroup, Sequence] | None:
        """Returns the sequence of an id, with its request; None if it has left its seat."""
        seat = self._by_id.get(seq_id)
        return None if seat is None else (seat.group, seat.seq)

    def release(self) -> tuple[int, ...]:
        """Takes the seats of sequences that have lost their blocks; returns their ids."""
        tables = self._manager.block_tables
        left = [seat for seq, seat in self._seats.items() if tables.get(seq) is not seat.tables]
        for seat in left:
            del self._seats[seat.seq], self._by_id[seat.seq.seq_id]
        return tuple([seat.seq.seq_id for seat in left])

    def take(self, group: SequenceGroup, seq: Sequence) -> NewSequence | None:
        """Gives a sequence a seat, unless it has one; returns what the executor has to know of it."""
        if seq in self._seats:
            return None
        tables, params, beams = self._manager.block_tables[seq], group.sampling_params, group.beam_params
        self._manager.take_replaced(seq)
        seq.seq_id = next(self._ids)
        seat = _Seat(group, seq, tables, list(map(len, tables)))
        self._seats[seq] = self._by_id[seq.seq_id] = seat
        return NewSequence(
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
        )

    def row(self, seq: Sequence, num_tokens: int) -> ScheduledSequence:
        """Returns the next tokens of a seated sequence, with the news of its block tables."""
        seat = self._seats[seq]
        start, new_blocks = seq.num_computed_tokens, self._nothing_new
        for g, table in enumerate(seat.tables):
            if len(table) != seat.num_told[g]:
                new_blocks = [table[n:] for table, n in zip(seat.tables, seat.num_told, strict=True)]
                seat.num_told = list(map(len, seat.tables))
                break
        replaced = self._manager.take_replaced(seq) or self._nothing_replaced
        return ScheduledSequence(
            seq.seq_id, start, seq.tokens(start, start + num_tokens), new_blocks, replaced
        )
