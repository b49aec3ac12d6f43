"""Configuration of Gemma 4's text models."""

import dataclasses
from typing import Any, ClassVar, Self

from jax_paged.models.families.gemma import GemmaConfig
from jax_paged.models.hf_format import ConfigReader, text_values
from jax_paged.models.rope import Rope, base_frequencies, read_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Config(GemmaConfig):
    """Configuration of a Gemma 4 text model.

    head_dim and num_key_value_heads apply to the layers with a sliding window.

    Args:
        global_head_dim: Size of a head in layers with full attention.
        num_global_key_value_heads: Number of kv heads in layers with full attention.
        attention_k_eq_v: Whether layers with full attention compute values with the projection to keys.
        num_kv_shared_layers: Number of layers at the end that share the keys and values of earlier layers.
        mlp_widths: Width of each layer's MLP.
        hidden_size_per_layer_input: Size of the per-layer embeddings; 0 for none.
        vocab_size_per_layer_input: Number of tokens with per-layer embeddings.
        num_experts: Number of experts beside each MLP; 0 for none.
        num_experts_per_tok: Number of experts per token.
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
        """Returns the configuration for a parsed config.json. Values of None are treated as missing."""
        return super().from_hf({k: v for k, v in hf_config.items() if v is not None}, max_model_len)

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super(GemmaConfig, cls).read(read)  # the fields that GemmaConfig adds are read below
        read.choice("use_bidirectional_attention", None, (None, "vision"))  # "vision" concerns images only
        num_layers, num_shared = fields["num_hidden_layers"], read.integer("num_kv_shared_layers", 0, low=0)
        types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)]
        # In transformers the last layer always has full attention, whatever config.json says.
        windows = (*read.windows(num_layers, types, read.integer("sliding_window"))[:-1], None)
        own = windows[: max(0, num_layers - num_shared)]
        allowed = (
            f"small enough that the first {num_layers} - num_kv_shared_layers layers have all layer types"
        )
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
        """Returns the maximum length of a sequence (tokens)."""
        return max_position_embeddings

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        """Returns an empty rotary embedding; read_global_heads reads the actual one."""
        # The rotary embedding of layers with full attention depends on the size of their heads, and is read
        # together with it.
        return Rope(())

    @staticmethod
    def read_global_heads(
        read: ConfigReader, fields: dict[str, Any], windows: tuple[int | None, ...]
    ) -> dict[str, Any]:
        """Returns the fields that describe the heads of layers with full attention.

        config.json has two formats: global_head_dim and num_global_key_value_heads, or per_layer_config,
        which transformers writes since version 5.20.
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
            # As in transformers, this field is read only if attention_k_eq_v is true.
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
        """Returns the fields that describe the experts."""
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        if not read.choice("enable_moe_block", False, (False, True)):
            return dict.fromkeys(names, 0)
        allowed = "0 because enable_moe_block is true"
        read.check(per_layer_size == 0, "hidden_size_per_layer_input", per_layer_size, allowed)
        num, chosen = read.integer("num_experts"), read.integer("top_k_experts")
        allowed = f"at most num_experts, which is {num}"
        read.check(chosen <= num, "top_k_experts", chosen, allowed, also_needs=("num_experts",))
        return dict(zip(names, (num, chosen, read.integer("moe_intermediate_size")), strict=True))

    def kv_source(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer attends to: itself or an earlier layer."""
        num_own = self.num_hidden_layers - self.num_kv_shared_layers
        if layer < num_own:
            return layer
        return max(i for i in range(num_own) if self.windows[i] == self.windows[layer])

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Returns the number of kv heads of a layer, and their size."""
        if self.windows[layer] is None:
            return self.num_global_key_value_heads, self.global_head_dim
        return self.num_key_value_heads, self.head_dim


def _rope(read: ConfigReader, layer_type: str, head_dim: int) -> Rope:
    """Returns the rotary embedding of one layer type.

    The rope type "proportional" rotates only the first pairs of dimensions, with the frequencies that they
    would have if all pairs were rotated.
    """
    name = "rope_parameters"
    values = read.nested(f"{name}.{layer_type}", read.nested(name, read.table(name)).table(layer_type))
    if values.get("rope_type", None) != "proportional":
        return read_rope(values, head_dim, read.integer("max_position_embeddings"))
    theta, factor = values.number("rope_theta", low=1.0), values.number("factor", 1.0)
    share = values.number("partial_rotary_factor", 1.0)
    values.check(share <= 1, "partial_rotary_factor", share, "a number above 0 and at most 1")
    num_pairs, num_rotated = head_dim // 2, int(share * head_dim // 2)
    rotated = base_frequencies(head_dim, theta)[:num_rotated]
    return Rope(tuple(f / factor for f in rotated) + (0.0,) * (num_pairs - num_rotated))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4ConditionalConfig(Gemma4Config):
    """Configuration of the text model in a Gemma 4 checkpoint with image and audio input."""

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        """Returns the configuration for a parsed config.json, whose text values are in `text_config`."""
        return super().from_hf(text_values(hf_config), max_model_len)
