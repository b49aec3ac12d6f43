"""Mixtures of experts: grouped_matmul against NumPy, and independence of a token from the others."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_paged.models.forward_context import ForwardContext
from jax_paged.models.moe import MoeMLP
from jax_paged.models.weights import load_model
from jax_paged.pallas_kernels.grouped_loop import grouped_matmul

FIXTURES = Path(__file__).parent / "fixtures"
RNG = np.random.default_rng(0)


def no_attention(*args: Any, **options: Any) -> jax.Array:
    raise AssertionError("experts do not attend")


def draw(sizes: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = RNG.normal(size=(sum(sizes), 24)).astype(np.float32)
    kernels = RNG.normal(size=(len(sizes), 24, 40)).astype(np.float32)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    expected = np.einsum("ni,nio->no", x.astype(np.float64), kernels[owner].astype(np.float64))
    return x, kernels, expected


SIZES = [[1], [300], [1, 0, 0], [0, 0, 3], [0, 8, 0, 16, 0], [7, 9, 8, 1], [0, 129, 1, 0, 260, 0, 33, 2]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_grouped_matmul(sizes: list[int]) -> None:
    x, kernels, expected = draw(sizes)
    # 24 products of about 1 in float32.
    np.testing.assert_allclose(jax.jit(grouped_matmul)(x, kernels, jnp.array(sizes)), expected, atol=2e-5)


def test_gradient() -> None:
    sizes = [5, 0, 11, 2]
    x, kernels, expected = draw(sizes)

    def loss(x: jax.Array, kernels: jax.Array) -> jax.Array:
        return jnp.sum(grouped_matmul(x, kernels, jnp.array(sizes)) ** 2) / 2

    of_x, of_kernels = jax.grad(loss, (0, 1))(jnp.asarray(x), jnp.asarray(kernels))
    owner = np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_allclose(of_x, np.einsum("no,nio->ni", expected, kernels[owner]), atol=1e-3)
    for i, gradient in enumerate(of_kernels):
        rows = owner == i
        np.testing.assert_allclose(gradient, x[rows].T @ expected[rows], atol=1e-3)


def test_what_is_not_chosen_is_not_read() -> None:
    x, kernels, expected = draw([3, 0, 40, 0])
    kernels[[1, 3]] = np.nan
    x[1] = np.inf
    out = np.asarray(grouped_matmul(jnp.asarray(x), jnp.asarray(kernels), jnp.array([3, 0, 40, 0])))
    others = np.arange(43) != 1
    np.testing.assert_allclose(out[others], expected[others], atol=2e-5)
    assert not np.isfinite(out[1]).any()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe_tied", "gpt_oss"])
def test_a_token_is_alone(name: str) -> None:
    layer = load_model(FIXTURES / name).model.layers[0].mlp
    assert isinstance(layer, MoeMLP)

    @nnx.jit
    def call(layer: MoeMLP, x: jax.Array) -> jax.Array:
        return layer(x, ForwardContext(layer, jnp.zeros(x.shape[:-1], jnp.int32), no_attention))

    x = jnp.asarray(RNG.normal(size=(200, 32)), jnp.float32)
    together = np.asarray(call(layer, x))
    np.testing.assert_allclose(call(layer, x[::-1])[::-1], together, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(call(layer, x.reshape(4, 50, 32)).reshape(200, 32), together)
    for i in (0, 7, 199):
        np.testing.assert_allclose(call(layer, x[i : i + 1])[0], together[i], rtol=1e-5, atol=1e-5)
    spoiled = np.asarray(call(layer, x.at[::2].set(jnp.nan)))
    np.testing.assert_allclose(spoiled[1::2], together[1::2], rtol=1e-5, atol=1e-5)
