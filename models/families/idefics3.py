"""Idefics3ForConditionalGeneration (Idefics3) and SmolVLMForConditionalGeneration (SmolVLM).

The text model is a Llama. Images are divided into square tiles. For each tile, a SigLIP encoder and a linear
layer (the connector) compute vectors that take the place of the embeddings of placeholder tokens.

Source: Laurençon et al., Building and better understanding vision-language models, 2024; Marafioti et al.,
SmolVLM, 2025; names and semantics of the weights as in Hugging Face's Idefics3ForConditionalGeneration.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, UInt8

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.families.siglip import SiglipConfig, SiglipEncoder, position_ids
from jax_paged.models.forward_context import ForwardContext
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.image_inputs import ImageSpec
from jax_paged.models.layers import Linear
from jax_paged.models.quantization.config import read_quantization

_TEXT, _VISION = "model.text_model.", "model.vision_model."
_LAYER = rf"{_VISION}encoder.layers.\1."
WEIGHT_TABLE = WeightTable(
    names=(
        (r"vision\.patches", f"{_VISION}embeddings.patch_embedding"),
        (r"vision\.positions", f"{_VISION}embeddings.position_embedding"),
        (r"vision\.layers\.(\d+)\.(\w+_proj)", rf"{_LAYER}self_attn.\2"),
        (r"vision\.layers\.(\d+)\.(fc\d)", rf"{_LAYER}mlp.\2"),
        (r"vision\.layers\.(\d+)\.(layer_norm\d)", rf"{_LAYER}\2"),
        (r"vision\.norm", f"{_VISION}post_layernorm"),
        (r"connector", "model.connector.modality_projection.proj"),
        (r"lm_head", "lm_head"),
    ),
    tied={"lm_head.weight": f"{_TEXT}embed_tokens.weight"},
    ignored=r"model\.text_model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    prefix="model.",
    start=_TEXT,
    transposed=r"(?!vision\.patches).*\.kernel",
)


@dataclasses.dataclass(frozen=True)
class Idefics3Config(LlamaConfig):
    """Configuration of an Idefics3 or a SmolVLM: its text model and its image encoder.

    Args:
        image_token_id: Id of the placeholder token for image vectors.
        scale_factor: Side of the square of patches that are merged into one vector.
        vision: Configuration of the image encoder.
    """

    image_token_id: int = 128257
    scale_factor: int = 2
    vision: SiglipConfig = dataclasses.field(default_factory=SiglipConfig)

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        text = read.nested("text_config", read.table("text_config"))
        text.choice("model_type", "llama", ("llama",))
        fields = super().read(text)
        read_quantization(read)
        vision = SiglipConfig.read(read.nested("vision_config", read.table("vision_config")))
        factor, side = read.integer("scale_factor", 2), vision.num_patches_per_side
        read.check(side % factor == 0, "scale_factor", factor, f"a divisor of {side}, the patches per side")
        token_id, size = read.integer("image_token_id", 128257, 0), fields["vocab_size"]
        needs = ("text_config.vocab_size",)
        ok, allowed = token_id < size, f"below vocab_size, which is {size}"
        read.check(ok, "image_token_id", token_id, allowed, also_needs=needs)
        return fields | {
            "tie_word_embeddings": read.choice("tie_word_embeddings", False, (False, True)),
            "image_token_id": token_id,
            "scale_factor": factor,
            "vision": vision,
        }


class Idefics3ForConditionalGeneration(LlamaForCausalLM):
    """An Idefics3: a Llama with an image encoder."""

    config_class: ClassVar[type[LlamaConfig]] = Idefics3Config
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE
    config: Idefics3Config

    def __init__(self, config: Idefics3Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        self.vision = SiglipEncoder(config.vision, dtype=dtype, rngs=rngs)
        self.connector = Linear(
            config.vision.hidden_size * config.scale_factor**2,
            config.hidden_size,
            bias=False,
            split=(None, None),
            std=config.initializer_range,
            dtype=dtype,
            rngs=rngs,
        )

    @property
    def image_spec(self) -> ImageSpec:
        """The representation of images in prompts."""
        c = self.config
        return ImageSpec(c.image_token_id, c.vision.num_patches // c.scale_factor**2, c.vision.image_size)

    def encode_images(
        self, tiles: UInt8[Array, "b 3 s s"], scale: Float[Array, "b 3"], offset: Float[Array, "b 3"]
    ) -> Float[Array, "b n e"]:
        """Returns the vectors that take the place of each tile's placeholder tokens.

        Args:
            tiles: Pixels, see image_inputs.Tile.
            scale: Factor of each channel.
            offset: Added to each channel after scaling.
        """
        pixels = tiles * scale[:, :, None, None] + offset[:, :, None, None]
        vision = self.config.vision
        ids = position_ids(vision.num_patches_per_side)
        positions = jnp.broadcast_to(ids, (len(tiles), vision.num_patches))
        context = ForwardContext(self, positions, _attend)
        x = self.vision(pixels.astype(self.embed_tokens.dtype), context)
        return self.connector(self._shuffled(x), context)

    def _shuffled(self, x: Float[Array, "b p e"]) -> Float[Array, "b n f"]:
        """Returns one vector per square of patches: the concatenated vectors of its patches."""
        side, factor = self.config.vision.num_patches_per_side, self.config.scale_factor
        num = side // factor
        squares = x.reshape(len(x), num, factor, num, factor, -1).transpose(0, 1, 3, 2, 4, 5)
        return squares.reshape(len(x), num * num, -1)


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """A SmolVLM, which has the architecture of Idefics3."""


def _attend(layer: int, q: Array, k: Array, v: Array, *, scale: float, **options: Any) -> Array:
    return jax.nn.dot_product_attention(q, k, v, scale=scale)
