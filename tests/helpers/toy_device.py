"""A device in miniature: cells instead of arrays, and a toy model whose output shows every wrong block.

A cell holds what keys and values depend on: the cache group, and all tokens up to the cell's own. Blocks that
nobody may read are wiped, so that nothing is right by luck.
"""

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Sequence as Items

from helpers.scheduling import TableMirror, found

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.kv_cache.block_pool import NULL_BLOCK
from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import BlockTables, ScheduledSequence, SchedulerOutput
from jax_paged.sampling_params import BeamSearchParams

VOCAB_SIZE = 15
EOS = 2


def root(salt: str, encoder_token_ids: Items[int] = ()) -> int:
    """What stands before the first token. Requests of other roots must not share."""
    return hash((*map(ord, salt), -1, *encoder_token_ids))


def extend(chain: int, token_id: int) -> int:
    """What a token's keys and values depend on: everything before it, and the token."""
    return hash((chain, token_id))


def chain_of(root: int, tokens: list[int]) -> int:
    for token_id in tokens:
        root = extend(root, token_id)
    return root


def next_token(chain: int, seed: int) -> int:
    """The toy model's draw: depends on the whole prefix and the sample's seed, EOS now and then."""
    return hash((chain, seed)) // 7 % VOCAB_SIZE


def top_logprobs(chain: int, num: int) -> tuple[list[int], list[float]]:
    """The toy model's most likely tokens and their log-probabilities, best first."""
    weights = [1 + hash((chain, token_id)) % 9973 for token_id in range(VOCAB_SIZE)]
    top = sorted(range(VOCAB_SIZE), key=lambda t: -weights[t])[:num]
    return top, [math.log(weights[t] / sum(weights)) for t in top]


def reference_sample(
    root: int, prompt: list[int], seed: int, max_tokens: int | None, min_tokens: int, max_len: int
) -> list[int]:
    """The output of one sample that is alone in the world."""
    chain, output = chain_of(root, prompt), []
    while True:
        output.append(next_token(chain, seed))
        chain = extend(chain, output[-1])
        stops = output[-1] == EOS and len(output) >= min_tokens
        if stops or len(output) == max_tokens or len(prompt) + len(output) >= max_len:
            return output


def reference_beams(
    root: int, prompt: list[int], params: BeamSearchParams, max_len: int
) -> list[tuple[list[int], float]]:
    """Outputs and log-probabilities of a plain beam search: no cache, no end before the last step.

    From each beam the 2 * beam_width most likely tokens are looked at, as vLLM does.
    """
    width, eos = params.beam_width, -1 if params.ignore_eos else EOS
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for _ in range(min(params.max_tokens, max_len - len(prompt))):
        every = []
        for output, logprob in beams:
            tops = top_logprobs(chain_of(root, prompt + output), 2 * width)
            every += [([*output, t], logprob + x) for t, x in zip(*tops, strict=True)]
        done += [beam for beam in every if beam[0][-1] == eos]
        beams = sorted((b for b in every if b[0][-1] != eos), key=lambda b: -b[1])[:width]

    def score(beam: tuple[list[int], float]) -> float:
        return beam[1] / (len(prompt) + len(beam[0]) - (beam[0][-1] == eos)) ** params.length_penalty

    return sorted(done + beams, key=score, reverse=True)[:width]


class ToyDevice:
    """Executes steps: swap out, swap in, copy, encode, write all rows, then read.

    Args:
        manager: Whose pools it stands for; is only looked at.
    """

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.size = manager.block_size
        self.cells = [[0] * self.size for _ in range(manager.pool.num_blocks)]
        self.host = [[0] * self.size for _ in range(manager.swap_pool.num_blocks)]
        # By slot, the tokens that a state has seen.
        self.states = [0] * manager.states.pool.num_blocks
        self.host_states = [0] * manager.states.swap_pool.num_blocks
        self.mirror = TableMirror()
        self._chains: weakref.WeakKeyDictionary[Sequence, list[int]] = weakref.WeakKeyDictionary()

    def chain(self, root: int, seq: Sequence, position: int) -> int:
        """What the token at a position depends on."""
        chains = self._chains.setdefault(seq, [])
        for token_id in seq.tokens(len(chains), position + 1):
            chains.append(extend(chains[-1] if chains else root, token_id))
            if seq.num_dropped_tokens:  # not what a text without gaps has
                chains[-1] = hash((chains[-1], seq.kept_block_indices))
        return chains[position]

    def forget(self, seq: Sequence, num_tokens: int) -> None:
        """Takes in that a sequence has only its first tokens left, or is another's fork there."""
        del self._chains.setdefault(seq, [])[num_tokens:]

    def inherit(self, child: Sequence, parent: Sequence, num_tokens: int) -> None:
        """Takes in that a sequence goes on from another's first tokens, whose cells it shares."""
        self._chains[child] = self._chains.get(parent, [])[:num_tokens]

    def move(
        self,
        swap_out: tuple[tuple[int, int], ...] = (),
        swap_in: tuple[tuple[int, int], ...] = (),
        copies: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Moves blocks in this order; each part all at once, as a device may take the pairs in any order."""
        for pairs, source, target in (
            (swap_out, self.cells, self.host),
            (swap_in, self.host, self.cells),
            (copies, self.cells, self.cells),
        ):
            into = [to for _, to in pairs]
            assert len(set(into)) == len(into), f"a block is written twice: {pairs}"
            assert NULL_BLOCK not in itertools.chain(*pairs), f"the null block moves: {pairs}"
            moved = [list(source[block]) for block, _ in pairs]
            for block, values in zip(into, moved, strict=True):
                target[block] = values
        both = {a for a, _ in copies} & {b for _, b in copies}
        assert not both, f"blocks {both} are read and written by {copies}"

    def move_states(
        self,
        swap_out: Items[tuple[int, int]],
        swap_in: Items[tuple[int, int]],
        copies: Items[tuple[int, int]],
    ) -> None:
        """Moves states in this order, each part all at once."""
        for pairs, source, target in (
            (swap_out, self.states, self.host_states),
            (swap_in, self.host_states, self.states),
            (copies, self.states, self.states),
        ):
            assert len({to for _, to in pairs}) == len(pairs), f"a slot is written twice: {pairs}"
            assert 0 not in itertools.chain(*pairs), f"the slot that nobody has moves: {pairs}"
            moved = [source[slot] for slot, _ in pairs]
            for (_, slot), value in zip(pairs, moved, strict=True):
                target[slot] = value
        assert not {a for a, _ in copies} & {b for _, b in copies}, f"read and written: {copies}"

    def advance(
        self, root: int, seq: Sequence, row: ScheduledSequence, stop: int, num_holders: int = 1
    ) -> None:
        """Advances the state of a row, which has to be that of the tokens before it."""
        pool, slot, (num_before, kept_slot) = self.manager.states.pool, row.state_slot, row.checkpoint
        assert slot, "a sequence has no slot"
        assert pool.contents[slot] is None, "a checkpoint is written"
        assert pool.ref_counts[slot] == num_holders, "a slot that others hold is written"
        if row.start:
            found = self.states[slot]
            assert found == self.chain(root, seq, row.start - 1), f"not the state before {row.start}"
        self.states[slot] = self.chain(root, seq, stop - 1)
        if kept_slot:
            assert pool.ref_counts[kept_slot] == 1, "a slot that others hold is written"
            self.states[kept_slot] = self.chain(root, seq, row.start + num_before - 1)

    def encode(self, group: SequenceGroup, tables: BlockTables) -> None:
        """Writes what the layers of cross attention read."""
        num_holders = sum(seq in self.manager.block_tables for seq in group.unfinished)
        for g, table in enumerate(tables):
            if self.manager.groups[g].is_cross:
                assert len(table) == self.manager.num_blocks_of(len(group.request.encoder_token_ids))
                for position in range(len(group.request.encoder_token_ids)):
                    value = hash((g, position, *group.request.encoder_token_ids))
                    self._write(table, position, value, num_holders)

    def write(
        self, root: int, seq: Sequence, tables: BlockTables, start: int, stop: int, num_holders: int = 1
    ) -> None:
        """Writes the tokens at [start, stop), as one row does; num_holders sequences are forked from it."""
        for g, table in enumerate(tables):
            if not self.manager.groups[g].is_cross:
                assert len(table) == self.manager.num_blocks_of(stop - seq.num_dropped_tokens), (
                    "a block more or less than the row needs"
                )
                for position in range(start, stop):
                    value = hash((g, self.chain(root, seq, position)))
                    self._write(table, position - seq.num_dropped_tokens, value, num_holders)

    def check(
        self,
        root: int,
        seq: Sequence,
        tables: BlockTables,
        start: int,
        stop: int,
        encoder_token_ids: Items[int] = (),
        *,
        on_host: bool = False,
    ) -> None:
        """Asserts that tokens at [start, stop) find all that they attend to: their own sequence's past."""
        cells = self.host if on_host else self.cells
        for g, (group, table) in enumerate(zip(self.manager.groups, tables, strict=True)):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            values = (
                [hash((g, position, *encoder_token_ids)) for position in range(len(encoder_token_ids))]
                if group.is_cross
                else [hash((g, self.chain(root, seq, i))) for i in self._positions(seq, first, stop)]
            )
            for position, value in enumerate(values, 0 if group.is_cross else first):
                block = table[position // self.size]
                assert block != NULL_BLOCK, f"position {position} of {stop} reads the null block: {table}"
                found = cells[block][position % self.size]
                assert found == value, f"position {position} of {stop}, group {g}: not its own past"

    def _positions(self, seq: Sequence, first: int, stop: int) -> list[int]:
        """The positions before stop of the tokens in slots first and on of a sequence."""
        slots = range(first, stop - seq.num_dropped_tokens)
        return [seq.original_block_index(slot // self.size) * self.size + slot % self.size for slot in slots]

    def execute(self, output: SchedulerOutput, sched: Scheduler) -> None:
        """Runs a step of the scheduler, on block tables that are made from the news of its steps.

        Args:
            output: The step that was scheduled last.
            sched: Says whose tokens are computed; its block tables are compared with those of the device.
        """
        self.mirror.update(output)
        self.mirror.check(sched, output)
        self.move(output.blocks_to_swap_out, output.blocks_to_swap_in, output.blocks_to_copy)
        self.move_states(*output.state_moves)
        for text in output.encoder_inputs:
            group = sched.queues.running[text.request_id]
            assert text.token_ids == group.request.encoder_token_ids
            self.encode(group, text.block_tables)
        num_samples = Counter(sample.scheduled_index for sample in output.samples)
        for i, row in enumerate(output.scheduled):
            group, seq = found(sched, row.seq_id)
            stop = row.start + row.num_tokens
            assert row.token_ids == seq.tokens(row.start, stop)
            tables = self._used(row.seq_id, stop, is_last=i in num_samples)
            self.write(_root(group), seq, tables, row.start, stop, num_samples[i] or 1)
            if self.manager.states.has_states:
                self.advance(_root(group), seq, row, stop, num_samples[i] or 1)
        for row in output.scheduled:
            group, seq = found(sched, row.seq_id)
            stop = row.start + row.num_tokens
            tables = self._used(row.seq_id, stop, is_last=False)
            self.check(_root(group), seq, tables, row.start, stop, group.request.encoder_token_ids)

    def _used(self, seq_id: int, stop: int, *, is_last: bool) -> BlockTables:
        """Returns the blocks of a sequence that hold tokens before stop: all of its blocks, if it samples."""
        num_blocks, out = self.manager.num_blocks_of(stop), []
        for group, table in zip(self.manager.groups, self.mirror.tables[seq_id], strict=True):
            assert group.is_cross or not is_last or len(table) == num_blocks, "a block more than needed"
            out.append(table if group.is_cross else table[:num_blocks])
        return out

    def wipe(self) -> None:
        """Empties every block that neither a sequence nor the prefix cache holds."""
        for pool, cells in ((self.manager.pool, self.cells), (self.manager.swap_pool, self.host)):
            for block, count in enumerate(pool.ref_counts):
                if not count and pool.contents[block] is None:
                    cells[block] = [0] * self.size
        slots = self.manager.states
        for pool, states in ((slots.pool, self.states), (slots.swap_pool, self.host_states)):
            for slot, count in enumerate(pool.ref_counts):
                if not count and pool.contents[slot] is None:
                    states[slot] = 0

    def _write(self, table: list[int], position: int, value: int, num_holders: int = 1) -> None:
        block = table[position // self.size]
        assert block != NULL_BLOCK, "the null block is written"
        assert self.manager.pool.contents[block] is None, "a cached block is written"
        assert self.manager.pool.ref_counts[block] == num_holders, "a block that others hold is written"
        self.cells[block][position % self.size] = value


def _root(group: SequenceGroup) -> int:
    return root(group.cache_salt, group.request.encoder_token_ids)
