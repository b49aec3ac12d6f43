"""Parts that several families share: linear maps, embeddings, norms, activations."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.parallel.sharding import Split, padded
from jax_paged.models.quantization.quantized_linear import QuantizedWeight
from jax_paged.pallas_kernels.native import products


def _in_float32(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns an activation that is rounded once, at its end: quicker than after each of its operations."""
    return lambda x: activation(x.astype(jnp.float32)).astype(x.dtype)


# By their names in config.json.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": _in_float32(jax.nn.silu),
    "relu": jax.nn.relu,
    "gelu": _in_float32(functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_new": _in_float32(functools.partial(jax.nn.gelu, approximate=True)),
    "gelu_pytorch_tanh": _in_float32(functools.partial(jax.nn.gelu, approximate=True)),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def parameter(value: Array, split: Split) -> nnx.Param:
    """Makes a weight that carries how each of its dimensions is divided among devices."""
    return nnx.Param(value, split=split)


class Float32Param(nnx.Param[Array]):
    """A weight that stays float32 in a model of another type."""


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "std"))
def normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, std: float) -> Array:
    """Draws an initial weight of standard deviation `std`.

    Compiled once per shape, so that nothing but the weight itself is ever allocated.
    """
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)


class PackedKernel(nnx.Variable[Array]):
    """A kernel as oneDNN reads it (pallas_kernels/native/products.py), to serve with and not to train.

    Maps that are applied to the same rows may share one: their kernels side by side.
    """


class Linear(Module):
    """y = x @ kernel + bias, the kernel laid out [in, out], or small, or packed.

    Args:
        in_features: Size of x.
        out_features: Size of y.
        bias: Whether there is one.
        split: How each dimension of the kernel is divided among devices.
        std: Standard deviation of the initial kernel.
        dtype: Of the weights.
        rngs: Where random weights come from.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        split: Split,
        std: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features, self.out_features, self.split = in_features, out_features, split
        # Where its columns are in a packed kernel that it shares.
        self.first_column, self.num_columns = 0, out_features
        self.kernel: nnx.Param | PackedKernel | QuantizedWeight = parameter(
            normal(rngs.params(), (in_features, out_features), dtype, std), split
        )
        self.bias = parameter(jnp.zeros(out_features, dtype), split[1:]) if bias else None

    def forward(self, x: Float[Array, "... i"], context: ForwardContext) -> Float[Array, "... o"]:
        y = self.product(x, is_divided=context.grid is not None and self.split[0] is not None)
        return y if self.bias is None else y + self.bias[...]

    def logits(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        """Returns float32 logits, whatever the type of the weights."""
        y = self.product(x, jnp.float32)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)

    def product(
        self, x: Float[Array, "... i"], dtype: DTypeLike | None = None, *, is_divided: bool = False
    ) -> Float[Array, "... o"]:
        """Returns x @ kernel, of type `dtype` if given; for `is_divided` see QuantizedWeight.product."""
        if isinstance(self.kernel, PackedKernel):
            y = products.multiply(x, self.kernel[...], self.num_columns, dtype or x.dtype)
            return y[..., self.first_column : self.first_column + self.out_features]
        if isinstance(self.kernel, QuantizedWeight):
            return self.kernel.product(x, dtype or x.dtype, is_divided=is_divided)
        return jnp.matmul(x, self.kernel[...], preferred_element_type=dtype)

    @staticmethod
    def pack(maps: "Sequence[Linear]") -> None:
        """Replaces the kernels of maps that are applied to the same rows by one packed kernel.

        Each map still asks for its own columns; where the rows are the same, XLA sees the same product, and
        computes it once.
        """
        kernel = PackedKernel(products.pack(jnp.concatenate([m.kernel[...] for m in maps], axis=1)))
        columns = np.cumsum([0, *(m.out_features for m in maps)]).tolist()
        for m, first in zip(maps, columns, strict=False):
            m.kernel, m.first_column, m.num_columns = kernel, first, columns[-1]


def gated(
    activation: str, gate: Linear, up: Linear, x: Float[Array, "... i"], context: ForwardContext
) -> Float[Array, "... o"]:
    """Returns activation(gate(x)) * up(x).

    Where both kernels are packed, neither a hook nor an adapter is at the two maps, and the native product
    has the activation, this is a single call, and the context does not see them.

    Args:
        activation: One of ACTIVATIONS, by its name.
        gate: What is activated.
        up: What is gated; of the same sizes.
        x: What both are applied to.
        context: Of the pass.
    """
    kernels = gate.kernel, up.kernel
    is_packed = all(isinstance(kernel, PackedKernel) for kernel in kernels) and gate.bias is up.bias is None
    if is_packed and activation != "relu2" and not context.sees(gate, up):
        packed_gate, packed_up = (kernel[...] for kernel in kernels)
        return products.multiply_gated(x, packed_gate, packed_up, gate.out_features, activation)
    return ACTIVATIONS[activation](gate(x, context)) * up(x, context)


class Embedding(Module):
    """A table with one vector per token, and its packed transpose if it has been packed as a head.

    Args:
        vocab_size: Number of vectors.
        features: Size of a vector.
        is_divided: Whether devices share the table; else each has all of it.
        std: Standard deviation of the initial table.
        dtype: Of the table.
        rngs: Where random weights come from.
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        is_divided: bool = True,
        std: float,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        split = padded(vocab_size) if is_divided else None, None
        self.embedding = parameter(normal(rngs.params(), (vocab_size, features), dtype, std), split)
        self.packed_head: PackedKernel | None = nnx.data(None)

    def forward(self, x: Int[Array, "..."], context: ForwardContext) -> Float[Array, "... e"]:
        return self.embedding[...][x]

    def logits(self, x: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the float32 logits of a head that is tied to this table."""
        if self.packed_head is not None:
            return products.multiply(x, self.packed_head[...], self.embedding.shape[0], jnp.float32)
        return jnp.einsum("...e,ve->...v", x, self.embedding[...], preferred_element_type=jnp.float32)

    def pack(self) -> None:
        """Packs the table as a head, beside the table: vectors are still read from that."""
        self.packed_head = PackedKernel(products.pack(self.embedding[...], transposed=True))


class RMSNorm(Module):
    """Root mean square norm, computed in float32.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(self, features: int, *, epsilon: float, dtype: jnp.dtype) -> None:
        self.scale = parameter(jnp.ones(features, dtype), (None,))
        self.epsilon = epsilon

    def forward(self, x: Float[Array, "... e"], context: ForwardContext) -> Float[Array, "... e"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return x32.astype(x.dtype) * self.scale[...]


class LayerNorm(Module):
    """Norm to mean 0 and variance 1, computed in float32, then scaled and shifted if `affine` and `bias`.

    Source: Ba et al., Layer Normalization, 2016.
    """

    def __init__(
        self, features: int, *, epsilon: float, affine: bool = True, bias: bool = True, dtype: jnp.dtype
    ) -> None:
        self.scale = parameter(jnp.ones(features, dtype), (None,)) if affine else None
        self.bias = parameter(jnp.zeros(features, dtype), (None,)) if affine and bias else None
        self.epsilon = epsilon

    def normalize(self, x: Float[Array, "... e"]) -> Float[Array, "... e"]:
        """Returns x with mean 0 and variance 1, in float32."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)

    def forward(self, x: Float[Array, "... e"], context: ForwardContext) -> Float[Array, "... e"]:
        x32 = self.normalize(x)
        if self.scale is not None:
            x32 = x32 * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            x32 = x32 + self.bias[...].astype(jnp.float32)
        return x32.astype(x.dtype)
