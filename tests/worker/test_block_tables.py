"""Block tables on the device against NumPy's: changes that come with a step or go ahead of it."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.steps import make_output, make_row, new_sequence

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.scheduler_output import Sample
from jax_paged.worker.batch_builder import BatchBuilder
from jax_paged.worker.block_tables import (
    NUM_WRITTEN,
    WriteBlockTablesProgram,
    tables_of,
    write_block_tables,
    write_changes,
)
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.programs import Program
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.packed_buffer import BufferOptions, num_step_changes, unpack
from jax_paged.worker.step_rows import plan_logits_rows

SHAPE = 2, 5, 700
SIZE = int(np.prod(SHAPE))


@pytest.mark.parametrize("num_changes", [0, 1, NUM_WRITTEN - 1, NUM_WRITTEN, NUM_WRITTEN + 1, 3000])
def test_any_number_of_changes_goes_ahead(num_changes: int) -> None:
    rng = np.random.default_rng(num_changes)
    want = rng.integers(0, 1000, SHAPE, np.int32)
    places = rng.permutation(SIZE)[:num_changes].astype(np.int32)
    blocks = rng.integers(0, 1000, num_changes, np.int32)
    used: list[Program] = []

    def run(program: Program, *args: Any) -> Any:
        used.append(program)
        return jax.jit(write_changes)(*args)

    got = write_block_tables(run, jnp.asarray(want), np.stack([places, blocks]))
    want.reshape(-1)[places] = blocks
    assert np.array_equal(got, want)
    assert used == [WriteBlockTablesProgram()] * -(-num_changes // NUM_WRITTEN)


def test_padding_changes_nothing() -> None:
    tables = jnp.asarray(np.arange(SIZE, dtype=np.int32).reshape(SHAPE))
    changes = np.array([[3] + [SIZE] * 8, [77] + [SIZE] * 8], np.int32)
    got = np.array(jax.jit(write_changes)(tables, jnp.asarray(changes)))
    assert got[0, 0, 3] == 77
    got[0, 0, 3] = 3
    assert np.array_equal(got, tables)


def test_seats_that_do_not_exist_have_null_blocks() -> None:
    tables = np.random.default_rng(0).integers(1, 1000, SHAPE, np.int32)
    got = np.asarray(jax.jit(tables_of)(jnp.asarray(tables), jnp.array([4, 5, 0, 5])))
    assert np.array_equal(got[:, [0, 2]], tables[:, [4, 0]])
    assert not got[:, [1, 3]].any()


def test_a_long_table_takes_its_seat_and_grows() -> None:
    """As long as a prompt of 131,072 tokens that is cached but for its last token; then it decodes."""
    num_blocks, max_blocks, full = 20_000, 8_300, CacheGroup(None, False)
    batch = InputBatch(
        max_num_seqs=3,
        num_groups=1,
        max_blocks_per_seq=max_blocks,
        num_blocks=num_blocks,
        vocab_size=9,
        features=FeatureRows(3),
    )
    builder = BatchBuilder(batch, block_size=16, num_blocks=num_blocks, groups=(full,), vocab_size=9)
    bucket, table = Bucket(True, 2, 2), [*range(1, 8_193)]
    device = jnp.full((1, 3, max_blocks), -1, jnp.int32)
    new = [new_sequence(1, [1] * 16 * len(table), tables=[table])]
    num_before = []
    for position in itertools.chain([16 * 8_192 - 1], range(16 * 8_192, 16 * 8_192 + 40)):
        blocks = [[10_000 + position // 16]] if position % 16 == 0 else []
        table = [*table, *(blocks[0] if blocks else [])]
        output = make_output([make_row(1, position, [1], new_blocks=blocks)], [Sample(0, 1)], new=new)
        new = []
        batch.update(output)
        inputs = builder.build(output, plan_logits_rows(output), bucket)
        num_before.append(inputs.changes_before_step.shape[1])
        device = write_block_tables(
            lambda program, *args: jax.jit(write_changes)(*args), device, inputs.changes_before_step
        )
        fields = unpack(jnp.asarray(inputs.packed), bucket, BufferOptions(1))
        device = write_changes(device, fields["table_changes"])
        got = tables_of(device, fields["batch_slots"])
        assert got[0, 0, : len(table)].tolist() == table
        assert not got[0, 1].any()
    assert num_before == [8_192 - num_step_changes(bucket, 1), *[0] * 40]
