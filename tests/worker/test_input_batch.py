"""The batch slots against a mirror: any order of arrivals, growth and departures."""

import dataclasses
import random

import numpy as np
import pytest
from helpers.steps import make_output, make_row, new_sequence

from jax_paged.core.scheduler_output import BlockTables, NewSequence, ScheduledSequence
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.input_batch import InputBatch, TokenCountReset
from jax_paged.worker.sampling.token_rules import KnownTokens, TokenRules, pack_token_mask

NUM_BATCH_SLOTS, NUM_GROUPS, MAX_BLOCKS, NUM_BLOCKS, VOCAB_SIZE = 6, 3, 12, 1000, 70


def make_batch() -> InputBatch:
    return InputBatch(
        max_num_seqs=NUM_BATCH_SLOTS,
        num_groups=NUM_GROUPS,
        max_blocks_per_seq=MAX_BLOCKS,
        num_blocks=NUM_BLOCKS,
        vocab_size=VOCAB_SIZE,
        features=FeatureRows(NUM_BATCH_SLOTS),
    )


@dataclasses.dataclass
class Mirror:
    """A sequence as the scheduler knows it."""

    prompt: list[int]
    tables: BlockTables
    has_penalty: bool
    has_mask: bool


class RandomScheduler:
    """Makes steps of random changes, and knows what the batch slots must hold after each of them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.sequences: dict[int, Mirror] = {}
        self.num_seqs = 0

    def blocks(self, low: int, high: int) -> list[int]:
        return [self.rng.randrange(1, NUM_BLOCKS) for _ in range(self.rng.randint(low, high))]

    def arrive(self) -> NewSequence:
        rng = self.rng
        if rng.random() < 0.3 and self.sequences:  # forked: the same blocks
            tables = [list(table) for table in rng.choice(list(self.sequences.values())).tables]
        else:
            tables = [self.blocks(0, MAX_BLOCKS // 2) for _ in range(NUM_GROUPS)]
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 5))]
        mirror = Mirror(prompt, tables, rng.random() < 0.5, rng.random() < 0.3)
        self.num_seqs += 1
        self.sequences[self.num_seqs] = mirror
        return new_sequence(
            self.num_seqs,
            prompt,
            tables=[list(table) for table in tables],
            presence_penalty=0.5 * mirror.has_penalty,
            allowed_token_ids=[1, 2] if mirror.has_mask else None,
            prompt_logprobs=3 if mirror.has_penalty else None,
            seed=self.num_seqs,
        )

    def change(self, seq_id: int) -> ScheduledSequence:
        rng, tables = self.rng, self.sequences[seq_id].tables
        new_blocks: BlockTables = [[] for _ in tables]
        replaced = []
        for g, table in enumerate(tables):
            if rng.random() < 0.4:
                new_blocks[g] = self.blocks(0, min(2, MAX_BLOCKS - len(table)))
                table.extend(new_blocks[g])
            while table and rng.random() < 0.3:
                index = rng.randrange(len(table))
                table[index] = rng.choice([0, *self.blocks(1, 1)])
                replaced.append((g, index, table[index]))
        if not any(new_blocks) and rng.random() < 0.5:
            new_blocks = []
        return make_row(seq_id, 0, [1], new_blocks=new_blocks, replaced_blocks=replaced)


@pytest.mark.parametrize("seed", range(20))
def test_deltas_add_up_to_the_true_tables(seed: int) -> None:
    scheduler, batch = RandomScheduler(seed), make_batch()
    rng = scheduler.rng
    device = np.full(batch.block_tables.size, -1, np.int32)  # knows what it is told, and never forgets
    for _ in range(60):
        released = [seq_id for seq_id in scheduler.sequences if rng.random() < 0.2]
        for seq_id in released:
            del scheduler.sequences[seq_id]
        old = list(scheduler.sequences)
        num_new = rng.randint(0, NUM_BATCH_SLOTS - len(old))
        new = [scheduler.arrive() for _ in range(num_new)]
        rows = [scheduler.change(seq_id) for seq_id in old if rng.random() < 0.7]
        resets = batch.update(make_output(rows, new=new, released=released))
        batch.check_integrity()
        if rng.random() < 0.7:  # not every step of a scheduler reaches the device
            places, blocks = batch.take_table_changes()
            assert len(np.unique(places)) == len(places)
            device[places] = blocks
            tables = device.reshape(batch.block_tables.shape)
            for batch_slot in batch.slots_of(scheduler.sequences).tolist():
                for g, n in enumerate(batch.num_table_blocks[:, batch_slot].tolist()):
                    assert np.array_equal(tables[g, batch_slot, :n], batch.block_tables[g, batch_slot, :n])
        ids = list(scheduler.sequences)
        assert len(set(batch.slots_of(ids).tolist())) == len(ids)
        wanted = []
        for seq_id, batch_slot in zip(ids, batch.slots_of(ids).tolist(), strict=True):
            mirror = scheduler.sequences[seq_id]
            for g, table in enumerate(mirror.tables):
                assert batch.block_tables[g, batch_slot].tolist() == table + [0] * (MAX_BLOCKS - len(table))
                assert batch.num_table_blocks[g, batch_slot] == len(table)
            assert batch.count_slots[batch_slot] == (batch_slot if mirror.has_penalty else NUM_BATCH_SLOTS)
            assert (batch_slot in batch.token_rules) == mirror.has_mask
            assert batch.prompts.get(batch_slot) == ((mirror.prompt, 3) if mirror.has_penalty else None)
            if seq_id not in old and mirror.has_penalty:
                wanted.append(TokenCountReset(batch_slot, mirror.prompt, []))
        assert resets == wanted


def test_a_sequence_may_come_back_in_the_step_it_is_released() -> None:
    batch = make_batch()
    tables = [[3, 4], [5], []]
    batch.update(make_output(new=[new_sequence(1, [1], tables=[[9, 8, 7], [1, 1], [2]])]))
    again = new_sequence(1, [1], [5], tables=tables, frequency_penalty=1.0)
    (reset,) = batch.update(make_output(released=[1], new=[again]))
    batch.check_integrity()
    (batch_slot,) = batch.slots_of([1]).tolist()
    assert reset == TokenCountReset(batch_slot, [1], [5])
    assert [batch.block_tables[g, batch_slot, :4].tolist() for g in range(3)] == [
        [3, 4, 0, 0],
        [5, 0, 0, 0],
        [0, 0, 0, 0],
    ]


def test_another_scheduler_finds_all_seats_empty() -> None:
    batch = make_batch()
    batch.update(
        make_output(new=[new_sequence(i, [1], tables=[[9], [8], []]) for i in range(NUM_BATCH_SLOTS)])
    )
    new = [new_sequence(i, [1], tables=[[i + 1], [], []]) for i in range(NUM_BATCH_SLOTS)]
    batch.update(make_output(new=new, step_id=0))
    batch.check_integrity()
    assert batch.block_tables[0, batch.slots_of(range(NUM_BATCH_SLOTS)), 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert not batch.block_tables[1].any()
    batch.update(make_output(step_id=0))
    batch.check_integrity()
    assert not batch.num_table_blocks.any()


def test_how_many_most_likely_tokens_are_reported() -> None:
    batch = make_batch()
    asked = [None, 0, 5, 300]
    batch.update(
        make_output(
            new=[new_sequence(i, [1], tables=[[], [], []], num_top_logprobs=n) for i, n in enumerate(asked)]
        )
    )
    reported = batch.num_top_logprobs[batch.slots_of(range(4))]
    assert reported.tolist() == [-1, 0, 5, 300]


def test_what_can_not_be_is_not_taken() -> None:
    batch = make_batch()
    new = [new_sequence(i, [1], tables=[[], [], []]) for i in range(NUM_BATCH_SLOTS)]
    batch.update(make_output(new=new))
    with pytest.raises(AssertionError, match="need a batch slot"):
        batch.update(make_output(new=[new_sequence(NUM_BATCH_SLOTS, [1], tables=[[], [], []])]))
    with pytest.raises(AssertionError, match="released sequence 77 has no batch slot"):
        batch.update(make_output(released=[77]))
    with pytest.raises(AssertionError, match="already has a batch slot"):
        batch.update(make_output(new=[new[0]]))
    for block in (-1, NUM_BLOCKS):
        with pytest.raises(AssertionError, match="block"):
            batch.update(make_output([make_row(0, 0, [1], new_blocks=[[block]])]))
        row = make_row(1, 0, [1], new_blocks=[[3]], replaced_blocks=[(0, 0, block)])
        with pytest.raises(AssertionError, match="block"):
            batch.update(make_output([row]))
    with pytest.raises(AssertionError, match="past the end of its table"):
        batch.update(make_output([make_row(2, 0, [1], replaced_blocks=[(0, 0, 5)])]))
    with pytest.raises(AssertionError, match="no room for"):
        batch.update(make_output([make_row(2, 0, [1], new_blocks=[[1] * (MAX_BLOCKS + 1)])]))


def test_integrity_is_checked() -> None:
    batch = make_batch()
    batch.update(make_output(new=[new_sequence(1, [1], tables=[[3], [4], [5]])]))
    batch.check_integrity()
    (batch_slot,) = batch.slots_of([1]).tolist()
    batch.block_tables[0, batch_slot, 2] = 8
    with pytest.raises(AssertionError, match="contains a block after its end"):
        batch.check_integrity()
    batch.block_tables[0, batch_slot, 2] = 0
    new = new_sequence(2, [1], tables=[[3]])
    rules = TokenRules(new, KnownTokens(new), 8)
    batch.token_rules[(batch_slot + 1) % NUM_BATCH_SLOTS] = rules
    with pytest.raises(AssertionError, match="free batch slot"):
        batch.check_integrity()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_token_masks(vocab_size: int) -> None:
    allowed = sorted(random.Random(vocab_size).sample(range(vocab_size), (vocab_size + 1) // 2))
    mask = pack_token_mask(allowed, vocab_size)
    assert mask.dtype == np.int32
    assert mask.shape == (-(-vocab_size // 32),)
    assert [i for i in range(vocab_size) if mask[i // 32] >> (i % 32) & 1] == allowed
