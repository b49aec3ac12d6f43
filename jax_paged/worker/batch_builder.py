"""One step and the batch slots of its sequences -> the padded arrays that go to the device.

Three kinds of rows, each padded to the size of the bucket:

    scheduled sequences   B    SchedulerOutput.scheduled, in order
    token rows            T    all tokens of the first sequence, then those of the second, ...
    logits rows           L    a token row each, after which logits are computed; first those that
                               something is drawn from (see logits_rows.py)

Arrays that outlive a step have a row per batch slot, S. A sequence keeps its batch slot while it runs, at
whatever index of `scheduled` it is.
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.scheduler_output import SchedulerOutput, TokenMasks
from jax_paged.pallas_kernels import ops
from jax_paged.sampling_params import MAX_BIAS_IDS
from jax_paged.worker.block_tables import pad_changes
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.packed_buffer import (
    KEEPS_DRAW,
    MASK_COLUMN,
    BufferOptions,
    layout,
    neutral_sampling,
    views,
)
from jax_paged.worker.sampling.logits_rows import LogitsRows

if TYPE_CHECKING:
    from jax_paged.worker.composition import StepFields
    from jax_paged.worker.features.cascade import SharedPrefixes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """What a step sends to the device.

    Args:
        packed: int32, the bucket's buffer.
        bias_ids: int32 [B, MAX_BIAS_IDS], padded with the size of the vocabulary; None if no row of the step
            has a bias.
        bias_values: float32 [B, MAX_BIAS_IDS], or None.
        token_mask: int32 [B, ceil(V / 32)], see SamplingBatch; None if no row of the step has one.
        changes_ahead: int32 [2, n], changes of block tables to write ahead of the step: those for which its
            buffer has no room, when long tables take their batch slots.
        num_shared_tokens: Tokens that are read once for several rows, each of these after the first counted.
        embeds: float32 [T, E], the vectors of the token rows that have some; None if no row of the step has.
        fields: The fields of `packed`, see packed_buffer.py.
    """

    packed: np.ndarray
    bias_ids: np.ndarray | None
    bias_values: np.ndarray | None
    token_mask: np.ndarray | None
    changes_ahead: np.ndarray
    num_shared_tokens: int = 0
    embeds: np.ndarray | None = None
    fields: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class ScheduledRows(NamedTuple):
    """The scheduled sequences and token rows of a step. n sequences, t tokens.

    Args:
        batch_slots: int64 [n], the batch slot of each sequence.
        start: int32 [n], the position of its first token.
        num_tokens: int32 [n].
        end_loc: int32 [n], the token row after its last one.
        token_batch_slots: int64 [t], the batch slot of each token row.
        positions: int32 [t], the position of each token row.
        tokens: int32 [t].
        state_slots: The slot of each sequence's recurrent state; 0 for none.
        checkpoints: For each sequence, the tokens ahead of a checkpoint of its state, and the checkpoint's
            slot; 0 for none.
    """

    batch_slots: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    end_loc: np.ndarray
    token_batch_slots: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    state_slots: tuple[int, ...]
    checkpoints: tuple[tuple[int, int], ...]

    @property
    def stop(self) -> np.ndarray:
        """int32 [n], the position after the last token of each sequence."""
        return self.start + self.num_tokens

    def fill_state_slots(self, filled: np.ndarray, num_slots: int) -> None:
        """Fills the field state_slots; unused entries are `num_slots`, which is no slot."""
        assert min(self.state_slots) > 0, "a sequence has no slot"
        num_before, slots = np.array(self.checkpoints, np.int32).T
        n = len(self.batch_slots)
        filled[:2] = num_slots
        filled[0, :n] = self.state_slots
        filled[1, :n] = np.where(slots > 0, slots, num_slots)
        filled[2, :n] = num_before


class BatchBuilder:
    """Builds the inputs of steps.

    Args:
        input_batch: The batch slots; updated before a step is built.
        block_size: Tokens per block.
        num_blocks: Blocks of the pool; slots from num_blocks * block_size on are not written.
        groups: Cache groups, each with block tables of its own.
        vocab_size: Ids from here on pad biases.
        checks_inputs: Whether to assert all that the kernels take for granted.
        options: What the fields of the buffer depend on; None for those of `groups` alone.
        features: Fills the fields of features; None if no feature has any.
        shared_prefixes: Finds leading blocks that sequences attend to together; None if they never do.
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
        options: BufferOptions | None = None,
        features: "StepFields | None" = None,
        shared_prefixes: "SharedPrefixes | None" = None,
    ) -> None:
        self._input_batch = input_batch
        self._block_size, self._num_blocks = block_size, num_blocks
        self._groups = groups
        self._vocab_size = vocab_size
        self._checks_inputs = checks_inputs
        self._options = options or BufferOptions(len(groups))
        self._features, self._shared_prefixes = features, shared_prefixes
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
        batch, rows = self._input_batch, self._rows(output, bucket)
        assert len(logits_rows.rows) <= bucket.num_logits, (len(logits_rows.rows), bucket)
        fields, size = layout(bucket, self._options)
        packed = np.zeros(size, np.int32)
        view = views(packed, fields)
        self._fill_tokens(view, rows)
        self._fill_slots(view, rows)
        changes, most = batch.take_table_changes(), view["table_changes"].shape[1]
        num_ahead = max(0, changes.shape[1] - most)
        view["table_changes"][:] = pad_changes(changes[:, num_ahead:], most, batch.block_tables.size)
        num_shared, shared = 0, self._shared_prefixes
        if shared is not None and len(rows.batch_slots) >= shared.min_rows:
            filled = view["shared_blocks"][: len(rows.batch_slots)]
            num_shared = shared.fill(filled, rows.batch_slots, rows.start, rows.num_tokens)
        if self._checks_inputs:
            self._check(view, output)
        sample_slots = self._fill_sampling(view, rows, logits_rows, output)
        if not bucket.num_drafts and logits_rows.num_drawn != len(output.samples):
            self._check_penalties(sample_slots)
        embeds = None
        if self._features is not None:
            embeds = self._features.fill(view, rows, logits_rows, sample_slots, output, bucket)
        sample_positions = view["sample_positions"][: logits_rows.num_drawn]
        bias_ids, bias_values = self._bias(sample_slots, bucket)
        is_masked = view["sampling"][:, MASK_COLUMN]
        return StepInputs(
            packed=packed,
            bias_ids=bias_ids,
            bias_values=bias_values,
            token_mask=self._token_mask(sample_slots, sample_positions, output.token_masks, is_masked),
            changes_ahead=changes[:, :num_ahead],
            num_shared_tokens=num_shared,
            embeds=embeds,
            fields=view,
        )

    def _rows(self, output: SchedulerOutput, bucket: Bucket) -> ScheduledRows:
        """Returns the scheduled sequences and token rows of a step."""
        n, total = len(output.scheduled), output.num_batched_tokens
        assert n <= bucket.num_seqs, (n, bucket)
        assert total <= bucket.num_tokens, (total, bucket)
        seq_ids, starts, token_ids, _, _, state_slots, checkpoints = zip(*output.scheduled, strict=True)
        batch_slots = self._input_batch.slots_of(seq_ids)
        num_tokens = np.fromiter(map(len, token_ids), np.int32, n)
        start = np.fromiter(starts, np.int32, n)
        end_loc = np.cumsum(num_tokens, dtype=np.int32)
        assert end_loc[-1] == total, f"the rows have {end_loc[-1]} tokens, not {total}"
        if bucket.is_decode:
            assert total == n, "a decode step has one token per row"
            token_batch_slots, positions = batch_slots, start
        else:
            row_of_token = np.repeat(np.arange(n), num_tokens)
            token_batch_slots = batch_slots[row_of_token]
            positions = np.arange(total, dtype=np.int32) + (start - end_loc + num_tokens)[row_of_token]
        tokens = np.fromiter(itertools.chain.from_iterable(token_ids), np.int32, total)
        return ScheduledRows(
            batch_slots,
            start,
            num_tokens,
            end_loc,
            token_batch_slots,
            positions,
            tokens,
            state_slots,
            checkpoints,
        )

    def _fill_tokens(self, view: dict[str, np.ndarray], rows: ScheduledRows) -> None:
        """Fills tokens, positions, query_start_loc and batch slots."""
        n, total = len(rows.batch_slots), len(rows.tokens)
        view["tokens"][:total] = rows.tokens
        view["positions"][:total] = rows.positions
        view["query_start_loc"][1 : n + 1] = rows.end_loc
        view["query_start_loc"][n + 1 :] = total
        view["batch_slots"][:n] = rows.batch_slots
        view["batch_slots"][n:] = self._input_batch.num_batch_slots

    def _fill_slots(self, view: dict[str, np.ndarray], rows: ScheduledRows) -> None:
        """Fills slot_mapping and context_lens."""
        batch, batch_slots, size = self._input_batch, rows.batch_slots, self._block_size
        n, total, stop = len(batch_slots), len(rows.positions), rows.stop
        places = rows.positions - batch.num_dropped[rows.token_batch_slots]
        view["slot_mapping"][:] = self._num_blocks * size
        for g, group in enumerate(self._groups):
            if group.is_cross:
                view["context_lens"][g, :n] = batch.features.num_encoder_tokens[batch_slots]
            else:
                blocks = batch.block_tables[g][rows.token_batch_slots, places // size]
                assert blocks.min() > 0, "a token would be written to the null block"
                view["slot_mapping"][g, :total] = blocks * size + places % size
                view["context_lens"][g, :n] = stop - batch.num_dropped[batch_slots]

    def _fill_sampling(
        self,
        view: dict[str, np.ndarray],
        rows: ScheduledRows,
        logits_rows: LogitsRows,
        output: SchedulerOutput,
    ) -> np.ndarray:
        """Fills the fields of logits rows; returns the batch slots of the drawn ones."""
        batch, num_drawn = self._input_batch, logits_rows.num_drawn
        num_rows, tokens_back = len(logits_rows.rows), logits_rows.tokens_back
        view["logits_rows"][:num_rows] = rows.end_loc[logits_rows.rows] - 1 - tokens_back
        positions = rows.stop[logits_rows.rows[:num_drawn]] - tokens_back[:num_drawn]
        batch_slots = batch.slots_of([sample.seq_id for sample in output.samples])[logits_rows.samples]
        view["sample_positions"][:num_drawn] = positions
        view["sample_slots"][:num_drawn] = batch_slots
        view["sample_slots"][num_drawn:] = batch.num_batch_slots
        view["count_slots"][:] = batch.num_batch_slots
        view["count_slots"][:num_drawn] = batch.count_slots[batch_slots]
        view["sampling"][:num_drawn] = batch.sampling[batch_slots]
        view["sampling"][num_drawn:] = self._neutral
        self._fill_forced(view["forced_tokens"], batch_slots, positions)
        return batch_slots

    def _check_penalties(self, sample_slots: np.ndarray) -> None:
        count_slots = self._input_batch.count_slots[sample_slots]
        counted = count_slots[count_slots < self._input_batch.num_batch_slots]
        assert len(np.unique(counted)) == len(counted), (
            "a sample with penalties has several rows of logits: the tokens drawn from the earlier ones "
            "are not counted yet"
        )

    def _fill_forced(self, forced: np.ndarray, batch_slots: np.ndarray, positions: np.ndarray) -> None:
        forced[:] = -1
        given = self._input_batch.forced_tokens
        for j, batch_slot in enumerate(batch_slots.tolist() if given else ()):
            if batch_slot in given:
                prompt_len, token_ids = given[batch_slot]
                first = int(positions[j]) - prompt_len
                part = token_ids[first : first + forced.shape[1]]
                forced[j, : len(part)] = part

    def _check(self, view: dict[str, np.ndarray], output: SchedulerOutput) -> None:
        copies = np.array(output.blocks_to_copy, np.int32).reshape(-1, 2)
        for g, group in enumerate(self._groups):
            # Cross attention has no causal order: a query may have any position.
            starts = view["query_start_loc"] * (not group.is_cross)
            n, lens, slots = len(output.scheduled), view["context_lens"][g], view["slot_mapping"][g]
            tables = np.zeros((len(lens), self._input_batch.block_tables.shape[2]), np.int32)
            tables[:n] = self._input_batch.block_tables[g, view["batch_slots"][:n]]
            ops.check_inputs(self._num_blocks, self._block_size, tables, lens, starts, slots, *copies.T)

    def _bias(self, batch_slots: np.ndarray, bucket: Bucket) -> tuple[np.ndarray | None, np.ndarray | None]:
        by_slot = self._input_batch.token_rules
        if not by_slot:
            return None, None
        rules = (
            (j, by_slot[batch_slot])
            for j, batch_slot in enumerate(batch_slots.tolist())
            if batch_slot in by_slot
        )
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
        self, batch_slots: np.ndarray, positions: np.ndarray, given: TokenMasks | None, is_masked: np.ndarray
    ) -> np.ndarray | None:
        """Returns the masks of a step, if there are any; notes the rows of logits that have one."""
        by_slot = self._input_batch.token_rules
        drawn = enumerate(zip(batch_slots.tolist(), positions.tolist(), strict=True)) if by_slot else ()
        own = (
            (j, by_slot[batch_slot].mask_at(position))
            for j, (batch_slot, position) in drawn
            if batch_slot in by_slot
        )
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
