"""SigLIP's vision transformer, the image encoder of Idefics3 and SmolVLM.

Source: Zhai et al., Sigmoid Loss for Language Image Pre-Training, 2023; names and semantics of the weights as
in Hugging Face's Idefics3VisionTransformer.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.layers import ACTIVATIONS, Embedding, LayerNorm, Linear, normal, parameter


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """Configuration of a SigLIP encoder. Names are as in config.json, defaults as in transformers."""

    hidden_size: int = 1152
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 16
    image_size: int = 224
    patch_size: int = 32
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    @classmethod
    def read(cls, read: ConfigReader) -> Self:
        """Returns the configuration for a vision_config. Problems are noted in the reader."""
        read.choice("num_channels", 3, (3,))
        names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
        sizes = {name: read.integer(name, getattr(cls, name)) for name in names}
        heads, hidden_size = sizes["num_attention_heads"], sizes["hidden_size"]
        ok, allowed = hidden_size % heads == 0, f"a multiple of num_attention_heads, which is {heads}"
        read.check(ok, "hidden_size", hidden_size, allowed, also_needs=("num_attention_heads",))
        image_size = read.integer("image_size", cls.image_size)
        patch_size = read.integer("patch_size", cls.patch_size)
        ok, allowed = patch_size <= image_size, f"at most image_size, which is {image_size}"
        read.check(ok, "patch_size", patch_size, allowed, also_needs=("image_size",))
        return cls(
            **sizes,
            image_size=image_size,
            patch_size=patch_size,
            hidden_act=read.choice("hidden_act", cls.hidden_act, tuple(ACTIVATIONS)),
            layer_norm_eps=read.number("layer_norm_eps", cls.layer_norm_eps),
            initializer_range=read.number("initializer_range", cls.initializer_range, low_open=False),
        )

    @property
    def num_patches_per_side(self) -> int:
        """The number of whole patches per side; pixels after the last whole patch are not read."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """The number of patches of an image."""
        return self.num_patches_per_side**2


# On a CPU, torch.arange computes float32 numbers in groups of two vectors with 8 lanes (256 bits) each.
_ARANGE_LANES, _ARANGE_VECTORS = 8, 2


def position_ids(side: int) -> Int[np.ndarray, " n"]:
    """Returns the row of the position table for each patch of a square image, row by row.

    transformers (Idefics3VisionEmbeddings) computes the row and the column of a patch by bucketing fractions
    of the side in float32. For some sizes a fraction is rounded into the previous bucket, so that two rows
    share a position. To produce the same outputs as transformers, this function reproduces the rounding of
    PyTorch on a CPU bit for bit. The sizes of published models (26, 27, 32) are not affected.

    Args:
        side: Number of patches per side of the image.
    """
    starts = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    starts = np.minimum(starts, np.float32(1 - 1e-6))
    index = np.searchsorted(_bucket_boundaries(side), starts, side="right")
    return (index[:, None] * side + index).reshape(-1).astype(np.int32)


def _bucket_boundaries(side: int) -> Float[np.ndarray, " m"]:
    """Returns torch.arange(1 / side, 1.0, 1 / side) with the rounding errors of PyTorch on a CPU.

    PyTorch computes whole groups of vectors differently from the rest. In a group, an element is the first
    element of its vector, rounded to float32, plus a multiple of the step. Each element after the last group
    is a multiple of the step, rounded once.
    """
    step = 1 / side
    num = math.ceil((1.0 - step) / step)
    exact = step + step * np.arange(num)
    num_grouped = num - num % (_ARANGE_LANES * _ARANGE_VECTORS)
    first = exact[:num_grouped:_ARANGE_LANES].astype(np.float32).astype(np.float64)
    grouped = first[:, None] + step * np.arange(_ARANGE_LANES)
    return np.concatenate([grouped.reshape(-1), exact[num_grouped:]]).astype(np.float32)


class PatchEmbedding(Module):
    """Linear projection of every patch, that is, a convolution whose stride is the size of its kernel."""

    def __init__(self, config: SiglipConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.side, self.size = config.num_patches_per_side, config.patch_size
        # [out, channels, height, width], as in the checkpoint.
        shape = (config.hidden_size, 3, self.size, self.size)
        self.kernel = parameter(
            normal(rngs.params(), shape, dtype, config.initializer_range), (None,) * len(shape)
        )
        self.bias = parameter(jnp.zeros(config.hidden_size, dtype), (None,))

    def forward(self, x: Float[Array, "b 3 h w"], context: ForwardContext) -> Float[Array, "b n e"]:
        """Returns a vector for each patch, row by row."""
        whole = self.side * self.size
        patches = x[:, :, :whole, :whole].reshape(len(x), 3, self.side, self.size, self.side, self.size)
        y = jnp.einsum("bcihjw,echw->bije", patches, self.kernel[...])
        return y.reshape(len(x), self.side**2, -1) + self.bias[...]


class SiglipLayer(Module):
    """Attention of every patch to the whole image, then an MLP, each preceded by a norm and added."""

    same_input: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: SiglipConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config, self.layer = config, layer
        e, i, std = config.hidden_size, config.intermediate_size, config.initializer_range
        make = functools.partial(Linear, bias=True, split=(None, None), std=std, dtype=dtype, rngs=rngs)
        norm = functools.partial(LayerNorm, e, epsilon=config.layer_norm_eps, dtype=dtype)
        self.layer_norm1 = norm()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (make(e, e) for _ in range(4))
        self.layer_norm2 = norm()
        self.fc1, self.fc2 = make(e, i), make(i, e)

    def forward(self, x: Float[Array, "b n e"], context: ForwardContext) -> Float[Array, "b n e"]:
        """Returns the vectors after the layer."""
        y = self.layer_norm1(x, context)
        heads = (*y.shape[:-1], self.config.num_attention_heads, -1)
        q, k, v = (m(y, context).reshape(heads) for m in (self.q_proj, self.k_proj, self.v_proj))
        out = context.attend(self.layer, q, k, v, scale=q.shape[-1] ** -0.5)
        x = x + self.out_proj(out.reshape(y.shape), context)
        inner = ACTIVATIONS[self.config.hidden_act](self.fc1(self.layer_norm2(x, context), context))
        return x + self.fc2(inner, context)


class SiglipEncoder(Module):
    """Encoder for images of one size. `context.positions` contains the `position_ids` of the patches."""

    def __init__(self, config: SiglipConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.patches = PatchEmbedding(config, dtype=dtype, rngs=rngs)
        table: dict[str, Any] = {"std": config.initializer_range, "dtype": dtype, "rngs": rngs}
        self.positions = Embedding(config.num_patches, config.hidden_size, is_divided=False, **table)
        layers = range(config.num_hidden_layers)
        self.layers = nnx.List([SiglipLayer(config, i, dtype=dtype, rngs=rngs) for i in layers])
        self.norm = LayerNorm(config.hidden_size, epsilon=config.layer_norm_eps, dtype=dtype)

    def forward(self, x: Float[Array, "b 3 h w"], context: ForwardContext) -> Float[Array, "b n e"]:
        """Returns a vector for each patch."""
        x = self.patches(x, context) + self.positions(context.positions, context)
        for layer in self.layers:
            x = layer(x, context)
        return self.norm(x, context)
