"""Token counts on the device against NumPy's, and what they cost."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from test_block_mover import LAYOUT

from jax_paged.models.parallel.sharding import TENSOR
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.input_batch import TokenCountReset
from jax_paged.worker.loading.weights import FlatModel
from jax_paged.worker.sampling.sampler import IN_PROMPT, SamplerOptions
from jax_paged.worker.sampling.token_counts import (
    NUM_RESET_TOKENS,
    ResetTokenCountsProgram,
    add_tokens,
    reset_token_counts,
)

NUM_BATCH_SLOTS, VOCAB_SIZE = 5, 50


@pytest.fixture(scope="module")
def compiled() -> jax.stages.Compiled:
    context = TraceContext(
        model=FlatModel(None, None),
        weights=[],
        layout=LAYOUT,
        num_blocks=2,
        block_size=4,
        dtype=jnp.dtype("float32"),
        vocab_size=VOCAB_SIZE,
        max_model_len=16,
        max_num_seqs=NUM_BATCH_SLOTS,
        max_num_batched_tokens=16,
        features=FeatureSet(),
        sampling=SamplerOptions(max_logprobs=1),
        backend="xla",
        batch_invariant=False,
        mesh=Mesh(np.array(jax.devices()[:1]), (TENSOR,)),
    )
    return ResetTokenCountsProgram().lower(context).compile()


def expected_row(prompt: list[int], output: list[int]) -> np.ndarray:
    row = np.bincount(np.array(output, int), minlength=VOCAB_SIZE)
    row[sorted(set(prompt))] += IN_PROMPT
    return row


# Prompts and outputs that end inside, at and past the end of a call.
LENGTHS = [
    (1, 0),
    (3, 7),
    (NUM_RESET_TOKENS - 1, 1),
    (NUM_RESET_TOKENS, 0),
    (NUM_RESET_TOKENS, 5),
    (NUM_RESET_TOKENS + 1, NUM_RESET_TOKENS),
    (10, 3 * NUM_RESET_TOKENS),
]


def test_rows_are_written_whatever_they_held(compiled: jax.stages.Compiled) -> None:
    rng = random.Random(0)
    want = np.array(
        [[rng.randrange(2**31) for _ in range(VOCAB_SIZE)] for _ in range(NUM_BATCH_SLOTS)], np.int32
    )
    counts, used = jnp.asarray(want), []

    def run(program: Program, *args: Any) -> Any:
        used.append(program)
        return compiled(*args)

    for batch_slot, (num_prompt, num_output) in enumerate(LENGTHS):
        batch_slot %= NUM_BATCH_SLOTS
        prompt = rng.choices(range(VOCAB_SIZE // 2), k=num_prompt)
        output = rng.choices(range(10, VOCAB_SIZE), k=num_output)
        counts = reset_token_counts(run, counts, [TokenCountReset(batch_slot, prompt, output)])
        want[batch_slot] = expected_row(prompt, output)
        assert np.array_equal(counts, want), (num_prompt, num_output)
    assert used == [ResetTokenCountsProgram()] * sum(-(-sum(n) // NUM_RESET_TOKENS) for n in LENGTHS)


def test_the_array_stays_in_place(compiled: jax.stages.Compiled) -> None:
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == NUM_BATCH_SLOTS * VOCAB_SIZE * 4


def test_drawn_tokens_are_counted_in_seats_that_exist() -> None:
    counts = jnp.zeros((NUM_BATCH_SLOTS, VOCAB_SIZE), jnp.int32).at[2, 7].set(IN_PROMPT + 3)
    batch_slots = jnp.array([2, NUM_BATCH_SLOTS, 0, NUM_BATCH_SLOTS, 4])
    got = np.array(jax.jit(add_tokens)(counts, batch_slots, jnp.array([7, 7, 1, 2, 49])))
    assert got[2, 7] == IN_PROMPT + 4
    got[2, 7] = 0
    assert np.argwhere(got).tolist() == [[0, 1], [4, 49]]
