"""The image encoder of Qwen3-VL, a vision transformer for images of any size.

It computes a vector for each token of an image, which stands for a square of patches. It also computes
additional vectors (DeepStack), which are added to the outputs of the first layers of the text model.

Source: Qwen Team, Qwen3-VL Technical Report, 2025; Meng et al., DeepStack, 2024; names and semantics of the
weights as in Hugging Face's Qwen3VLVisionModel.
"""

import dataclasses
import functools
import math
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.layers import ACTIVATIONS, LayerNorm, Linear, normal, parameter
from jax_paged.models.rope import Rope, base_frequencies

_EPSILON = 1e-6  # epsilon of all norms


@dataclasses.dataclass(frozen=True)
class Qwen3VisionConfig:
    """Configuration of the encoder. Names are as in config.json, defaults as in transformers.

    Args:
        out_hidden_size: Size of the output vectors, which is the hidden size of the text model.
        num_position_embeddings: Number of vectors in the position table, which is a square.
        deepstack_visual_indexes: Layers after which DeepStack vectors are computed, in ascending order.
        rope_theta: Base of the rotary embedding.
    """

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_heads: int = 16
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    out_hidden_size: int = 3584
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    hidden_act: str = "gelu_pytorch_tanh"
    initializer_range: float = 0.02
    rope_theta: float = 10000.0

    @classmethod
    def read(cls, read: ConfigReader) -> Self:
        """Returns the configuration for a vision_config. Problems are noted in the reader."""
        read.choice("in_channels", 3, (3,))
        sizes = {f.name: read.integer(f.name, f.default) for f in dataclasses.fields(cls) if f.type is int}
        heads, size, depth = (sizes[name] for name in ("num_heads", "hidden_size", "depth"))
        allowed = f"a multiple of 4 * num_heads, which is {4 * heads}"
        read.check(size % (4 * heads) == 0, "hidden_size", size, allowed, also_needs=("num_heads",))
        layers = read.get("deepstack_visual_indexes", list(cls.deepstack_visual_indexes))
        ok = isinstance(layers, list | tuple) and all(type(i) is int and 0 <= i < depth for i in layers)
        ok = ok and sorted(set(layers)) == list(layers)
        allowed = f"an ascending list of distinct layer indices below depth, which is {depth}"
        ok = read.check(ok, "deepstack_visual_indexes", layers, allowed, also_needs=("depth",))
        rope = read.nested("rope_parameters", read.table("rope_parameters"))
        rope.choice("rope_type", "axial", ("axial",))
        return cls(
            **sizes,
            deepstack_visual_indexes=tuple(layers) if ok else (),
            hidden_act=read.choice("hidden_act", cls.hidden_act, tuple(ACTIVATIONS)),
            initializer_range=read.number("initializer_range", cls.initializer_range, low_open=False),
            rope_theta=rope.number("rope_theta", cls.rope_theta, low=1.0),
        )

    @property
    def num_positions_per_side(self) -> int:
        """The number of rows, and of columns, of the position table."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def rope(self) -> Rope:
        """The rotary embedding.

        Half of the pairs of a head are rotated by the row of a patch, the others by its column.
        """
        return Rope(2 * base_frequencies(self.hidden_size // self.num_heads // 2, self.rope_theta))


class Qwen3PatchEmbedding(Module):
    """Linear projection of every patch.

    The projection is made for patches of videos. An image is treated as a video of equal frames.
    """

    def __init__(self, config: Qwen3VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        size, self.num_frames = config.patch_size, config.temporal_patch_size
        # [out, channels, frames, height, width], as in the checkpoint.
        shape = config.hidden_size, 3, self.num_frames, size, size
        kernel = normal(rngs.params(), shape, dtype, config.initializer_range)
        self.kernel = parameter(kernel, (None,) * len(shape))
        self.bias = parameter(jnp.zeros(config.hidden_size, dtype), (None,))

    def forward(self, x: Float[Array, "n 3 s"], context: ForwardContext) -> Float[Array, "n e"]:
        """Returns a vector for each patch."""
        n, channels, size = x.shape
        frames = jnp.broadcast_to(x[:, :, None], (n, channels, self.num_frames, size))
        kernel = self.kernel[...].reshape(self.kernel.shape[0], -1)
        return frames.reshape(n, -1) @ kernel.T + self.bias[...]


class GridPositions(Module):
    """Table of position embeddings on a square grid, with bilinear interpolation between its entries."""

    def __init__(self, config: Qwen3VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.side = config.num_positions_per_side
        shape = config.num_position_embeddings, config.hidden_size
        table = normal(rngs.params(), shape, dtype, config.initializer_range)
        self.embedding = parameter(table, (None, None))

    def forward(self, x: Float[Array, "2 n"], context: ForwardContext) -> Float[Array, "n e"]:
        """Returns float32 position embeddings.

        Args:
            x: Row and column of each patch, as fractional coordinates in the table.
            context: Context of the forward pass.
        """
        low = jnp.floor(x)
        share = x - low

        def tap(corner: Int[np.ndarray, "2 1"]) -> Array:
            row, column = jnp.clip(low.astype(jnp.int32) + corner, 0, self.side - 1)
            weights = jnp.where(corner, share, 1 - share).prod(axis=0)
            vectors = self.embedding[...][row * self.side + column]
            return vectors.astype(jnp.float32) * weights[:, None]

        first, *rest = (tap(np.array([[i], [j]])) for i in (0, 1) for j in (0, 1))
        return functools.reduce(jnp.add, rest, first)


class Qwen3VisionBlock(Module):
    """Attention of every patch to the whole image, then an MLP, each preceded by a norm and added."""

    def __init__(self, config: Qwen3VisionConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config, self.layer = config, layer
        e, i, std = config.hidden_size, config.intermediate_size, config.initializer_range
        make = functools.partial(Linear, bias=True, split=(None, None), std=std, dtype=dtype, rngs=rngs)
        self.norm1, self.norm2 = (LayerNorm(e, epsilon=_EPSILON, dtype=dtype) for _ in range(2))
        self.qkv, self.proj = make(e, 3 * e), make(e, e)
        self.linear_fc1, self.linear_fc2 = make(e, i), make(i, e)

    def forward(self, x: Float[Array, "n e"], context: ForwardContext) -> Float[Array, "n e"]:
        """Returns the vectors after the layer."""
        heads = len(x), 3, self.config.num_heads, -1
        qkv = self.qkv(self.norm1(x, context), context).reshape(heads)
        q, k, v = (qkv[:, i] for i in range(3))
        rotate = context.rotations[self.config.rope]
        out = context.attend(self.layer, rotate(q), rotate(k), v, scale=q.shape[-1] ** -0.5)
        x = x + self.proj(out.reshape(x.shape), context)
        inner = ACTIVATIONS[self.config.hidden_act](self.linear_fc1(self.norm2(x, context), context))
        return x + self.linear_fc2(inner, context)


class Qwen3VisionMerger(Module):
    """MLP that merges the vectors of a square of patches into one.

    Args:
        norms_squares: Whether the norm applies to the concatenated vectors of a square; otherwise it applies
            to each patch.
    """

    def __init__(
        self, config: Qwen3VisionConfig, *, norms_squares: bool, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.size = config.hidden_size * config.spatial_merge_size**2
        std = config.initializer_range
        make = functools.partial(Linear, bias=True, split=(None, None), std=std, dtype=dtype, rngs=rngs)
        norm_size = self.size if norms_squares else config.hidden_size
        self.norm = LayerNorm(norm_size, epsilon=_EPSILON, dtype=dtype)
        self.norm_size = norm_size
        self.linear_fc1, self.linear_fc2 = make(self.size, self.size), make(self.size, config.out_hidden_size)

    def forward(self, x: Float[Array, "n e"], context: ForwardContext) -> Float[Array, "m o"]:
        """Returns a vector for each square of patches."""
        x = self.norm(x.reshape(-1, self.norm_size), context).reshape(-1, self.size)
        return self.linear_fc2(ACTIVATIONS["gelu"](self.linear_fc1(x, context)), context)


class Qwen3VisionEncoder(Module):
    """The whole encoder."""

    def __init__(self, config: Qwen3VisionConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.deepstack_layers = config.deepstack_visual_indexes
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.patch_embed, self.pos_embed = Qwen3PatchEmbedding(config, **args), GridPositions(config, **args)
        self.blocks = nnx.List([Qwen3VisionBlock(config, i, **args) for i in range(config.depth)])
        self.merger = Qwen3VisionMerger(config, norms_squares=False, **args)
        mergers = [Qwen3VisionMerger(config, norms_squares=True, **args) for _ in self.deepstack_layers]
        self.deepstack_merger_list = nnx.List(mergers)

    def forward(
        self, x: tuple[Float[Array, "n 3 s"], Float[Array, "2 n"]], context: ForwardContext
    ) -> Float[Array, "m o"]:
        """Returns, for each square of patches, the token's vector followed by the DeepStack vectors.

        Args:
            x: The patches, and their coordinates in the position table.
            context: Context of the forward pass.
        """
        patches, coordinates = x
        y = self.patch_embed(patches, context)
        y = y + self.pos_embed(coordinates, context).astype(y.dtype)
        added = []
        for i, block in enumerate(self.blocks):
            y = block(y, context)
            if i in self.deepstack_layers:
                added.append(self.deepstack_merger_list[len(added)](y, context))
        return jnp.concatenate([self.merger(y, context), *added], axis=-1)
