"""A device in miniature that knows steps by their values alone, and runs them in order, as late as it may.

Its cells hold what keys and values depend on, as toy_device.py's do; but whose they are it learns from the
steps, as a real worker would, and a token that the host does not know yet is the one that it has drawn last.
In a burst it goes on by itself, until a token ends the sequence. Drafts that the host does not know are its
own, and most of them right.
"""

import random
from collections.abc import Callable

from helpers.toy_device import VOCAB_SIZE, chain_of, extend, next_token, top_logprobs

from jax_paged.core.kv_cache.block_pool import NULL_BLOCK
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.model_runner_output import NO_TOKEN, TokenLogprobs
from jax_paged.core.scheduler_output import BlockTables, NewSequence, SchedulerOutput
from jax_paged.sampling_params import SamplingParams


class ValueDevice:
    """Runs steps.

    Args:
        num_blocks: Of the pool.
        num_swap_blocks: Of host memory.
        block_size: Tokens per block.
        groups: Cache groups.
        root_of: What stands before the first token of a request, by its id; see toy_device.root.
        num_state_slots: Slots for states, on the device and in host memory.
    """

    def __init__(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        groups: tuple[CacheGroup, ...],
        root_of: Callable[[str], int],
        num_state_slots: tuple[int, int] = (0, 0),
    ) -> None:
        # By slot, all tokens that a state has seen; and the slot of each sequence.
        self.states, self.host_states = ([0] * n for n in num_state_slots)
        self.slots: dict[int, int] = {}
        self.groups, self.size, self.root_of = groups, block_size, root_of
        self.cells = [[0] * block_size for _ in range(num_blocks)]
        self.host = [[0] * block_size for _ in range(num_swap_blocks)]
        self.sequences: dict[int, NewSequence] = {}
        self.tables: dict[int, BlockTables] = {}
        self.texts: dict[int, list[int]] = {}
        self.num_unknown = 0
        self.num_bursts = 0
        self.drafts: list[list[int]] = []  # of the last step, by sample; empty if the host has made them
        self._rng = random.Random(0)

    def params_of(self, seq_id: int) -> SamplingParams:
        return self.sequences[seq_id].request.sampling_params

    def execute(self, output: SchedulerOutput) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
        """Runs a step; returns the tokens of its samples, and what a beam search needs to know of them."""
        if output.step_id == 0:
            self.sequences, self.tables, self.texts = {}, {}, {}
        for seq_id in output.released_seq_ids:
            del self.sequences[seq_id], self.tables[seq_id], self.texts[seq_id]
        for new in output.new_sequences:
            assert new.seq_id not in self.sequences
            self.sequences[new.seq_id] = new
            self.tables[new.seq_id] = [list(table) for table in new.block_tables]
            self.texts[new.seq_id] = [*new.request.prompt_token_ids, *new.output_token_ids]
        for pairs, source, target in (
            (output.blocks_to_swap_out, self.cells, self.host),
            (output.blocks_to_swap_in, self.host, self.cells),
            (output.blocks_to_copy, self.cells, self.cells),
        ):
            moved = [list(source[block]) for block, _ in pairs]
            for (_, block), values in zip(pairs, moved, strict=True):
                target[block] = values
        for pairs, source, target in (
            (output.state_moves.swap_out, self.states, self.host_states),
            (output.state_moves.swap_in, self.host_states, self.states),
            (output.state_moves.copies, self.states, self.states),
        ):
            moved = [source[slot] for slot, _ in pairs]
            for (_, slot), value in zip(pairs, moved, strict=True):
                target[slot] = value
        for text in output.encoder_inputs:
            for g in self._cross():
                for position in range(len(text.token_ids)):
                    value = hash((g, position, *text.token_ids))
                    self.cells[text.block_tables[g][position // self.size]][position % self.size] = value
        num_drafts = {sample.seq_id: sample.num_logits - 1 for sample in output.samples}
        drafted: dict[int, list[int]] = {}
        self.drafts = []
        burst = dict(
            zip([sample.seq_id for sample in output.samples], output.num_multi_step_tokens, strict=False)
        )
        for seq_id, start, token_ids, new_blocks, replaced, slot, (num_before, kept) in output.scheduled:
            self.slots[seq_id] = slot
            tables, text = self.tables[seq_id], self.texts[seq_id]
            for table, blocks in zip(tables, new_blocks, strict=False):
                table.extend(blocks)
            for g, index, block in replaced:
                tables[g][index] = block
            if n := num_drafts.get(seq_id, 0):
                drafted[seq_id], token_ids = token_ids[-n:], token_ids[:-n]
            if token_ids[-1] == NO_TOKEN:
                self.num_unknown += 1
                if self._has_ended(seq_id):
                    assert start >= len(text) - 1
                    self._spoil(seq_id, range(start, start + (burst.get(seq_id, 1))))
                    for spoilt in {slot, kept} if self.states else ():
                        self.states[spoilt] = -1
                    continue
                assert start == len(text) - 1, "the token that was drawn last is computed next"
                token_ids = text[-1:]
            elif self.params_of(seq_id).logprobs:  # of a beam search: the host has chosen
                text[start:] = token_ids
            assert text[start : start + len(token_ids)] == token_ids
            self._write(seq_id, start, start + len(token_ids))
            self._advance(seq_id, start, start + len(token_ids))
            if kept:
                self.states[kept] = self._chain(seq_id, start + num_before - 1)
            if NO_TOKEN in drafted.get(seq_id, []):
                drafted[seq_id] = self._guess(seq_id, n)
            self._write_drafts(seq_id, drafted.get(seq_id, []))
        for seq_id, start, token_ids, *_ in output.scheduled:
            if not self._has_ended(seq_id):
                self._check(seq_id, start, start + len(token_ids) - num_drafts.get(seq_id, 0))
        if output.num_multi_step_tokens:
            assert [row.seq_id for row in output.scheduled] == list(burst)
            tokens = [
                self._burst(row.seq_id, n)
                for row, n in zip(output.scheduled, output.num_multi_step_tokens, strict=True)
            ]
            self.num_bursts += 1
            return tokens, [[TokenLogprobs(0.0, 0, [], [])] * len(drawn) for drawn in tokens]
        tokens, logprobs = [], []
        for sample in output.samples:
            row, new = output.scheduled[sample.scheduled_index], self.sequences[sample.seq_id]
            stop = row.start + row.num_tokens - num_drafts[sample.seq_id]
            if self._has_ended(sample.seq_id):
                tokens.append(0)  # is dropped
                logprobs.append(TokenLogprobs(0.0, 0, [], []))
                continue
            chain = self._chain(row.seq_id, stop - 1)
            tokens.append(next_token(chain, new.seed))
            params = new.request.sampling_params
            top = top_logprobs(chain, params.logprobs) if params.logprobs else ([], [])
            logprobs.append(TokenLogprobs(0.0, 0, *top))
            assert len(self.texts[sample.seq_id]) == stop, "a token is drawn after the last one"
            self.texts[sample.seq_id].append(tokens[-1])
        if drafted:
            self.drafts = [drafted.get(sample.seq_id, []) for sample in output.samples]
        every = [[token_id] for token_id in tokens]
        for drawn, sample in zip(every, output.samples, strict=True):
            if sample.seq_id in drafted:
                self._verify(sample.seq_id, drafted[sample.seq_id], drawn)
        return every, [[entry] * len(drawn) for entry, drawn in zip(logprobs, every, strict=True)]

    def _guess(self, seq_id: int, num_drafts: int) -> list[int]:
        """Returns drafts of what is drawn next, most of them right."""
        text, seed, drafts = self.texts[seq_id], self.sequences[seq_id].seed, []
        chain = self._chain(seq_id, len(text) - 1)
        for _ in range(num_drafts):
            right = next_token(chain, seed)
            drafts.append(right if self._rng.random() < 0.8 else (right + 1) % VOCAB_SIZE)
            chain = extend(chain, drafts[-1])
        return drafts

    def _write_drafts(self, seq_id: int, drafts: list[int]) -> None:
        """Writes what drafts leave in the slots behind the last token."""
        text = self.texts[seq_id]
        text.extend(drafts)
        self._write(seq_id, len(text) - len(drafts), len(text))
        del text[len(text) - len(drafts) :]

    def _verify(self, seq_id: int, drafts: list[int], drawn: list[int]) -> None:
        """Draws behind every draft; the text gets the tokens up to the first that is not its draft."""
        text, seed = self.texts[seq_id], self.sequences[seq_id].seed
        chain = self._chain(seq_id, len(text) - 2)
        is_right = True
        for draft in drafts:
            is_right &= draft == drawn[-1] and not self._has_ended(seq_id)
            chain = extend(chain, draft)
            drawn.append(next_token(chain, seed))
            if is_right:
                text.append(drawn[-1])

    def _burst(self, seq_id: int, num_tokens: int) -> list[int]:
        """Draws tokens until one ends the sequence; the first one's input is computed already."""
        drawn, text, new = [], self.texts[seq_id], self.sequences[seq_id]
        assert num_tokens > 0
        while len(drawn) < num_tokens and not self._has_ended(seq_id):
            if drawn:
                self._write(seq_id, len(text) - 1, len(text))
                self._advance(seq_id, len(text) - 1, len(text))
                self._check(seq_id, len(text) - 1, len(text))
            drawn.append(next_token(self._chain(seq_id, len(text) - 1), new.seed))
            text.append(drawn[-1])
        return drawn

    def _has_ended(self, seq_id: int) -> bool:
        """Whether an end token was drawn last: it is forbidden before min_tokens, but this model draws it."""
        new, text = self.sequences[seq_id], self.texts[seq_id]
        num_output_tokens = len(text) - len(new.request.prompt_token_ids)
        is_due = num_output_tokens >= max(1, new.request.sampling_params.min_tokens)
        return is_due and text[-1] in new.end_token_ids

    def _spoil(self, seq_id: int, positions: range) -> None:
        """Writes garbage to slots of a sequence that has ended: nobody may read them any more."""
        for group, table in zip(self.groups, self.tables[seq_id], strict=True):
            for position in positions if not group.is_cross else ():
                self.cells[table[position // self.size]][position % self.size] = -1

    def spoil(self, is_free: Callable[[int], bool], rng: random.Random) -> None:
        """Writes garbage to blocks that nobody may read."""
        for block, cells in enumerate(self.cells):
            if is_free(block):
                cells[:] = [rng.random() for _ in cells]

    def _cross(self) -> list[int]:
        return [g for g, group in enumerate(self.groups) if group.is_cross]

    def _chain(self, seq_id: int, position: int) -> int:
        root = self.root_of(self.sequences[seq_id].request.request_id)
        return chain_of(root, self.texts[seq_id][: position + 1])

    def _write(self, seq_id: int, start: int, stop: int) -> None:
        chain = self._chain(seq_id, start - 1)
        for position in range(start, stop):
            chain = extend(chain, self.texts[seq_id][position])
            for g, table in enumerate(self.tables[seq_id]):
                if not self.groups[g].is_cross:
                    block = table[position // self.size]
                    assert block != NULL_BLOCK
                    self.cells[block][position % self.size] = hash((g, chain))

    def _advance(self, seq_id: int, start: int, stop: int) -> None:
        if self.states:
            slot = self.slots[seq_id]
            assert slot > 0
            assert not start or self.states[slot] == self._chain(seq_id, start - 1), f"no state at {start}"
            self.states[slot] = self._chain(seq_id, stop - 1)

    def _check(self, seq_id: int, start: int, stop: int) -> None:
        """Asserts that the tokens at [start, stop) find all that they attend to."""
        chain, chains = self.root_of(self.sequences[seq_id].request.request_id), []
        for token_id in self.texts[seq_id][:stop]:
            chain = extend(chain, token_id)
            chains.append(chain)
        for g, (group, table) in enumerate(zip(self.groups, self.tables[seq_id], strict=True)):
            if group.is_cross:
                continue
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, stop):
                found = self.cells[table[position // self.size]][position % self.size]
                assert found == hash((g, chains[position])), f"position {position} of {stop}, group {g}"
