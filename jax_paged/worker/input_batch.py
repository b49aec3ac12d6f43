"""Host-side state of every sequence that holds blocks on the device, by batch slot.

A sequence takes a batch slot in the step that contains its NewSequence, and keeps it until it is released.
Later steps contain only changes of the sequence. The batch builder gathers the inputs of a step from the
batch slots.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_paged.core.scheduler_output import MAX_END_TOKENS, NewSequence, ScheduledSequence, SchedulerOutput
from jax_paged.sampling_params import SamplingParams
from jax_paged.worker.packed_buffer import NUM_SAMPLING_COLUMNS, pack_sampling
from jax_paged.worker.sampling.token_rules import KnownTokens, TokenRules

if TYPE_CHECKING:
    from jax_paged.worker.features.feature_rows import FeatureRows


class TokenCountReset(NamedTuple):
    """A sequence with penalties that has taken a batch slot and whose token counts must be initialized."""

    batch_slot: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]


class InputBatch:
    """Owner of the host-side state of the batch slots.

    The attributes are indexed by batch slot and must not be changed from outside. They are arrays with an
    entry per batch slot, or dictionaries that have an entry only for sequences that need one.

    Args:
        max_num_seqs: Number of batch slots, S.
        num_groups: Number of cache groups, G.
        max_blocks_per_seq: Number of block table columns, M.
        num_blocks: Number of blocks of the KV cache.
        vocab_size: Number of tokens that a token mask covers.
        features: Per-sequence state of features.
        is_cross: For each cache group, whether its layers attend to an encoder's output; None if no group
            does.

    Attributes:
        block_tables: int32 [G, S, M], padded with the null block 0.
        num_table_blocks: int32 [G, S], number of blocks in each table.
        num_dropped: int32 [S], number of tokens whose blocks the user has dropped (`drop_kv`). A token at
            position p uses slot p - num_dropped of its block table.
        sampling: int32 [S, NUM_SAMPLING_COLUMNS], rows of the packed buffer's field `sampling`.
        end_tokens: int32 [S, MAX_END_TOKENS], padded with -1. Only the first MAX_END_TOKENS end tokens of a
            sequence.
        count_slots: int32 [S], the batch slot itself if its sequence has penalties, else S.
        num_top_logprobs: int32 [S], number of most likely tokens to report; -1 for no log-probabilities.
        token_rules: Biases and forbidden tokens, for sequences that have any.
        known_tokens: The tokens so far, for sequences with bad words or logits processors.
        forced_tokens: (prompt length, forced_token_ids), for sequences of requests with forced_token_ids.
        prompts: (prompt, number of most likely tokens to report), for sequences with prompt
            log-probabilities.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_groups: int,
        max_blocks_per_seq: int,
        num_blocks: int,
        vocab_size: int,
        features: "FeatureRows",
        is_cross: Sequence[bool] | None = None,
    ) -> None:
        self.features = features
        self.is_cross = tuple(is_cross or [False] * num_groups)
        self._num_blocks, self._vocab_size = num_blocks, vocab_size
        self._batch_slots: dict[int, int] = {}
        self._free = list(reversed(range(max_num_seqs)))
        assert num_groups * max_num_seqs * max_blocks_per_seq < 2**31, "the block tables exceed int32 indices"
        self._changed_entries: list[int] = []
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks_per_seq), np.int32)
        self.num_table_blocks = np.zeros((num_groups, max_num_seqs), np.int32)
        self.num_dropped = np.zeros(max_num_seqs, np.int32)
        self.sampling = np.zeros((max_num_seqs, NUM_SAMPLING_COLUMNS), np.int32)
        self.end_tokens = np.full((max_num_seqs, MAX_END_TOKENS), -1, np.int32)
        self.count_slots = np.full(max_num_seqs, max_num_seqs, np.int32)
        self.num_top_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.token_rules: dict[int, TokenRules] = {}
        self.known_tokens: dict[int, KnownTokens] = {}
        self.forced_tokens: dict[int, tuple[int, list[int]]] = {}
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self._by_slot: tuple[dict[int, Any], ...] = (
            self.token_rules,
            self.known_tokens,
            self.prompts,
            self.forced_tokens,
        )

    @property
    def num_batch_slots(self) -> int:
        """The number of batch slots, S."""
        return len(self.count_slots)

    def slots_of(self, seq_ids: Iterable[int]) -> np.ndarray:
        """Returns the batch slots of sequences, int64."""
        return np.array([self._batch_slots[seq_id] for seq_id in seq_ids], np.int64)

    def update(self, output: SchedulerOutput) -> list[TokenCountReset]:
        """Applies a step: frees and assigns batch slots, and updates block tables and known tokens.

        Args:
            output: The step. Step 0 is the first step of a scheduler. It frees all batch slots first, because
                another scheduler may have used them before.

        Returns:
            The sequences whose token counts must be initialized before the step runs.
        """
        if output.step_id == 0:
            for seq_id in list(self._batch_slots):
                self._release(seq_id)
        for seq_id in output.released_seq_ids:
            self._release(seq_id)
        resets = [reset for new in output.new_sequences if (reset := self._take_slot(new)) is not None]
        for row in output.scheduled:
            if any(row.new_blocks) or row.replaced_blocks:
                self._change_tables(row)
        if self.known_tokens:
            for row in output.scheduled:
                if (tokens := self.known_tokens.get(self._batch_slots[row.seq_id])) is not None:
                    tokens.record(row.start, row.token_ids)
        return resets

    def take_table_changes(self) -> np.ndarray:
        """Returns the block table entries that have changed since the last call.

        Returns:
            int32 [2, n]: the flattened index of each changed entry (see block_tables.py), without duplicates,
            and its current block id.
        """
        indices = np.array(sorted(set(self._changed_entries)), np.int32)
        self._changed_entries.clear()
        return np.stack([indices, self.block_tables.reshape(-1)[indices]])

    def check_integrity(self) -> None:
        """Asserts that every batch slot is either free and empty or taken by exactly one sequence."""
        taken = sorted(self._batch_slots.values())
        assert sorted([*taken, *self._free]) == list(range(self.num_batch_slots)), (
            "a batch slot is neither free nor taken, or is taken twice"
        )
        free = np.array(self._free, np.int64)
        assert not self.num_table_blocks[:, free].any(), "a free batch slot has blocks"
        assert (self.count_slots[free] == self.num_batch_slots).all(), "a free batch slot has penalties"
        columns = np.arange(self.block_tables.shape[2])
        is_padding = columns >= self.num_table_blocks[:, :, None]
        assert not self.block_tables[is_padding].any(), "a block table contains a block after its end"
        assert (self.block_tables >= 0).all(), "a block id is negative"
        assert (self.block_tables < self._num_blocks).all(), "a block id is not below the number of blocks"
        for by_slot in self._by_slot:
            assert by_slot.keys() <= set(taken), "a free batch slot has request state"
        self.features.check_integrity(set(taken))

    def _release(self, seq_id: int) -> None:
        assert seq_id in self._batch_slots, f"released sequence {seq_id} has no batch slot"
        batch_slot = self._batch_slots.pop(seq_id)
        for g, n in enumerate(self.num_table_blocks[:, batch_slot].tolist()):
            self.block_tables[g, batch_slot, :n] = 0
        self.num_table_blocks[:, batch_slot] = 0
        self.count_slots[batch_slot] = self.num_batch_slots
        if seq_id in self.features.slots:
            self.features.release(seq_id)
        for by_slot in self._by_slot:
            by_slot.pop(batch_slot, None)
        self._free.append(batch_slot)

    def _take_slot(self, new: NewSequence) -> TokenCountReset | None:
        assert new.seq_id not in self._batch_slots, f"new sequence {new.seq_id} already has a batch slot"
        assert self._free, f"more than {self.num_batch_slots} sequences (max_num_seqs) need a batch slot"
        batch_slot = self._batch_slots[new.seq_id] = self._free.pop()
        for g, table in enumerate(new.block_tables):
            self._write(g, batch_slot, 0, table)
        request, params = new.request, new.request.sampling_params
        self.num_dropped[batch_slot] = new.num_dropped_tokens
        self.num_top_logprobs[batch_slot] = -1 if params.logprobs is None else params.logprobs
        self.sampling[batch_slot] = pack_sampling(
            params,
            seed=new.seed,
            wants_logprobs=params.logprobs is not None,
            logprob_temperature=1.0 if request.features is None else request.features.logprob_temperature,
        )
        end_token_ids = sorted(new.end_token_ids)[:MAX_END_TOKENS]
        self.end_tokens[batch_slot] = end_token_ids + [-1] * (MAX_END_TOKENS - len(end_token_ids))
        if params.has_token_rules or params.logits_processors:
            self._add_token_rules(batch_slot, new)
        if not request.is_plain:
            self.features.add(batch_slot, new)
        if params.forced_token_ids is not None:
            self.forced_tokens[batch_slot] = len(request.prompt_token_ids), params.forced_token_ids
        if params.prompt_logprobs is not None:
            self.prompts[batch_slot] = request.prompt_token_ids, params.prompt_logprobs
        if not has_penalty(params):
            return None
        self.count_slots[batch_slot] = batch_slot
        return TokenCountReset(batch_slot, request.prompt_token_ids, new.output_token_ids)

    def _add_token_rules(self, batch_slot: int, new: NewSequence) -> None:
        params, tokens = new.request.sampling_params, KnownTokens(new)
        if params.bad_words_token_ids or params.logits_processors:
            self.known_tokens[batch_slot] = tokens
        if params.has_token_rules:
            self.token_rules[batch_slot] = TokenRules(new, tokens, self._vocab_size)

    def _change_tables(self, row: ScheduledSequence) -> None:
        batch_slot = self._batch_slots[row.seq_id]
        for g, blocks in enumerate(row.new_blocks):
            if blocks:
                self._write(g, batch_slot, int(self.num_table_blocks[g, batch_slot]), blocks)
        for g, index, block in row.replaced_blocks:
            assert index < self.num_table_blocks[g, batch_slot], f"entry {index} is past the end of its table"
            assert 0 <= block < self._num_blocks, f"block {block} is not in [0, {self._num_blocks})"
            self.block_tables[g, batch_slot, index] = block
            self._changed_entries.append(self._table_index(g, batch_slot, index))

    def _table_index(self, g: int, batch_slot: int, column: int) -> int:
        _, num_batch_slots, num_columns = self.block_tables.shape
        return (g * num_batch_slots + batch_slot) * num_columns + column

    def _write(self, g: int, batch_slot: int, first: int, blocks: list[int]) -> None:
        """Writes blocks into a table from column `first` on; the table ends after them."""
        if not blocks:
            return
        lowest, highest = min(blocks), max(blocks)
        ok = lowest >= 0 and highest < self._num_blocks
        assert ok, f"blocks {lowest} to {highest} are not all in [0, {self._num_blocks})"
        stop = first + len(blocks)
        assert stop <= self.block_tables.shape[2], f"a block table has no room for {stop} blocks"
        self.block_tables[g, batch_slot, first:stop] = blocks
        index = self._table_index(g, batch_slot, first)
        self._changed_entries.extend(range(index, index + len(blocks)))
        self.num_table_blocks[g, batch_slot] = stop


def has_penalty(params: SamplingParams) -> bool:
    """Returns whether the sampling parameters contain a penalty that depends on token counts."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
