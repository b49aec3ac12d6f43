"""Qwen3VLForConditionalGeneration (Qwen3-VL): a Qwen3 with image input.

Differences from Qwen3:

- The encoder in qwen3_vision.py computes vectors that take the place of the embeddings of placeholder tokens.
- Additional vectors of the encoder are added to the outputs of the first text layers (DeepStack).
- The token of an image has three positions: the position of the image, a row and a column. Each pair of
  dimensions of a head is rotated by one of them (M-RoPE).

Source: Qwen Team, Qwen3-VL Technical Report, 2025; Wang et al., Qwen2-VL, 2024 (M-RoPE); names and semantics
of the weights as in Hugging Face's Qwen3VLForConditionalGeneration.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jax_paged.models.families.llama import WEIGHT_TABLE as LLAMA_TABLE
from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.families.qwen3_vision import Qwen3VisionConfig, Qwen3VisionEncoder
from jax_paged.models.forward_context import ForwardContext, SelfAttention
from jax_paged.models.hf_format import ConfigReader, WeightTable, multimodal_table
from jax_paged.models.image_inputs import PatchSpec
from jax_paged.models.quantization.config import read_quantization
from jax_paged.models.rope import rope_values

WEIGHT_TABLE = multimodal_table(LLAMA_TABLE, ()).with_names(
    (r"visual\.patch_embed", "model.visual.patch_embed.proj"),
    (r"visual\.(blocks\.\d+)\.(qkv|proj)", r"model.visual.\1.attn.\2"),
    (r"visual\.(blocks\.\d+)\.(linear_fc\d)", r"model.visual.\1.mlp.\2"),
    (r"visual\.(.*)", r"model.visual.\1"),
    transposed=r"(?!visual\.patch_embed).*\.kernel",
)
_TEXT_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0}
# Number of patches whose attention is computed at a time. The scores of all patches would not fit into
# memory.
_NUM_QUERIES = 256


@dataclasses.dataclass(frozen=True)
class Qwen3VLConfig(LlamaConfig):
    """Configuration of a Qwen3-VL: its text model and its image encoder.

    Args:
        image_token_id: Id of the placeholder token for image vectors.
        sections: Numbers of pairs of a head that are rotated by a token's first position (of its image, or in
            the text), by its row, and by its column.
        vision: Configuration of the image encoder.
    """

    image_token_id: int = 151655
    sections: tuple[int, ...] = (24, 20, 20)
    vision: Qwen3VisionConfig = dataclasses.field(default_factory=Qwen3VisionConfig)

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        text = read.nested("text_config", _TEXT_DEFAULTS | read.table("text_config"))
        text.choice("model_type", "qwen3_vl_text", ("qwen3_vl_text",))
        fields = super().read(text)
        read_quantization(read)
        rope = rope_values(text, fields["max_position_embeddings"])
        rope.choice("mrope_interleaved", True, (True,))
        sections, num_pairs = rope.get("mrope_section", list(cls.sections)), fields["head_dim"] // 2
        ok = isinstance(sections, list) and len(sections) == 3 and all(type(n) is int for n in sections)
        ok = ok and min(sections) >= 0 and sum(sections) == num_pairs
        allowed = f"a list of three integers of at least 0 with the sum {num_pairs}, half of head_dim"
        ok = rope.check(ok, "mrope_section", sections, allowed, also_needs=("head_dim",))
        vision = Qwen3VisionConfig.read(read.nested("vision_config", read.table("vision_config")))
        token_id = read.integer("image_token_id", cls.image_token_id, 0)
        for name, value, is_right, limit in (
            ("image_token_id", token_id, token_id < fields["vocab_size"], "below vocab_size of text_config"),
            (
                "vision_config.out_hidden_size",
                vision.out_hidden_size,
                vision.out_hidden_size == fields["hidden_size"],
                "equal to hidden_size of text_config",
            ),
            (
                "vision_config.deepstack_visual_indexes",
                vision.deepstack_visual_indexes,
                len(vision.deepstack_visual_indexes) <= fields["num_hidden_layers"],
                "a list of at most num_hidden_layers (of text_config) items",
            ),
        ):
            read.check(is_right, name, value, limit)
        return fields | {
            "mlp_bias": False,
            "qk_norm": True,
            "tie_word_embeddings": read.choice("tie_word_embeddings", False, (False, True)),
            "image_token_id": token_id,
            "sections": tuple(sections) if ok else (num_pairs, 0, 0),
            "vision": vision,
        }

    @property
    def axes(self) -> list[int]:
        """The index of the position (0, 1 or 2) that rotates each pair of a head.

        The three positions alternate until the pairs of a section are used up. From then on position 0 takes
        its place.
        """
        ends = [3 * num for num in self.sections]
        return [i % 3 if i < ends[i % 3] else 0 for i in range(self.head_dim // 2)]


class Qwen3VLForConditionalGeneration(LlamaForCausalLM):
    """A Qwen3-VL: a Qwen3 with an image encoder."""

    config_class: ClassVar[type[LlamaConfig]] = Qwen3VLConfig
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE
    config: Qwen3VLConfig

    def __init__(self, config: Qwen3VLConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.visual = Qwen3VisionEncoder(config.vision, dtype=dtype, rngs=rngs)

    @property
    def image_spec(self) -> PatchSpec:
        """The representation of images in prompts."""
        c, vision = self.config, self.config.vision
        paths = tuple(f"layers.{i}" for i in range(len(vision.deepstack_visual_indexes)))
        return PatchSpec(c.image_token_id, vision.patch_size, vision.spatial_merge_size, paths)

    def with_rotations(self, context: ForwardContext) -> ForwardContext:
        """Returns the context with the rotations of the tokens, by M-RoPE if it has such positions."""
        if context.mrope_positions is None:
            return super().with_rotations(context)
        by_pair = jnp.moveaxis(context.mrope_positions[jnp.array(self.config.axes)], 0, -1)
        rope = self.config.rope
        return dataclasses.replace(context, rotations={rope: rope.at_pair_positions(by_pair[..., None, :])})

    def encode_images(
        self,
        patches: UInt8[Array, "n s"],
        scale: Float[Array, " 3"],
        offset: Float[Array, " 3"],
        grid: Int[Array, " 2"],
    ) -> Float[Array, "m v"]:
        """Returns the concatenated vectors of each token of an image.

        Args:
            patches: Pixels, see image_inputs.Patches, padded to a multiple of spatial_merge_size**2 patches.
            scale: Factor of each channel.
            offset: Added to each channel after scaling.
            grid: Number of rows and columns of tokens.
        """
        vision = self.config.vision
        merge, num_rows, num_columns = vision.spatial_merge_size, *grid
        square, inside = jnp.divmod(jnp.arange(len(patches)), merge**2)
        # Padding is treated as part of the last row.
        row = jnp.minimum(square // num_columns, num_rows - 1) * merge + inside // merge
        at = jnp.stack([row, square % num_columns * merge + inside % merge])
        sizes = merge * grid[:, None]
        coordinates = at.astype(jnp.float32) * (vision.num_positions_per_side - 1) / jnp.maximum(sizes - 1, 1)
        num_pairs = len(vision.rope.frequencies) // 2
        rotation = vision.rope.at_pair_positions(jnp.repeat(at.T, num_pairs, axis=1)[:, None])
        attend, positions = _attend_to_first(sizes.prod()), jnp.arange(len(patches))
        context = ForwardContext(self, positions, attend, rotations={vision.rope: rotation})
        pixels = patches.reshape(len(patches), 3, -1) * scale[:, None] + offset[:, None]
        return self.visual((pixels.astype(self.embed_tokens.dtype), coordinates), context)


def _attend_to_first(num_keys: Int[Array, ""]) -> SelfAttention:
    """Returns an attention function in which all tokens attend to the first `num_keys` tokens.

    There is no causal mask.
    """

    def attend(
        layer: int, q: Array, k: Array | None, v: Array | None, *, scale: float, **_: Any
    ) -> Float[Array, "n h d"]:
        assert k is not None, "a layer of the image encoder has no keys"
        assert v is not None, "a layer of the image encoder has no values"

        def part(q: Array) -> Array:
            options = {"scale": scale, "key_value_seq_lengths": num_keys[None]}
            return jax.nn.dot_product_attention(q[None], k[None], v[None], **options)[0]

        num_parts = -(-len(q) // _NUM_QUERIES)
        size = -(-len(q) // num_parts)
        padded = jnp.pad(q, ((0, num_parts * size - len(q)), (0, 0), (0, 0)))
        out = lax.map(part, padded.reshape(num_parts, size, *q.shape[1:]))
        return out.reshape(padded.shape)[: len(q)]

    return attend
