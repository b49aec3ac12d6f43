"""SmolLM3ForCausalLM (SmolLM3): a Llama in which, by default, every fourth layer has no rotary embedding.

If sliding windows are enabled, the layers without rotary embedding have one.

Source: Bakouch et al., SmolLM3, 2025.
"""

import dataclasses
from typing import Any, ClassVar

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """Configuration of a SmolLM3.

    Args:
        rotated_layers: Whether each layer has a rotary embedding.
    """

    rotated_layers: tuple[bool, ...]

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        num_layers = fields["num_hidden_layers"]
        interval = read.integer("no_rope_layer_interval", 4)
        rotated = read.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(num_layers)])
        ok = isinstance(rotated, list) and len(rotated) >= num_layers and all(x in (0, 1) for x in rotated)
        allowed = (
            f"a list of at least {num_layers} items (num_hidden_layers), each 1 (with rotary embedding) or 0 "
            "(without)"
        )
        ok = read.check(ok, "no_rope_layers", rotated, allowed, also_needs=("num_hidden_layers",))
        rotated = rotated[:num_layers] if ok else [1] * num_layers
        has_window = read.choice("use_sliding_window", False, (False, True))
        has_window = has_window and read.get("sliding_window", None) is not None
        types = ["sliding_attention" if has_window and not x else "full_attention" for x in rotated]
        window = read.integer("sliding_window") if has_window else None
        windows = read.windows(num_layers, types, window)
        return fields | {"rotated_layers": tuple(map(bool, rotated)), "windows": windows}

    def rope_of(self, layer: int) -> Rope:
        """Returns the rotary embedding of a layer; an empty one for layers without rotation."""
        return self.rope if self.rotated_layers[layer] else Rope(())


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """A Llama in which some layers have no rotary embedding."""

    config_class: ClassVar[type[LlamaConfig]] = SmolLM3Config
