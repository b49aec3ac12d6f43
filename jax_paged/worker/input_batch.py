"""What the host keeps of every sequence that holds blocks on the device, by batch slot.

A sequence takes a batch slot with its NewSequence and keeps it until it is released. Steps then say only what
has changed, and the builder gathers the rows of a step from the batch slots.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jax_paged.core.scheduler_output import MAX_END_TOKENS, NewSequence, ScheduledSequence, SchedulerOutput
from jax_paged.core.sequence import StandIn
from jax_paged.sampling_params import LogitsFunction, SamplingParams
from jax_paged.worker.packed_buffer import NUM_SAMPLING_COLUMNS, pack_sampling
from jax_paged.worker.sampling.token_rules import KnownTokens, TokenRules


class TokenCountReset(NamedTuple):
    """A sequence with penalties that has taken a batch slot: its token counts have to be written."""

    batch_slot: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]


class SlotChanges(NamedTuple):
    """What a step changes in the batch slots, for arrays that the device keeps by batch slot.

    Args:
        resets: The sequences whose token counts have to be written before the step runs.
        released_processors: Sequences with logits processors that the step releases: their ids, and the
            batch slots that they had.
    """

    resets: list[TokenCountReset]
    released_processors: list[tuple[int, int]]


class InputBatch:
    """Owns the per-sequence state of the host.

    Args:
        max_num_seqs: Batch slots, S.
        num_groups: Cache groups, G.
        max_blocks_per_seq: Columns of block tables, M.
        num_blocks: Blocks of the pool.
        vocab_size: Tokens of a mask.
        hooks: How many numbers each hook of the model takes, by name.
        processors: How many numbers each logits processor takes, by name.
        is_cross: Whether the layers of each cache group attend to an encoder's output; None for none.
        mrope_positions: Returns the rotary positions of a prompt with images; None if they are those of text.

    Attributes (indexed by batch slot; not to be changed from outside):
        block_tables: int32 [G, S, M], padded with the null block.
        num_table_blocks: int32 [G, S], how many entries of each table are a sequence's.
        num_encoder_tokens: int32 [S], tokens that groups of cross attention hold.
        num_dropped: int32 [S], by how much slots stand before positions: tokens of dropped blocks.
        sampling: int32 [S, 12], the field of the same name of the packed buffer.
        end_tokens: int32 [S, MAX_END_TOKENS], padded with -1; of sequences with more of them, not all.
        count_slots: int32 [S], the batch slot itself where a sequence has penalties, S elsewhere.
        num_top_logprobs: int32 [S], how many most likely tokens to report; -1 for no log-probabilities.
        token_rules: The sequences of which some tokens get a bias, or are forbidden.
        known_tokens: Of sequences whose tokens the host has to know, as bad words do.
        functions: Of sequences with logits processors in Python.
        forced_tokens: Of sequences whose output is given, the length of the prompt, and the output.
        hooks_on: The names of the hooks of each sequence, by its id.
        hook_args: float32 [S, A], whether each hook is on, and its arguments.
        processor_args: float32 [S, P], whether each logits processor is on, and its arguments.
        adapter_slots: int32 [S], the slot of each sequence's adapter, 0 for none.
        embeds: Of the sequences whose prompts have vectors, by the position of the first of each run of
            them, in order: float32 [tokens, E]. Those of stand-ins come when a step first needs them.
        stand_ins: Of the sequences whose prompts have some, these.
        mrope: Of those of a model with M-RoPE, the rotary positions up to the end of the last image.
        mrope_stops: int32 [S], how many these are; 0 of other sequences.
        mrope_offsets: int32 [S], how far the rotary positions behind them stand from those in the text.
        new_slots: Batch slots of sequences with logits processors that nothing was drawn for yet.
        pooling: Of the sequences whose prompt is pooled, SamplingParams.pooling and the prompt's length.
        prompts: Of the sequences whose prompt gets log-probabilities, the prompt and how many most likely
            tokens to report.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_groups: int,
        max_blocks_per_seq: int,
        num_blocks: int,
        vocab_size: int,
        hooks: Mapping[str, int] = MappingProxyType({}),
        processors: Mapping[str, int] = MappingProxyType({}),
        is_cross: Sequence[bool] | None = None,
        mrope_positions: Callable[[tuple[StandIn, ...]], tuple[np.ndarray, int]] | None = None,
    ) -> None:
        self._hooks, self.processors = hooks, processors
        self.is_cross = tuple(is_cross or [False] * num_groups)
        self._mrope_positions = mrope_positions
        self.hooks_on: dict[int, frozenset[str]] = {}
        self._num_blocks, self._vocab_size = num_blocks, vocab_size
        self._batch_slots: dict[int, int] = {}
        self._free = list(reversed(range(max_num_seqs)))
        assert num_groups * max_num_seqs * max_blocks_per_seq < 2**31, "places of block tables are int32"
        self._changed_places: list[int] = []
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks_per_seq), np.int32)
        self.num_table_blocks = np.zeros((num_groups, max_num_seqs), np.int32)
        self.num_encoder_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_dropped = np.zeros(max_num_seqs, np.int32)
        self.sampling = np.zeros((max_num_seqs, NUM_SAMPLING_COLUMNS), np.int32)
        self.end_tokens = np.full((max_num_seqs, MAX_END_TOKENS), -1, np.int32)
        self.count_slots = np.full(max_num_seqs, max_num_seqs, np.int32)
        self.num_top_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.token_rules: dict[int, TokenRules] = {}
        self.known_tokens: dict[int, KnownTokens] = {}
        self.functions: dict[int, list[LogitsFunction]] = {}
        self.forced_tokens: dict[int, tuple[int, list[int]]] = {}
        self.hook_args = np.zeros((max_num_seqs, sum(1 + n for n in hooks.values())), np.float32)
        self.processor_args = np.zeros((max_num_seqs, sum(1 + n for n in processors.values())), np.float32)
        self.adapter_slots = np.zeros(max_num_seqs, np.int32)
        self.embeds: dict[int, dict[int, np.ndarray]] = {}
        self.stand_ins: dict[int, tuple[StandIn, ...]] = {}
        self.mrope: dict[int, np.ndarray] = {}
        self.mrope_stops, self.mrope_offsets = np.zeros((2, max_num_seqs), np.int32)
        self.new_slots: set[int] = set()
        self.prompts: dict[int, tuple[list[int], int]] = {}
        self.pooling: dict[int, tuple[str, int]] = {}
        self._by_slot: tuple[dict[int, Any], ...] = (
            *(self.token_rules, self.known_tokens, self.functions),
            *(self.prompts, self.forced_tokens, self.pooling, self.embeds, self.stand_ins, self.mrope),
        )

    @property
    def num_batch_slots(self) -> int:
        """S."""
        return len(self.count_slots)

    def has_adapters(self, output: SchedulerOutput) -> bool:
        """Returns whether a row of a step has an adapter."""
        return bool(self.adapter_slots[self.slots_of(row.seq_id for row in output.scheduled)].any())

    def has_embeds(self, output: SchedulerOutput) -> bool:
        """Returns whether a step computes a token that is a vector."""
        if not self.embeds:
            return False
        found = ((row, self.embeds.get(self._batch_slots[row.seq_id])) for row in output.scheduled)
        return any(
            given is not None
            and row.start < (last := next(reversed(given))) + len(given[last])  # most rows are behind them
            and any(i < row.start + row.num_tokens and row.start < i + len(x) for i, x in given.items())
            for row, given in found
        )

    def missing_stand_ins(self, output: SchedulerOutput) -> list[tuple[int, StandIn]]:
        """Returns the images of a step that have no vectors yet, each with its batch slot."""
        missing: list[tuple[int, StandIn]] = []
        for row in output.scheduled if self.stand_ins else ():
            batch_slot = self._batch_slots[row.seq_id]
            own, known = self.stand_ins.get(batch_slot, ()), self.embeds.get(batch_slot, {})
            if own and row.start < own[-1].stop:  # most rows are behind them
                stop = row.start + row.num_tokens
                needed = (s for s in own if s.start < stop and row.start < s.stop)
                missing += [(batch_slot, s) for s in needed if s.start not in known]
        return missing

    def slots_of(self, seq_ids: Iterable[int]) -> np.ndarray:
        """Returns the batch slots of sequences, int64."""
        return np.array([self._batch_slots[seq_id] for seq_id in seq_ids], np.int64)

    def update(self, output: SchedulerOutput) -> SlotChanges:
        """Takes in a step: who leaves, who sits down, and what has changed of the rows' block tables.

        Args:
            output: The step. With step 0, the first of a scheduler, all batch slots are empty: another
                scheduler may have gone before.
        """
        if output.step_id == 0:
            for seq_id in list(self._batch_slots):
                self._release(seq_id)
        released: list[tuple[int, int]] = []
        for seq_id in output.released_seq_ids:
            batch_slot = self._release(seq_id)
            if self.processors and self.processor_args[batch_slot].any():
                released.append((seq_id, batch_slot))
        resets = [reset for new in output.new_sequences if (reset := self._take_slot(new)) is not None]
        for row in output.scheduled:
            if any(row.new_blocks) or row.replaced_blocks:
                self._change_tables(row)
        if self.known_tokens:
            for row in output.scheduled:
                if (tokens := self.known_tokens.get(self._batch_slots[row.seq_id])) is not None:
                    tokens.record(row.start, row.token_ids)
        return SlotChanges(resets, released)

    def take_table_changes(self) -> np.ndarray:
        """Returns what has changed in block tables since the last call.

        Returns:
            int32 [2, n]: places, each once (see block_tables.py), and the blocks that stand there now.
        """
        places = np.array(sorted(set(self._changed_places)), np.int32)
        self._changed_places.clear()
        return np.stack([places, self.block_tables.reshape(-1)[places]])

    def check_integrity(self) -> None:
        """Asserts that every batch slot is either free and empty, or one sequence's."""
        taken = sorted(self._batch_slots.values())
        assert sorted([*taken, *self._free]) == list(range(self.num_batch_slots)), (
            "a batch slot is lost or taken twice"
        )
        free = np.array(self._free, np.int64)
        assert not self.num_table_blocks[:, free].any(), "a free batch slot has blocks"
        assert (self.count_slots[free] == self.num_batch_slots).all(), "a free batch slot has penalties"
        columns = np.arange(self.block_tables.shape[2])
        is_padding = columns >= self.num_table_blocks[:, :, None]
        assert not self.block_tables[is_padding].any(), "a block stands behind the end of a table"
        assert (self.block_tables >= 0).all(), "a block id is negative"
        assert (self.block_tables < self._num_blocks).all(), "a block id is out of the pool"
        for batch_slots in self._by_slot:
            assert batch_slots.keys() <= set(taken), "a free batch slot has something"

    def _release(self, seq_id: int) -> int:
        assert seq_id in self._batch_slots, f"sequence {seq_id} has no batch slot to lose"
        batch_slot = self._batch_slots.pop(seq_id)
        del self.hooks_on[seq_id]
        for g, n in enumerate(self.num_table_blocks[:, batch_slot].tolist()):
            self.block_tables[g, batch_slot, :n] = 0
        self.num_table_blocks[:, batch_slot] = 0
        self.count_slots[batch_slot] = self.num_batch_slots
        self.adapter_slots[batch_slot] = self.mrope_stops[batch_slot] = self.mrope_offsets[batch_slot] = 0
        for batch_slots in self._by_slot:
            batch_slots.pop(batch_slot, None)
        self._free.append(batch_slot)
        return batch_slot

    def _take_slot(self, new: NewSequence) -> TokenCountReset | None:
        assert new.seq_id not in self._batch_slots, f"sequence {new.seq_id} has a batch slot"
        assert self._free, f"more sequences hold blocks than the {self.num_batch_slots} that can run together"
        batch_slot = self._batch_slots[new.seq_id] = self._free.pop()
        for g, table in enumerate(new.block_tables):
            self._write(g, batch_slot, 0, table)
        params = new.sampling_params
        self.num_encoder_tokens[batch_slot] = new.num_encoder_tokens
        self.num_dropped[batch_slot] = new.num_dropped_tokens
        self.num_top_logprobs[batch_slot] = -1 if new.num_top_logprobs is None else new.num_top_logprobs
        self.sampling[batch_slot] = pack_sampling(
            params,
            seed=new.seed,
            wants_logprobs=new.num_top_logprobs is not None,
            logprob_temperature=new.logprob_temperature,
        )
        end_token_ids = sorted(new.end_token_ids)[:MAX_END_TOKENS]
        self.end_tokens[batch_slot] = end_token_ids + [-1] * (MAX_END_TOKENS - len(end_token_ids))
        tokens = KnownTokens(new)
        if params.bad_words_token_ids or params.logits_processors:
            self.known_tokens[batch_slot] = tokens
        if params.logits_processors:
            self.functions[batch_slot] = params.logits_processors
        if TokenRules.are_needed(new):
            self.token_rules[batch_slot] = TokenRules(new, tokens, self._vocab_size)
        self.hooks_on[new.seq_id] = frozenset(params.hook_args or ())
        self.hook_args[batch_slot] = _row(self._hooks, params.hook_args or {})
        self.processor_args[batch_slot] = _row(self.processors, params.extra_args or {})
        self.new_slots.discard(batch_slot)
        if params.extra_args and not new.output_token_ids:
            self.new_slots.add(batch_slot)
        self.adapter_slots[batch_slot] = new.adapter_slot
        if new.prompt_embeds is not None:
            given = np.frombuffer(new.prompt_embeds.data, "<f4")
            self.embeds[batch_slot] = {0: given.reshape(new.prompt_embeds.num_tokens, -1)}
        if new.stand_ins:
            self.stand_ins[batch_slot] = new.stand_ins
        if new.stand_ins and self._mrope_positions is not None:
            self.mrope[batch_slot], self.mrope_offsets[batch_slot] = self._mrope_positions(new.stand_ins)
            self.mrope_stops[batch_slot] = self.mrope[batch_slot].shape[1]
        if params.forced_token_ids is not None:
            self.forced_tokens[batch_slot] = len(new.prompt_token_ids), params.forced_token_ids
        if params.pooling is not None:
            self.pooling[batch_slot] = params.pooling, len(new.prompt_token_ids)
        if params.prompt_logprobs is not None:
            self.prompts[batch_slot] = new.prompt_token_ids, params.prompt_logprobs
        if not has_penalty(params):
            return None
        self.count_slots[batch_slot] = batch_slot
        return TokenCountReset(batch_slot, new.prompt_token_ids, new.output_token_ids)

    def _change_tables(self, row: ScheduledSequence) -> None:
        batch_slot = self._batch_slots[row.seq_id]
        for g, blocks in enumerate(row.new_blocks):
            if blocks:
                self._write(g, batch_slot, int(self.num_table_blocks[g, batch_slot]), blocks)
        for g, index, block in row.replaced_blocks:
            assert index < self.num_table_blocks[g, batch_slot], f"entry {index} of a table is past its end"
            assert 0 <= block < self._num_blocks, f"block {block} is out of the pool of {self._num_blocks}"
            self.block_tables[g, batch_slot, index] = block
            self._changed_places.append(self._place(g, batch_slot, index))

    def _place(self, g: int, batch_slot: int, column: int) -> int:
        _, num_batch_slots, num_columns = self.block_tables.shape
        return (g * num_batch_slots + batch_slot) * num_columns + column

    def _write(self, g: int, batch_slot: int, first: int, blocks: list[int]) -> None:
        """Writes blocks to the end of a table."""
        if not blocks:
            return
        lowest, highest = min(blocks), max(blocks)
        ok = lowest >= 0 and highest < self._num_blocks
        assert ok, f"blocks {lowest} to {highest} are not all in the pool of {self._num_blocks}"
        stop = first + len(blocks)
        assert stop <= self.block_tables.shape[2], f"a table has {stop} blocks, more than a sequence can have"
        self.block_tables[g, batch_slot, first:stop] = blocks
        place = self._place(g, batch_slot, first)
        self._changed_places.extend(range(place, place + len(blocks)))
        self.num_table_blocks[g, batch_slot] = stop


def _row(functions: Mapping[str, int], args: dict[str, Any]) -> list[float]:
    """Returns which functions a request asks for, and with which numbers."""
    row: list[float] = []
    for name, num_args in functions.items():
        row += [1.0, *args[name]] if name in args else [0.0] * (1 + num_args)
    return row


def has_penalty(params: SamplingParams) -> bool:
    """Returns whether the choice of a token depends on how often it was chosen before."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
