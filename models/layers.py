"""Layers that several families share: linear maps, embeddings, norms and activations."""

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
from jax_paged.models.quantization import packed_weight
from jax_paged.models.quantization.packed_weight import PackedWeight
from jax_paged.models.quantization.quantized_linear import QuantizedWeight
from jax_paged.pallas_kernels.native import products, quantized_products


def _in_float32(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Returns an activation that computes in float32 and rounds its result once.

    This is faster than rounding after each operation.
    """
    return lambda x: activation(x.astype(jnp.float32)).astype(x.dtype)


# Activation functions by their names in config.json.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": _in_float32(jax.nn.silu),
    "relu": jax.nn.relu,
    "gelu": _in_float32(functools.partial(jax.nn.gelu, approximate=False)),
    "gelu_new": _in_float32(functools.partial(jax.nn.gelu, approximate=True)),
    "gelu_pytorch_tanh": _in_float32(functools.partial(jax.nn.gelu, approximate=True)),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def parameter(value: Array, split: Split) -> nnx.Param:
    """Returns a weight whose metadata says how each dimension is divided among devices.

    Args:
        value: The initial value.
        split: The units of each dimension; see parallel/sharding.py.
    """
    return nnx.Param(value, split=split)


class Float32Param(nnx.Param[Array]):
    """Weight that stays float32 in a model of another dtype."""


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "std"))
def normal(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, std: float) -> Array:
    """Returns an initial weight, drawn from a normal distribution with mean 0.

    The function is jitted, so that no temporary array is allocated.

    Args:
        key: PRNG key.
        shape: Shape of the weight.
        dtype: The dtype of the weight.
        std: Standard deviation.
    """
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)


class PackedKernel(nnx.Variable[Array]):
    """Weight matrix in the packed layout of oneDNN (pallas_kernels/native/products.py).

    It can only be used for inference. Linear maps with the same input may share one packed array, which then
    holds their matrices side by side. The array is uint8 [bytes].
    """


class Linear(Module):
    """Linear map y = x @ kernel + bias.

    The kernel, the weight matrix, is float [in_features, out_features]. Loading a model may replace it with a
    QuantizedWeight, a PackedWeight or a PackedKernel.

    Args:
        in_features: Size of x.
        out_features: Size of y.
        bias: Whether the map has a bias.
        split: How each dimension of the kernel is divided among devices.
        std: Standard deviation of the initial kernel.
        dtype: The dtype of the weights.
        rngs: Source of the random initial weights.
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
        # If the packed kernel is shared with other maps: this map's first column in it, and the number of
        # columns of all maps together.
        self.first_column, self.num_columns = 0, out_features
        self.kernel: nnx.Param | PackedKernel | QuantizedWeight | PackedWeight = parameter(
            normal(rngs.params(), (in_features, out_features), dtype, std), split
        )
        self.bias = parameter(jnp.zeros(out_features, dtype), split[1:]) if bias else None

    def forward(self, x: Float[Array, "... i"], context: ForwardContext) -> Float[Array, "... o"]:
        """Returns x @ kernel + bias.

        Args:
            x: float [..., in_features].
            context: The context of this forward pass.

        Returns:
            float [..., out_features].
        """
        y = self.product(x, is_divided=context.grid is not None and self.split[0] is not None)
        return y if self.bias is None else y + self.bias[...]

    def logits(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        """Returns x @ kernel + bias in float32, whatever the dtype of the weights.

        Args:
            x: float [..., in_features].

        Returns:
            float32 [..., out_features].
        """
        y = self.product(x, jnp.float32)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)

    def product(
        self, x: Float[Array, "... i"], dtype: DTypeLike | None = None, *, is_divided: bool = False
    ) -> Float[Array, "... o"]:
        """Returns x @ kernel, without the bias.

        Args:
            x: float [..., in_features].
            dtype: The dtype of the result; None for the dtype of x.
            is_divided: Whether the rows of the kernel are divided among devices; see QuantizedWeight.product.

        Returns:
            [..., out_features].
        """
        if isinstance(self.kernel, PackedKernel):
            y = products.multiply(x, self.kernel[...], self.num_columns, dtype or x.dtype)
            return y[..., self.first_column : self.first_column + self.out_features]
        if isinstance(self.kernel, PackedWeight):
            y = self.kernel.product(x, dtype or x.dtype)
            return y[..., self.first_column : self.first_column + self.out_features]
        if isinstance(self.kernel, QuantizedWeight):
            return self.kernel.product(x, dtype or x.dtype, is_divided=is_divided)
        return jnp.matmul(x, self.kernel[...], preferred_element_type=dtype)

    @staticmethod
    def pack(maps: "Sequence[Linear]") -> None:
        """Replaces the kernels of linear maps that have the same input by one packed kernel.

        Each map multiplies its input by the whole packed kernel and returns its own columns. If the inputs
        are the same array, the products are identical, and XLA computes them once.

        Args:
            maps: Linear maps with the same in_features and without quantized kernels.
        """
        kernel = PackedKernel(products.pack(jnp.concatenate([m.kernel[...] for m in maps], axis=1)))
        columns = np.cumsum([0, *(m.out_features for m in maps)]).tolist()
        for m, first in zip(maps, columns, strict=False):
            m.kernel, m.first_column, m.num_columns = kernel, first, columns[-1]

    @staticmethod
    def pack_quantized(maps: "Sequence[Linear]") -> None:
        """Replaces the quantized kernels of linear maps that have the same input by packed ones.

        Kernels that cannot be packed remain as they are. See `pack` for kernels that share a packed one.

        Args:
            maps: Linear maps with a QuantizedWeight and the same in_features.
        """
        kernels = [m.kernel for m in maps if isinstance(m.kernel, QuantizedWeight)]
        found = packed_weight.pack(kernels)
        for m, (kernel, first) in zip(maps, found or (), strict=found is not None):
            m.kernel, m.first_column = kernel, first


def gated(
    activation: str, gate: Linear, up: Linear, x: Float[Array, "... i"], context: ForwardContext
) -> Float[Array, "... o"]:
    """Returns activation(gate(x)) * up(x).

    This is one native call if both kernels are packed, there are no biases, the native library has the
    activation, and neither map has a hook or an adapter. In that case `context.run` is not called for the two
    maps.

    Args:
        activation: Name of an activation in ACTIVATIONS.
        gate: The linear map that the activation is applied to.
        up: The linear map whose output is gated; it has the same sizes.
        x: float [..., in_features], the input of both maps.
        context: The context of this forward pass.

    Returns:
        float [..., out_features].
    """
    kernels = gate.kernel, up.kernel
    is_packed = all(isinstance(kernel, PackedKernel) for kernel in kernels) and gate.bias is up.bias is None
    if is_packed and activation != "relu2" and not context.is_edited(gate, up):
        packed_gate, packed_up = (kernel[...] for kernel in kernels)
        return products.multiply_gated(x, packed_gate, packed_up, gate.out_features, activation)
    if all(isinstance(kernel, PackedWeight) for kernel in kernels) and gate.bias is up.bias is None:
        parts = tuple(kernel.packed for kernel in kernels)
        keys = {quantized_products.mergeable(part) for part in parts}
        is_native = activation in quantized_products.ACTIVATIONS and len(keys) == 1 and None not in keys
        if is_native and not context.is_edited(gate, up):
            return quantized_products.multiply_gated(x, *parts, activation)
    return ACTIVATIONS[activation](gate(x, context)) * up(x, context)


class Embedding(Module):
    """Token embedding table, which may also serve as the output head (tied embeddings).

    Args:
        vocab_size: Number of vectors.
        features: Size of a vector.
        is_divided: Whether the vectors are divided among devices. If not, each device has the whole table.
        std: Standard deviation of the initial table.
        dtype: The dtype of the table.
        rngs: Source of the random initial weights.
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
        # A quantized table is stored as a head matrix, [features, vocab_size].
        self.embedding: nnx.Param | QuantizedWeight | PackedWeight = parameter(
            normal(rngs.params(), (vocab_size, features), dtype, std), split
        )
        self.dtype, self.vocab_size = dtype, vocab_size
        self.packed_head: PackedKernel | None = nnx.data(None)

    def forward(self, x: Int[Array, "..."], context: ForwardContext) -> Float[Array, "... e"]:
        """Returns the vectors of some tokens.

        Args:
            x: int32 [...], token ids.
            context: The context of this forward pass.

        Returns:
            float [..., E].
        """
        if isinstance(self.embedding, PackedWeight):
            return self.embedding.columns(x, self.dtype)
        if isinstance(self.embedding, QuantizedWeight):
            return packed_weight.float_columns(self.embedding, x, self.dtype)
        return self.embedding[...][x]

    def logits(self, x: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the logits of an output head that is tied to this table.

        Args:
            x: float [..., E].

        Returns:
            float32 [..., V].
        """
        if isinstance(self.embedding, PackedWeight | QuantizedWeight):
            return self.embedding.product(x, jnp.float32)
        if self.packed_head is not None:
            return products.multiply(x, self.packed_head[...], self.embedding.shape[0], jnp.float32)
        return jnp.einsum("...e,ve->...v", x, self.embedding[...], preferred_element_type=jnp.float32)

    def pack(self) -> None:
        """Packs a transposed copy of the table for `logits`, if the table consists of floats.

        The table itself is kept, and `forward` still reads from it.
        """
        assert isinstance(self.embedding, nnx.Param), "a quantized table needs no copy"
        self.packed_head = PackedKernel(products.pack(self.embedding[...], transposed=True))


class RMSNorm(Module):
    """Root mean square norm, computed in float32.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
    """

    def __init__(self, features: int, *, epsilon: float, dtype: jnp.dtype) -> None:
        self.scale = parameter(jnp.ones(features, dtype), (None,))
        self.epsilon = epsilon

    def forward(self, x: Float[Array, "... e"], context: ForwardContext) -> Float[Array, "... e"]:
        """Returns x divided by its root mean square over the last dimension, times the learned scale.

        Args:
            x: float [..., E].
            context: The context of this forward pass.

        Returns:
            float [..., E].
        """
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return x32.astype(x.dtype) * self.scale[...]


class LayerNorm(Module):
    """Norm to mean 0 and variance 1, computed in float32, with an optional scale and bias.

    Args:
        features: Size of the last dimension.
        epsilon: Added to the variance.
        affine: Whether there is a learned scale.
        bias: Whether there is a learned bias. Ignored without `affine`.
        dtype: The dtype of scale and bias.

    Source: Ba et al., Layer Normalization, 2016.
    """

    def __init__(
        self, features: int, *, epsilon: float, affine: bool = True, bias: bool = True, dtype: jnp.dtype
    ) -> None:
        self.scale = parameter(jnp.ones(features, dtype), (None,)) if affine else None
        self.bias = parameter(jnp.zeros(features, dtype), (None,)) if affine and bias else None
        self.epsilon = epsilon

    def normalize(self, x: Float[Array, "... e"]) -> Float[Array, "... e"]:
        """Returns x with mean 0 and variance 1 over the last dimension.

        Args:
            x: float [..., E].

        Returns:
            float32 [..., E].
        """
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)

    def forward(self, x: Float[Array, "... e"], context: ForwardContext) -> Float[Array, "... e"]:
        """Returns the normalized x, times the scale and plus the bias.

        Args:
            x: float [..., E].
            context: The context of this forward pass.

        Returns:
            float [..., E].
        """
        x32 = self.normalize(x)
        if self.scale is not None:
            x32 = x32 * self.scale[...].astype(jnp.float32)
        if self.bias is not None:
            x32 = x32 + self.bias[...].astype(jnp.float32)
        return x32.astype(x.dtype)
