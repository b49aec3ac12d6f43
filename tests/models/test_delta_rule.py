"""The gated delta rule on rows of any length, beside a loop over tokens in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.models.recurrent.delta_rule import GatedDeltaRule
from jax_paged.models.recurrent.recurrence import StepTokens

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 6


def loop(state, q, k, v, decay, rate):
    """Returns what each token of one row gets, and the states before and behind all of them, in float64."""
    states, out = [np.array(state, np.float64)], []
    for t in range(len(q)):
        s = states[-1] * np.exp(decay[t])[:, None, None]
        query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q[t], k[t]))
        query, key = (np.repeat(x, HEADS // KEY_HEADS, axis=0) for x in (query / KEY_DIM**0.5, key))
        delta = (v[t] - np.einsum("hk,hkv->hv", key, s)) * rate[t][:, None]
        states.append(s + key[:, :, None] * delta[:, None])
        out.append(np.einsum("hk,hkv->hv", query, states[-1]))
    return np.array(out), states


@pytest.mark.parametrize(
    ("lens", "kept", "padding"),
    [
        ([1, 1, 1], [0, 1, 0], 0),
        ([5, 0, 1, 40], [3, 0, 1, 33], 4),
        ([16, 17, 15, 33], [16, 16, 0, 32], 0),
        ([200], [192], 30),
        ([1], [0], 5),
    ],
)
def test_rows_of_any_length(lens: list[int], kept: list[int], padding: int) -> None:
    rng, total, num_rows = np.random.default_rng(0), sum(lens), len(lens)
    is_decode = set(lens) == {1} and not padding
    shapes = ((KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (HEADS, VALUE_DIM), (HEADS,), (HEADS,))
    q, k, v, decay, rate = (rng.normal(size=(total + padding, *s)).astype(np.float32) for s in shapes)
    decay, rate = -np.exp(2 * decay), 1 / (1 + np.exp(-rate))
    state = rng.normal(size=(num_rows, 1, HEADS, KEY_DIM, VALUE_DIM)).astype(np.float32)
    first = np.cumsum([0, *lens])
    row = np.concatenate([np.repeat(np.arange(num_rows), lens), np.full(padding, num_rows)])
    place = np.arange(total + padding) - first[row]
    for x in (q, k, v, decay, rate):
        x[total:] = np.nan  # nobody reads what padding holds, unless it is a row
    step = StepTokens(*map(jnp.asarray, (row, place, first, np.array(kept))), is_decode=is_decode)
    inputs = map(jnp.asarray, (q, k, v, decay, rate))
    out, ended, checkpoints = GatedDeltaRule()(step, jnp.asarray(state), *inputs)
    # Decays are added up in float32 along a tile of up to 64 tokens, and differences of these sums are taken.
    tolerance = 2e-6 + np.finfo(np.float32).eps * 64 * np.abs(decay[:total]).mean()
    for b, (n, at) in enumerate(zip(lens, kept, strict=True)):
        part = slice(first[b], first[b] + n)
        expected, states = loop(state[b, 0], q[part], k[part], v[part], decay[part], rate[part])
        if n:
            np.testing.assert_allclose(out[part], expected, atol=tolerance)
            np.testing.assert_allclose(ended[b, 0], states[-1], atol=tolerance)
        if at:
            np.testing.assert_allclose(checkpoints[b, 0], states[at], atol=tolerance)
    assert np.isfinite(out[total:]).all()
