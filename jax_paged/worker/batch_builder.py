"""One step and the seats of its sequences -> the padded arrays that go to the device."""

import itertools
from typing import NamedTuple

import numpy as np

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.scheduler_output import SchedulerOutput, TokenMasks
from jax_paged.pallas_kernels import ops
from jax_paged.sampling_params import MAX_BIAS_IDS
from jax_paged.worker.block_tables import pad_changes
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.features.cascade import num_saved_tokens, shared_blocks
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.packed_buffer import (
    KEEPS_DRAW,
    MASK_COLUMN,
    Field,
    layout,
    neutral_sampling,
    views,
)
from jax_paged.worker.sampling.logits_rows import LogitsRows


class StepInputs(NamedTuple):
    """What a step sends to the device.

    Args:
        packed: int32, the bucket's buffer.
        bias_ids: int32 [B, MAX_BIAS_IDS], padded with the size of the vocabulary; None if no row of the step
            has a bias.
        bias_values: float32 [B, MAX_BIAS_IDS], or None.
        token_mask: int32 [B, ceil(V / 32)], see SamplingBatch; None if no row of the step has one.
        changes_ahead: int32 [2, n], changes of block tables to write ahead of the step: those for which its
            buffer has no room, when long tables take their seats.
        num_shared_tokens: Tokens that are read once for several rows, each of these after the first counted.
        embeds: float32 [T, E], the vectors of the token rows that have some; None if no row of the step has.
    """

    packed: np.ndarray
    bias_ids: np.ndarray | None
    bias_values: np.ndarray | None
    token_mask: np.ndarray | None
    changes_ahead: np.ndarray
    num_shared_tokens: int = 0
    embeds: np.ndarray | None = None


class BatchBuilder:
    """Builds the inputs of steps.

    Args:
        input_batch: The seats; updated before a step is built.
        block_size: Tokens per block.
        num_blocks: Blocks of the pool; slots from num_blocks * block_size on are not written.
        groups: Cache groups, each with block tables of its own.
        vocab_size: Ids from here on pad biases.
        checks_inputs: Whether to assert all that the kernels take for granted.
        shares_prefixes: Whether rows may attend to leading blocks together.
        embed_size: Numbers of a vector in place of a token, E, with what is added to the outputs of layers.
        num_state_slots: Slots for states; 0 if no layer keeps any.
        has_mrope: Whether tokens of images have rotary positions of their own.
    """

    def __init__(
        self,
        input_batch: InputBatch,
        *,
        block_size: int,
        num_blocks: int,
        groups: tuple[CacheGroup, ...],
        vocab_size: int,
        checks_inputs: bool = False,
        shares_prefixes: bool = False,
        embed_size: int = 0,
        num_state_slots: int = 0,
        has_mrope: bool = False,
    ) -> None:
        self._input_batch = input_batch
        self._block_size, self._num_blocks = block_size, num_blocks
        self._groups = groups
        self._vocab_size = vocab_size
        self._checks_inputs = checks_inputs
        self._embed_size, self._num_state_slots, self._has_mrope = embed_size, num_state_slots, has_mrope
        # Groups without a window share alike: what is cached or forked is so in all of them.
        full = [g for g, group in enumerate(groups) if group.window is None and not group.is_cross]
        self._shared_groups = full if shares_prefixes else []
        self._num_mask_words = -(-vocab_size // 32)
        self._neutral = neutral_sampling()

    def build(self, output: SchedulerOutput, logits_rows: LogitsRows, bucket: Bucket) -> StepInputs:
        """Pads a step to a bucket.

        Args:
            output: At most bucket.num_seqs rows, bucket.num_logits rows of logits, and bucket.num_tokens
                tokens; one token per row if bucket.is_decode.
            logits_rows: Of the step.
            bucket: The shape.
        """
        rows, batch = output.scheduled, self._input_batch
        n, total = len(rows), output.num_batched_tokens
        assert n <= bucket.num_seqs, (n, bucket)
        assert len(logits_rows.rows) <= bucket.num_logits, (len(logits_rows.rows), bucket)
        assert total <= bucket.num_tokens, (total, bucket)
        fields, size = self._layout(bucket)
        packed = np.zeros(size, np.int32)
        view = views(packed, fields)

        seq_ids, starts, token_ids, _, _, state_slots, checkpoints = zip(*rows, strict=True)
        seats = batch.seats_of(seq_ids)
        num_tokens = np.fromiter(map(len, token_ids), np.int32, n)
        start = np.fromiter(starts, np.int32, n)
        end_loc = np.cumsum(num_tokens, dtype=np.int32)
        assert end_loc[-1] == total, f"the rows have {end_loc[-1]} tokens, not {total}"
        if bucket.is_decode:
            assert total == n, "a decode step has one token per row"
            token_seats, positions = seats, start
        else:
            row_of_token = np.repeat(np.arange(n), num_tokens)
            token_seats = seats[row_of_token]
            positions = np.arange(total, dtype=np.int32) + (start - end_loc + num_tokens)[row_of_token]
        view["tokens"][:total] = np.fromiter(itertools.chain.from_iterable(token_ids), np.int32, total)
        view["positions"][:total] = positions
        view["query_start_loc"][1 : n + 1] = end_loc
        view["query_start_loc"][n + 1 :] = total
        view["seats"][:n] = seats
        view["seats"][n:] = batch.num_seats
        changes, most = batch.take_table_changes(), view["table_changes"].shape[1]
        num_ahead = max(0, changes.shape[1] - most)
        view["table_changes"][:] = pad_changes(changes[:, num_ahead:], most, batch.block_tables.size)
        self._fill_slots(view, seats, token_seats, positions, start + num_tokens)
        if self._num_state_slots:
            assert min(state_slots) > 0, "a sequence has no slot"
            num_before, slots = np.array(checkpoints, np.int32).T
            view["state_slots"][:2] = self._num_state_slots
            view["state_slots"][0, :n] = state_slots
            view["state_slots"][1, :n] = np.where(slots > 0, slots, self._num_state_slots)
            view["state_slots"][2, :n] = num_before
        if self._has_mrope:
            self._fill_mrope(view["mrope_positions"][:, :total], token_seats, positions)
        num_shared = self._share_prefixes(view["shared_blocks"][:n], seats, start, num_tokens)
        if self._checks_inputs:
            self._check(view, output)

        view["logits_rows"][: len(logits_rows.rows)] = end_loc[logits_rows.rows] - 1 - logits_rows.tokens_back
        num_drawn = logits_rows.num_drawn
        drawn_rows = logits_rows.rows[:num_drawn]
        sample_positions = (start + num_tokens)[drawn_rows] - logits_rows.tokens_back[:num_drawn]
        sample_seats = batch.seats_of([sample.seq_id for sample in output.samples])[logits_rows.samples]
        count_seats = batch.count_seats[sample_seats]
        view["sample_positions"][:num_drawn] = sample_positions
        view["sample_seats"][:num_drawn] = sample_seats
        view["sample_seats"][num_drawn:] = batch.num_seats
        view["count_seats"][:] = batch.num_seats
        view["count_seats"][:num_drawn] = count_seats
        view["sampling"][:num_drawn] = batch.sampling[sample_seats]
        view["sampling"][num_drawn:] = self._neutral
        view["hook_args"][:n] = batch.hook_args[seats].view(np.int32)
        view["processor_args"][:num_drawn] = self._processor_args(sample_seats).view(np.int32)
        self._fill_forced(view["forced_tokens"], sample_seats, sample_positions)
        if bucket.num_drafts:
            view["num_drafts"][: len(logits_rows.rows)] = logits_rows.num_drafts
        elif num_drawn != len(output.samples):
            counted = count_seats[count_seats < batch.num_seats]
            assert len(np.unique(counted)) == len(counted), (
                "a sample with penalties has several rows of logits: the tokens drawn from the earlier ones "
                "are not counted yet"
            )
        if bucket.num_steps > 1:
            self._fill_burst(view, seats, start, output.burst)
        if bucket.has_adapters:
            view["adapter_slots"][:n] = batch.adapter_slots[seats]
        embeds = self._embeds(view["has_embeds"], output) if bucket.has_embeds else None
        bias = self._bias(sample_seats, bucket)
        is_masked = view["sampling"][:, MASK_COLUMN]
        mask = self._token_mask(sample_seats, sample_positions, output.token_masks, is_masked)
        return StepInputs(packed, *bias, mask, changes[:, :num_ahead], num_shared, embeds)

    def fields(self, inputs: StepInputs, bucket: Bucket) -> dict[str, np.ndarray]:
        """Returns the fields of a step's buffer."""
        return views(inputs.packed, self._layout(bucket)[0])

    def _layout(self, bucket: Bucket) -> tuple[dict[str, Field], int]:
        batch = self._input_batch
        columns = batch.hook_args.shape[1], batch.processor_args.shape[1]
        return layout(bucket, len(self._groups), *columns, self._num_state_slots > 0, self._has_mrope)

    def _fill_slots(
        self,
        view: dict[str, np.ndarray],
        seats: np.ndarray,
        token_seats: np.ndarray,
        positions: np.ndarray,
        stops: np.ndarray,
    ) -> None:
        """Fills slot_mapping and context_lens."""
        batch, n, total, size = self._input_batch, len(seats), len(positions), self._block_size
        places = positions - batch.num_dropped[token_seats]
        view["slot_mapping"][:] = self._num_blocks * size
        for g, group in enumerate(self._groups):
            tables = batch.block_tables[g]
            if group.is_cross:
                view["context_lens"][g, :n] = batch.num_encoder_tokens[seats]
            else:
                blocks = tables[token_seats, places // size]
                assert blocks.min() > 0, "a token would be written to the null block"
                view["slot_mapping"][g, :total] = blocks * size + places % size
                view["context_lens"][g, :n] = stops - batch.num_dropped[seats]

    def _fill_mrope(self, filled: np.ndarray, token_seats: np.ndarray, positions: np.ndarray) -> None:
        batch = self._input_batch
        filled[:] = positions + batch.mrope_offsets[token_seats]
        is_known = positions < batch.mrope_stops[token_seats]  # none in steps that decode
        for seat in np.unique(token_seats[is_known]).tolist():
            rows = np.flatnonzero(is_known & (token_seats == seat))
            filled[:, rows] = batch.mrope[seat][:, positions[rows]]

    def _embeds(self, has_embeds: np.ndarray, output: SchedulerOutput) -> np.ndarray:
        """Returns the vectors of a step; notes which token rows have one."""
        embeds, first = np.zeros((len(has_embeds), self._embed_size), np.float32), 0
        seats = self._input_batch.seats_of(row.seq_id for row in output.scheduled).tolist()
        for row, seat in zip(output.scheduled, seats, strict=True):
            for position, vectors in self._input_batch.embeds.get(seat, {}).items():
                start = max(row.start, position)
                stop = min(row.start + row.num_tokens, position + len(vectors))
                if start < stop:
                    rows = slice(first + start - row.start, first + stop - row.start)
                    embeds[rows, : vectors.shape[1]] = vectors[start - position : stop - position]
                    has_embeds[rows] = 1
            first += row.num_tokens
        return embeds

    def _share_prefixes(
        self, shared: np.ndarray, seats: np.ndarray, start: np.ndarray, num_tokens: np.ndarray
    ) -> int:
        """Fills shared_blocks; returns how many tokens less the rows read."""
        if not self._shared_groups:
            return 0
        batch = self._input_batch
        # Where blocks were dropped, equal last blocks do not tell that those before them are equal.
        can_share = (num_tokens == 1) & (batch.num_dropped[seats] == 0)
        most = np.where(can_share, start // self._block_size, 0)
        tables = batch.block_tables[self._shared_groups[0]]
        shared[:] = shared_blocks(tables, seats, most, self._block_size)
        return num_saved_tokens(shared, tables, seats, self._block_size)

    def _processor_args(self, seats: np.ndarray) -> np.ndarray:
        """Returns what the logits processors of drawn rows are told; those of new seats begin."""
        batch = self._input_batch
        args = batch.processor_args[seats]
        if batch.new_seats:
            is_new = np.array([seat in batch.new_seats for seat in seats.tolist()], bool)
            modes = np.cumsum([0, *(1 + n for n in batch.processors.values())])[:-1]
            args[np.ix_(is_new, modes)] *= 2
            batch.new_seats.difference_update(seats.tolist())
        return args

    def _fill_forced(self, forced: np.ndarray, seats: np.ndarray, positions: np.ndarray) -> None:
        forced[:] = -1
        given = self._input_batch.forced_tokens
        for j, seat in enumerate(seats.tolist() if given else ()):
            if seat in given:
                prompt_len, token_ids = given[seat]
                first = int(positions[j]) - prompt_len
                part = token_ids[first : first + forced.shape[1]]
                forced[j, : len(part)] = part

    def _fill_burst(
        self, view: dict[str, np.ndarray], seats: np.ndarray, start: np.ndarray, max_draws: tuple[int, ...]
    ) -> None:
        """Fills max_draws and end_tokens."""
        batch, n = self._input_batch, len(seats)
        assert len(max_draws) == n, "every row of a burst draws"
        view["max_draws"][:n] = max_draws
        view["end_tokens"][:n] = batch.end_tokens[seats]
        places = start - batch.num_dropped[seats]
        last = (places + np.array(max_draws, np.int32) - 1) // self._block_size
        for tables, group in zip(batch.block_tables, self._groups, strict=True):
            assert group.is_cross or tables[seats, last].min() > 0, "a burst would write to the null block"

    def _check(self, view: dict[str, np.ndarray], output: SchedulerOutput) -> None:
        copies = np.array(output.blocks_to_copy, np.int32).reshape(-1, 2)
        for g, group in enumerate(self._groups):
            # Cross attention has no causal order: a query may stand anywhere.
            starts = view["query_start_loc"] * (not group.is_cross)
            n, lens, slots = len(output.scheduled), view["context_lens"][g], view["slot_mapping"][g]
            tables = np.zeros((len(lens), self._input_batch.block_tables.shape[2]), np.int32)
            tables[:n] = self._input_batch.block_tables[g, view["seats"][:n]]
            ops.check_inputs(self._num_blocks, self._block_size, tables, lens, starts, slots, *copies.T)

    def _bias(self, seats: np.ndarray, bucket: Bucket) -> tuple[np.ndarray | None, np.ndarray | None]:
        by_seat = self._input_batch.token_rules
        if not by_seat:
            return None, None
        rules = ((j, by_seat[seat]) for j, seat in enumerate(seats.tolist()) if seat in by_seat)
        biases = {j: rule.bias for j, rule in rules if rule.bias}
        if not biases:
            return None, None
        ids = np.full((bucket.num_logits, MAX_BIAS_IDS), self._vocab_size, np.int32)
        values = np.zeros((bucket.num_logits, MAX_BIAS_IDS), np.float32)
        for j, bias in biases.items():
            assert len(bias) <= MAX_BIAS_IDS, f"{len(bias)} tokens of a sequence get a bias"
            ids[j, : len(bias)] = list(bias)
            values[j, : len(bias)] = list(bias.values())
        return ids, values

    def _token_mask(
        self, seats: np.ndarray, positions: np.ndarray, given: TokenMasks | None, is_masked: np.ndarray
    ) -> np.ndarray | None:
        """Returns the masks of a step, if there are any; notes the rows of logits that have one."""
        by_seat = self._input_batch.token_rules
        drawn = enumerate(zip(seats.tolist(), positions.tolist(), strict=True)) if by_seat else ()
        own = ((j, by_seat[seat].mask_at(position)) for j, (seat, position) in drawn if seat in by_seat)
        masked = [(j, mask) for j, mask in own if mask is not None]
        if not masked and given is None:
            return None
        out = np.full((len(is_masked), self._num_mask_words), -1, np.int32)
        for j, mask in masked:
            out[j], is_masked[j] = mask, 1
        if given is not None:
            rows, words = list(given.rows), np.frombuffer(given.words, "<i4")
            out[rows] &= words.reshape(len(rows), -1)[:, : self._num_mask_words]
            is_masked[rows] = KEEPS_DRAW
        return out


def empty_sampling_inputs(
    num_logits: int, vocab_size: int, num_mask_words: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns bias_ids, bias_values and token_mask without any effect, for the steps that need none."""
    return (
        np.full((num_logits, MAX_BIAS_IDS), vocab_size, np.int32),
        np.zeros((num_logits, MAX_BIAS_IDS), np.float32),
        np.full((num_logits, num_mask_words), -1, np.int32),
    )
