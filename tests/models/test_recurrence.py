"""States of rows of several tokens and of one, step by step, beside whole texts."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.models.attention import AttentionMetadata, StateSpec
from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.kv_location import KVLocation
from jax_paged.models.weights import load_model

FIXTURES = Path(__file__).parent / "fixtures"
BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS = 16, 8, 6
# Of each step: by row the text, the slot, the first token, how many, where a checkpoint is and in which slot.
STEPS = [
    [(0, 2, 0, 5, 0, 6), (1, 4, 0, 20, 16, 3)],
    [(0, 2, 5, 1, 0, 6), (1, 4, 20, 2, 0, 6)],
    [(0, 2, 6, 1, 0, 6), (1, 4, 22, 1, 1, 1)],
    # Another sequence goes on from the checkpoint.
    [(1, 3, 16, 4, 0, 6)],
]


def metadata_of(rows: list[Any], specs: list[Any], *, padding: int) -> AttentionMetadata:
    """Returns the metadata of a step, with unused rows and tokens behind its own."""
    lens, is_decode = [n for *_, n, _, _ in rows], all(n == 1 for *_, n, _, _ in rows)
    positions = np.concatenate([start + np.arange(n) for _, _, start, n, _, _ in rows])
    tables = np.array([[1 + 4 * text, 2 + 4 * text] for text, *_ in rows])
    owner = np.repeat(np.arange(len(rows)), lens)
    slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    unused, total = [0] * padding, sum(lens)
    states = [[slot for _, slot, *_ in rows], [kept for *_, kept in rows], [n for *_, n, _ in rows]]
    places = np.cumsum([0, *(len(s.arrays) if isinstance(s, StateSpec) else 1 for s in specs)]).tolist()
    return AttentionMetadata(
        positions=jnp.array([*positions, *unused]),
        slot_mapping=jnp.array([[*slots, *[NUM_BLOCKS * BLOCK_SIZE] * padding]]),
        block_tables=jnp.array([[*tables.tolist(), *[[0, 0]] * padding]]),
        context_lens=jnp.array([[*(start + n for _, _, start, n, _, _ in rows), *unused]]),
        query_start_loc=jnp.array([*np.cumsum([0, *lens]), *(total + (np.arange(padding) + 1) * is_decode)]),
        is_decode=is_decode,
        backend="xla",
        kv_locations=tuple(KVLocation(array, 0) for array in places[:-1]),
        state_slots=jnp.array(
            [[*row, *[NUM_SLOTS if i < 2 else 0] * padding] for i, row in enumerate(states)]
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_steps_equal_whole_texts(name: str) -> None:
    """All slots hold NaN at first, and those that nobody has still do at the end."""
    model = load_model(FIXTURES / name, "float32").model
    texts, specs = np.random.default_rng(0).integers(0, 256, (2, 24)), model.kv_cache_specs()
    assert isinstance(model, CausalLM)
    dense = jax.jit(lambda tokens: model.hidden(tokens, model.dense_context(tokens)))(jnp.array(texts))
    paged = jax.jit(model.paged)
    kv_cache = []
    for spec in specs:
        if isinstance(spec, StateSpec):
            kv_cache += [jnp.full((NUM_SLOTS, *array.shape), jnp.nan) for array in spec.arrays]
        else:
            kv_cache.append(jnp.zeros((NUM_BLOCKS, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)))
    for rows in STEPS:
        metadata = metadata_of(rows, specs, padding=2)
        tokens = [texts[text, start : start + n] for text, _, start, n, _, _ in rows]
        hidden, kv_cache = paged(jnp.array([*np.concatenate(tokens), 0, 0]), kv_cache, metadata)
        expected = np.concatenate([dense[text, start : start + n] for text, _, start, n, _, _ in rows])
        np.testing.assert_allclose(hidden[: len(expected)], expected, atol=2e-4)
        assert np.isfinite(hidden).all(), "also in padding"
    for spec, place in zip(specs, metadata_of(STEPS[0], specs, padding=0).kv_locations, strict=True):
        for i in range(len(spec.arrays) if isinstance(spec, StateSpec) else 0):
            array = kv_cache[place.array + i]
            is_dead = np.isnan(array).all(axis=tuple(range(1, array.ndim)))
            assert is_dead.tolist() == [True, False, False, False, False, True]
