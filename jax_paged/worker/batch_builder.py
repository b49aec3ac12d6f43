"""Builder of the padded arrays that a step sends to the device.

A step has three kinds of rows. Each kind is padded to the size of the bucket:

    scheduled sequences   B    SchedulerOutput.scheduled, in the same order
    token rows            T    the tokens of the first sequence, then the tokens of the second, ...
    logits rows           L    the token rows whose logits are computed (see step_rows.py): first the rows
                               from which a token is drawn, then one row for each other sequence

State that outlives a step is indexed by batch slot instead (S batch slots). A sequence keeps its batch slot
while its index in `scheduled` changes from step to step.
"""

import dataclasses
import itertools
from typing import TYPE_CHECKING

import numpy as np

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.scheduler_output import SchedulerOutput, TokenMasks
from jax_paged.pallas_kernels import ops
from jax_paged.sampling_params import MAX_BIAS_IDS
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.packed_buffer import (
    MASK_COLUMN,
    MASK_KEEPS_DRAW,
    BufferOptions,
    layout,
    neutral_sampling,
    views,
)
from jax_paged.worker.step_features import StepFields
from jax_paged.worker.step_rows import LogitsRows, ScheduledRows

if TYPE_CHECKING:
    from jax_paged.worker.features.cascade import SharedPrefixes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """Arrays that a step sends to the device.

    T token rows, L logits rows, V tokens in the vocabulary, E numbers per embedding.

    Args:
        packed: int32, the packed buffer of the bucket.
        bias_ids: int32 [L, MAX_BIAS_IDS], padded with V; None if no row has a bias.
        bias_values: float32 [L, MAX_BIAS_IDS]; None if no row has a bias.
        token_mask: int32 [L, ceil(V / 32)], see SamplingBatch; None if no row has a mask.
        changes_before_step: int32 [2, n], block table changes that do not fit into the buffer, for example
            because a sequence with a long table takes a batch slot. They are written before the step runs.
        num_saved_reads: Number of token reads that cascade attention saves. A prefix of t tokens that n
            sequences share saves (n - 1) * t.
        embeds: float32 [T, E], embeddings that replace tokens; None if no token row has one.
        fields: Views of the fields of `packed`, see packed_buffer.py.
    """

    packed: np.ndarray
    bias_ids: np.ndarray | None
    bias_values: np.ndarray | None
    token_mask: np.ndarray | None
    changes_before_step: np.ndarray
    num_saved_reads: int = 0
    embeds: np.ndarray | None = None
    fields: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class BatchBuilder:
    """Builder of step inputs.

    Args:
        input_batch: The batch slots. They must be updated with a step before the step is built.
        block_size: Number of tokens per block.
        num_blocks: Number of blocks in the KV cache. Padded token rows get the slot num_blocks * block_size,
            which is not written.
        groups: Cache groups. Each group has its own block tables.
        vocab_size: Size of the vocabulary. It is also the token id that pads biases.
        checks_inputs: Whether to assert all conditions that the kernels rely on.
        options: Properties of the engine that determine the fields of the buffer; None if only the number of
            cache groups determines them.
        features: Fills the fields of features; None if no feature has a field.
        shared_prefixes: Finds the leading blocks for cascade attention; None if it is off.
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
        features: StepFields | None = None,
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
        """Builds the inputs of a step, padded to a bucket.

        Args:
            output: The step. It must fit into the bucket, and each of its sequences must have one token if
                bucket.is_decode is True.
            logits_rows: The logits rows of the step.
            bucket: The shape of the step.
        """
        batch, rows = self._input_batch, self._rows(output, bucket)
        num_logits = len(logits_rows.rows)
        assert num_logits <= bucket.num_logits, f"{num_logits} logits rows do not fit into bucket {bucket}"
        fields, size = layout(bucket, self._options)
        packed = np.zeros(size, np.int32)
        view = views(packed, fields)
        self._fill_tokens(view, rows)
        self._fill_slots(view, rows)
        changes, field = batch.take_table_changes(), view["table_changes"]
        num_before = max(0, changes.shape[1] - field.shape[1])
        field[:, : changes.shape[1] - num_before] = changes[:, num_before:]
        field[:, changes.shape[1] - num_before :] = batch.block_tables.size
        num_saved_reads, shared = 0, self._shared_prefixes
        if shared is not None and len(rows.batch_slots) >= shared.min_rows:
            shared_blocks = view["shared_blocks"][: len(rows.batch_slots)]
            num_saved_reads = shared.fill(shared_blocks, rows.batch_slots, rows.start, rows.num_tokens)
        sample_slots = self._fill_sampling(view, rows, logits_rows, output)
        if len(logits_rows.samples) != len(output.samples):
            self._check_penalties(sample_slots, bucket)
        embeds = None
        if self._features is not None:
            embeds = self._features.fill(view, rows, logits_rows, sample_slots, output, bucket)
        if self._checks_inputs:
            self._check(view, output)
        sample_positions = view["sample_positions"][: len(sample_slots)]
        bias_ids, bias_values = self._bias(sample_slots, bucket)
        is_masked = view["sampling"][:, MASK_COLUMN]
        return StepInputs(
            packed=packed,
            bias_ids=bias_ids,
            bias_values=bias_values,
            token_mask=self._token_mask(sample_slots, sample_positions, output.token_masks, is_masked),
            changes_before_step=changes[:, :num_before],
            num_saved_reads=num_saved_reads,
            embeds=embeds,
            fields=view,
        )

    def empty_sampling_inputs(self, num_logits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns bias_ids, bias_values and token_mask that have no effect.

        They are the inputs of steps without biases and masks.
        """
        return (
            np.full((num_logits, MAX_BIAS_IDS), self._vocab_size, np.int32),
            np.zeros((num_logits, MAX_BIAS_IDS), np.float32),
            np.full((num_logits, self._num_mask_words), -1, np.int32),
        )

    def _rows(self, output: SchedulerOutput, bucket: Bucket) -> ScheduledRows:
        """Returns the scheduled sequences and token rows of a step."""
        n, total = len(output.scheduled), output.num_batched_tokens
        assert n <= bucket.num_seqs, f"{n} sequences do not fit into bucket {bucket}"
        assert total <= bucket.num_tokens, f"{total} tokens do not fit into bucket {bucket}"
        seq_ids, starts, token_ids, *_ = zip(*output.scheduled, strict=True)
        batch_slots = self._input_batch.slots_of(seq_ids)
        num_tokens = np.fromiter(map(len, token_ids), np.int32, n)
        start = np.fromiter(starts, np.int32, n)
        end_loc = np.cumsum(num_tokens, dtype=np.int32)
        assert end_loc[-1] == total, f"sequences have {end_loc[-1]} tokens, num_batched_tokens is {total}"
        if bucket.is_decode:
            assert total == n, "a sequence has several tokens in a decode step"
            token_batch_slots, positions = batch_slots, start
        else:
            row_of_token = np.repeat(np.arange(n), num_tokens)
            token_batch_slots = batch_slots[row_of_token]
            positions = np.arange(total, dtype=np.int32) + (start - end_loc + num_tokens)[row_of_token]
        tokens = np.fromiter(itertools.chain.from_iterable(token_ids), np.int32, total)
        return ScheduledRows(batch_slots, start, num_tokens, end_loc, token_batch_slots, positions, tokens)

    def _fill_tokens(self, view: dict[str, np.ndarray], rows: ScheduledRows) -> None:
        """Fills the fields tokens, positions, query_start_loc and batch_slots."""
        n, total = len(rows.batch_slots), len(rows.tokens)
        view["tokens"][:total] = rows.tokens
        view["positions"][:total] = rows.positions
        view["query_start_loc"][1 : n + 1] = rows.end_loc
        view["query_start_loc"][n + 1 :] = total
        view["batch_slots"][:n] = rows.batch_slots
        view["batch_slots"][n:] = self._input_batch.num_batch_slots

    def _fill_slots(self, view: dict[str, np.ndarray], rows: ScheduledRows) -> None:
        """Fills the fields slot_mapping and context_lens, for cache groups with self-attention."""
        batch, batch_slots, size = self._input_batch, rows.batch_slots, self._block_size
        n, total, stop = len(batch_slots), len(rows.positions), rows.stop
        table_slots = rows.positions - batch.num_dropped[rows.token_batch_slots]
        view["slot_mapping"][:] = self._num_blocks * size
        for g, group in enumerate(self._groups):
            if not group.is_cross:
                blocks = batch.block_tables[g][rows.token_batch_slots, table_slots // size]
                assert blocks.min() > 0, "a token would be written to the null block"
                view["slot_mapping"][g, :total] = blocks * size + table_slots % size
                view["context_lens"][g, :n] = stop - batch.num_dropped[batch_slots]

    def _fill_sampling(
        self,
        view: dict[str, np.ndarray],
        rows: ScheduledRows,
        logits_rows: LogitsRows,
        output: SchedulerOutput,
    ) -> np.ndarray:
        """Fills the fields of logits rows; returns the batch slots of the rows that draw a token."""
        batch, num_drawn = self._input_batch, len(logits_rows.samples)
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

    def _check_penalties(self, sample_slots: np.ndarray, bucket: Bucket) -> None:
        """Asserts that no sequence with penalties has several logits rows, except in buckets for drafts.

        The programs of buckets for drafts count the drafts before each logits row.
        """
        if bucket.num_drafts:
            return
        count_slots = self._input_batch.count_slots[sample_slots]
        counted = count_slots[count_slots < self._input_batch.num_batch_slots]
        assert len(np.unique(counted)) == len(counted), (
            "a sequence with penalties has several logits rows, but tokens drawn from earlier rows are not "
            "counted yet"
        )

    def _fill_forced(self, forced: np.ndarray, batch_slots: np.ndarray, positions: np.ndarray) -> None:
        forced[:] = -1
        by_slot = self._input_batch.forced_tokens
        for j, batch_slot in enumerate(batch_slots.tolist() if by_slot else ()):
            if batch_slot in by_slot:
                prompt_len, token_ids = by_slot[batch_slot]
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
            assert len(bias) <= MAX_BIAS_IDS, f"a sequence has {len(bias)} biases, more than MAX_BIAS_IDS"
            ids[j, : len(bias)] = list(bias)
            values[j, : len(bias)] = list(bias.values())
        return ids, values

    def _token_mask(
        self, batch_slots: np.ndarray, positions: np.ndarray, masks: TokenMasks | None, is_masked: np.ndarray
    ) -> np.ndarray | None:
        """Returns the token masks of a step, or None if no row has a mask.

        Args:
            batch_slots: Batch slots of the logits rows from which tokens are drawn.
            positions: Positions of the drawn tokens.
            masks: Masks from the scheduler, for structured output; None for none.
            is_masked: View of the column MASK_COLUMN of all logits rows. For rows with a mask, this method
                writes 1, or MASK_KEEPS_DRAW if the mask is for structured output.
        """
        by_slot = self._input_batch.token_rules
        drawn = enumerate(zip(batch_slots.tolist(), positions.tolist(), strict=True)) if by_slot else ()
        rule_masks = (
            (j, by_slot[batch_slot].mask_at(position))
            for j, (batch_slot, position) in drawn
            if batch_slot in by_slot
        )
        masked = [(j, mask) for j, mask in rule_masks if mask is not None]
        if not masked and masks is None:
            return None
        out = np.full((len(is_masked), self._num_mask_words), -1, np.int32)
        for j, mask in masked:
            out[j], is_masked[j] = mask, 1
        if masks is not None:
            rows, words = list(masks.rows), np.frombuffer(masks.words, "<i4")
            out[rows] &= words.reshape(len(rows), -1)[:, : self._num_mask_words]
            is_masked[rows] = MASK_KEEPS_DRAW
        return out
