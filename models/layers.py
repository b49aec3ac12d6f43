"""Parts that several families share: linear maps, embeddings, RMSNorm, rotary positions."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

# Mesh axis that heads, MLP width and vocabulary are split over.
TENSOR = "tensor"


def parameter(value: Array, split: tuple[str | None, ...]) -> nnx.Param:
    """Makes a weight that carries the mesh axis (or None) that splits each of its dimensions."""
    return nnx.Param(value, out_sharding=split, eager_sharding=False)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "std"))
def normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, std: float) -> Array:
    """Draws an initial weight of standard deviation `std`.

    Compiled once a shape: so nothing but the weight itself is ever allocated.
    """
    return (jax.random.normal(key, shape) * std).astype(dtype)


class Linear(nnx.Module):
    """y = x @ kernel + bias, the kernel laid out [in, out]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        split: tuple[str | None, str | None],
        std: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        self.kernel = parameter(normal(rngs.params(), (in_features, out_features), dtype, std), split)
        self.bias = parameter(jnp.zeros(out_features, dtype), split[1:]) if bias else None

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        y = x @ self.kernel[...]
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """A table of vectors, one a token."""

    def __init__(
        self, vocab_size: int, features: int, *, std: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.embedding = parameter(normal(rngs.params(), (vocab_size, features), dtype, std), (TENSOR, None))

    def __call__(self, tokens: Int[Array, "..."]) -> Float[Array, "... e"]:
        return self.embedding[...][tokens]

    def attend(self, x: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the float32 logits of a head tied to this table."""
        return jnp.einsum("...e,ve->...v", x, self.embedding[...], preferred_element_type=jnp.float32)


class RMSNorm(nnx.Module):
    """Root mean square norm, computed in float32.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(self, features: int, *, epsilon: float, dtype: jnp.dtype) -> None:
        self.scale = parameter(jnp.ones(features, dtype), (None,))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... e"]) -> Float[Array, "... e"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return x32.astype(x.dtype) * self.scale[...]


def rope_frequencies(head_dim: int, theta: float, scaling: dict[str, Any]) -> tuple[float, ...]:
    """Returns the angle per position of each of the head_dim / 2 rotated pairs.

    Args:
        head_dim: Size of a head.
        theta: Base of the geometric series.
        scaling: rope_type "default" or "llama3" with its factors, as in config.json.

    Source: Su et al., RoFormer, 2021; for "llama3" the Llama 3.1 release (wavelengths longer than the
    training context are stretched by `factor`, short ones kept, those between blended).
    """
    base = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling["rope_type"] == "default":
        return tuple(base)
    assert scaling["rope_type"] == "llama3", "config parsing admits no other type"
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    context = scaling["original_max_position_embeddings"]

    def stretch(frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength > context / low:
            return frequency / factor
        if wavelength < context / high:
            return frequency
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency

    return tuple(stretch(f) for f in base)


def apply_rope(
    x: Float[Array, "... h d"], positions: Int[Array, "..."], frequencies: tuple[float, ...]
) -> Float[Array, "... h d"]:
    """Rotates the pairs (i, i + d/2) of every head by position * frequency, in float32."""
    angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
