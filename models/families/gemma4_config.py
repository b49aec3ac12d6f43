"""The config of Gemma 4's text models."""

import dataclasses
from typing import Any, ClassVar, Self

from jax_paged.models.families.gemma import GemmaConfig
from jax_paged.models.hf_format import ConfigReader, text_values
from jax_paged.models.rope import Rope, base_frequencies, read_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    """Shape of a Gemma 4's text model; head_dim and num_key_value_heads are those of layers with a window.

    Args:
        global_head_dim: Size of a head in layers without a window.
        num_global_key_value_heads: Key and value heads in these layers.
        attention_k_eq_v: Whether values are made of the keys' projection in these layers.
        num_kv_shared_layers: Layers at the end that attend to the keys and values of earlier ones.
        mlp_widths: Width of each layer's MLP.
        hidden_size_per_layer_input: Size of the vectors that each layer has for itself; 0 for none.
        vocab_size_per_layer_input: Tokens that have such vectors.
        num_experts: Experts beside each MLP; 0 for none.
        num_experts_per_tok: Experts per token.
        moe_intermediate_size: Width of an expert.
    """

    global_head_dim: int
    num_global_key_value_heads: int
    attention_k_eq_v: bool
    num_kv_shared_layers: int
    mlp_widths: tuple[int, ...]
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int

    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
    }

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        return super().from_hf({k: v for k, v in hf_config.items() if v is not None}, max_model_len)

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        fields = super(GemmaConfig, cls).read(read)
        read.choice("use_bidirectional_attention", None, (None, "vision"))  # which is about images only
        num_layers, num_shared = fields["num_hidden_layers"], read.integer("num_kv_shared_layers", 0, low=0)
        types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)]
        # transformers makes the last layer a full one, whatever config.json says.
        windows = (*read.windows(num_layers, types, read.integer("sliding_window"))[:-1], None)
        own = windows[: max(0, num_layers - num_shared)]
        allowed = f"so small that the first {num_layers} - num_kv_shared_layers layers have all types"
        needs = ("num_hidden_layers", "layer_types", "sliding_window")
        ok = set(own) == set(windows)
        read.check(ok, "num_kv_shared_layers", num_shared, allowed, also_needs=needs)
        is_wide = read.choice("use_double_wide_mlp", False, (False, True))
        width = fields["intermediate_size"]
        size = read.integer("hidden_size_per_layer_input", low=0)
        vocab_size, num_vectors = fields["vocab_size"], read.integer("vocab_size_per_layer_input")
        if size:
            allowed = f"at least vocab_size, which is {vocab_size}"
            ok = num_vectors >= vocab_size
            read.check(ok, "vocab_size_per_layer_input", num_vectors, allowed, also_needs=("vocab_size",))
        has_cap = read.get("final_logit_softcapping", None) is not None
        return (
            fields
            | {
                "mlp_bias": False,
                "qk_norm": True,
                "windows": windows,
                "window_rope": _rope(read, "sliding_attention", fields["head_dim"]),
                "query_pre_attn_scalar": 1.0,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": read.number("final_logit_softcapping") if has_cap else None,
                "num_kv_shared_layers": num_shared,
                "mlp_widths": (width,) * len(own) + (2 * width if is_wide else width,) * num_shared,
                "hidden_size_per_layer_input": size,
                "vocab_size_per_layer_input": num_vectors,
            }
            | cls.read_global_heads(read, fields, windows)
            | cls.read_experts(read, size)
        )

    @classmethod
    def read_max_positions(cls, read: ConfigReader, max_position_embeddings: int) -> int:
        return max_position_embeddings

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        # That of layers without a window needs the size of their heads, and is read with it.
        return Rope(())

    @staticmethod
    def read_global_heads(
        read: ConfigReader, fields: dict[str, Any], windows: tuple[int | None, ...]
    ) -> dict[str, Any]:
        """Returns the fields about the heads of layers without a window.

        There are two forms: global_head_dim beside num_global_key_value_heads, and per_layer_config, which
        transformers writes from 5.20 on.
        """
        same = read.choice("attention_k_eq_v", False, (False, True))
        heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
        given = read.table("per_layer_config")
        if given:
            full = [str(layer) for layer, window in enumerate(windows) if window is None]
            values = next(iter(given.values()))
            ok = given == dict.fromkeys(full, values) and isinstance(values, dict)
            ok = ok and values.keys() <= {"head_dim", "num_key_value_heads"}
            allowed = f"the same head_dim and num_key_value_heads for each of the layers {', '.join(full)}"
            needs = ("num_hidden_layers", "layer_types")
            ok = read.check(ok, "per_layer_config", given, allowed, also_needs=needs)
            values = read.nested("per_layer_config.full_attention", values if ok else {})
            head_dim = values.integer("head_dim", fields["head_dim"])
            kv_heads = values.integer("num_key_value_heads", kv_heads)
        else:
            head_dim = read.integer("global_head_dim")
            kv_heads = read.integer("num_global_key_value_heads", kv_heads) if same else kv_heads
        read.check(head_dim % 2 == 0, "global_head_dim", head_dim, "an even integer")
        allowed, needs = f"a divisor of num_attention_heads, which is {heads}", ("num_attention_heads",)
        ok = heads % kv_heads == 0
        read.check(ok, "num_global_key_value_heads", kv_heads, allowed, also_needs=needs)
        return {
            "global_head_dim": head_dim,
            "num_global_key_value_heads": kv_heads,
            "attention_k_eq_v": same,
            "rope": _rope(read, "full_attention", head_dim),
        }

    @staticmethod
    def read_experts(read: ConfigReader, per_layer_size: int) -> dict[str, int]:
        """Returns the fields about experts."""
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        if not read.choice("enable_moe_block", False, (False, True)):
            return dict.fromkeys(names, 0)
        allowed = "0 with enable_moe_block"
        read.check(per_layer_size == 0, "hidden_size_per_layer_input", per_layer_size, allowed)
        num, chosen = read.integer("num_experts"), read.integer("top_k_experts")
        allowed = f"at most num_experts, which is {num}"
        read.check(chosen <= num, "top_k_experts", chosen, allowed, also_needs=("num_experts",))
        return dict(zip(names, (num, chosen, read.integer("moe_intermediate_size")), strict=True))

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer attends to: itself, or an earlier one."""
        num_own = self.num_hidden_layers - self.num_kv_shared_layers
        if layer < num_own:
            return layer
        return max(i for i in range(num_own) if self.windows[i] == self.windows[layer])

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Returns the key and value heads of a layer, and their size."""
        if self.windows[layer] is None:
            return self.num_global_key_value_heads, self.global_head_dim
        return self.num_key_value_heads, self.head_dim


def _rope(read: ConfigReader, layer_type: str, head_dim: int) -> Rope:
    """Returns the rotary positions of one type of layers.

    "proportional" rotates some of the pairs as if all were rotated, and leaves the rest as they are.
    """
    name = "rope_parameters"
    values = read.nested(f"{name}.{layer_type}", read.nested(name, read.table(name)).table(layer_type))
    if values.get("rope_type", None) != "proportional":
        return read_rope(values, head_dim, read.integer("max_position_embeddings"))
    theta, factor = values.number("rope_theta", low=1.0), values.number("factor", 1.0)
    share = values.number("partial_rotary_factor", 1.0)
    values.check(share <= 1, "partial_rotary_factor", share, "a number above 0, at most 1")
    num_pairs, num_rotated = head_dim // 2, int(share * head_dim // 2)
    rotated = base_frequencies(head_dim, theta)[:num_rotated]
    return Rope(tuple(f / factor for f in rotated) + (0.0,) * (num_pairs - num_rotated))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4ConditionalConfig(Gemma4Config):
    """Shape of the text model in a checkpoint that reads images and sounds, too."""

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        return super().from_hf(text_values(hf_config), max_model_len)
