"""LlamaForCausalLM (Llama 1 to 3), and the base classes of the similar families.

A decoder layer consists of grouped-query attention with rotary position embeddings (RoPE), and a SwiGLU MLP.
Each is preceded by RMSNorm and added to the residual stream. Other families (mistral.py, qwen.py, phi3.py,
...) derive their config and modules from the classes here and override the parts that differ.

Source: Touvron et al., LLaMA, 2023; names and semantics of the weights as in Hugging Face's LlamaForCausalLM.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import ACTIVATIONS, Embedding, Linear, RMSNorm, gated
from jax_paged.models.parallel.sharding import Units, even, padded, repeated
from jax_paged.models.quantization.config import COMMON_METHODS, read_quantization
from jax_paged.models.rope import Rope, max_positions, read_rope, rope_values

WEIGHT_TABLE = WeightTable(
    names=((r"lm_head", "lm_head"),),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    prefix="model.",
)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Configuration of a Llama or a similar model; most names are as in config.json.

    Args:
        max_position_embeddings: Maximum length of a sequence (tokens). This is config.json's value after RoPE
            scaling; see rope.max_positions.
        rope: Rotary embedding.
        windows: Sliding window of each layer (tokens), None for full attention; empty if no layer has a
            window.
        attention_bias: Whether the projections to queries, keys and values have biases.
        output_bias: Whether the output projection of the attention has a bias.
        rms_norm_eps: Epsilon of the norms, also if they are not RMSNorm.
        qk_norm: Whether queries and keys are normalized.
        num_labels: Number of classes of a classifier; 0 for other models.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: Rope
    windows: tuple[int | None, ...] = ()
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    num_labels: int = 0

    # Values that transformers assumes for keys that config.json omits.
    defaults: ClassVar[dict[str, Any]] = {}
    # Fields whose values do not depend on config.json.
    fixed: ClassVar[dict[str, Any]] = {}
    activation_name: ClassVar[str] = "hidden_act"
    activations: ClassVar[tuple[str, ...]] = tuple(ACTIVATIONS)
    epsilon_name: ClassVar[str] = "rms_norm_eps"
    quantization_methods: ClassVar[tuple[str, ...]] = COMMON_METHODS
    # Whether config.json may exclude dimensions of a head from the rotation (partial_rotary_factor), and
    # whether the rotation pairs adjacent dimensions (Rope.is_interleaved).
    is_partly_rotated: ClassVar[bool] = False
    is_interleaved: ClassVar[bool] = False

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        """Returns the configuration for a parsed config.json, written by transformers 5 or older.

        Args:
            hf_config: The parsed config.json. Sizes such as hidden_size must be present. Other missing fields
                have the default values of transformers.
            max_model_len: Maximum length of a sequence that the user requests; see rope.max_positions.

        Raises:
            ValueError: If values are missing, out of range or not supported; the message lists all of them.
        """
        read = ConfigReader(cls.defaults | hf_config, max_model_len=max_model_len)
        fields = cls.read(read) | cls.fixed
        read.finish()
        return cls(**fields)

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass. Subclasses override the fields that they read differently."""
        hidden_size = read.integer("hidden_size")
        heads = read.integer("num_attention_heads")
        kv_heads = read.integer("num_key_value_heads", heads)
        ok, allowed = heads % kv_heads == 0, f"a divisor of num_attention_heads, which is {heads}"
        read.check(ok, "num_key_value_heads", kv_heads, allowed, also_needs=("num_attention_heads",))
        head_dim = read.integer("head_dim", max(1, hidden_size // heads))
        if read.get("head_dim", None) is None:
            ok, allowed = hidden_size % heads == 0, f"a multiple of num_attention_heads, which is {heads}"
            read.check(ok, "hidden_size", hidden_size, allowed, also_needs=("num_attention_heads",))
        derived_from = ("hidden_size", "num_attention_heads")
        read.check(head_dim % 2 == 0, "head_dim", head_dim, "an even integer", also_needs=derived_from)
        read_quantization(read, cls.quantization_methods)
        attention_bias = read.choice("attention_bias", False, (False, True))
        trained_positions = read.integer("max_position_embeddings")
        return {
            "hidden_size": hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": read.integer("vocab_size"),
            "intermediate_size": read.integer("intermediate_size"),
            "num_hidden_layers": read.integer("num_hidden_layers"),
            "max_position_embeddings": cls.read_max_positions(read, trained_positions),
            "rope": cls.read_rope(read, head_dim, trained_positions),
            "hidden_act": read.choice(cls.activation_name, "silu", cls.activations),
            "rms_norm_eps": read.number(cls.epsilon_name, 1e-6),
            "tie_word_embeddings": read.choice("tie_word_embeddings", False, (False, True)),
            "attention_bias": attention_bias,
            "output_bias": attention_bias,
            "mlp_bias": read.choice("mlp_bias", False, (False, True)),
            "initializer_range": read.number("initializer_range", 0.02, low_open=False),
            "num_labels": read.num_labels(),
        }

    @classmethod
    def read_max_positions(cls, read: ConfigReader, max_position_embeddings: int) -> int:
        """Returns the maximum length of a sequence (tokens).

        Args:
            read: Reader of config.json.
            max_position_embeddings: The value in config.json.
        """
        rope = rope_values(read, max_position_embeddings)
        return max_positions(rope, max_position_embeddings, read.max_model_len)

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        """Returns the rotary embedding.

        Args:
            read: Reader of config.json.
            head_dim: Elements of a head.
            max_position_embeddings: The value in config.json.
        """
        values = rope_values(read, max_position_embeddings)
        limits = max_position_embeddings, 10000.0, read.max_model_len
        rope = read_rope(values, head_dim, *limits, is_partial=cls.is_partly_rotated)
        return dataclasses.replace(rope, is_interleaved=cls.is_interleaved)

    def rope_of(self, layer: int) -> Rope:
        """Returns the rotary embedding of a layer."""
        return self.rope

    @staticmethod
    def one_window(read: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
        """Returns the window of each layer if all layers have `sliding_window`; () if there is none."""
        if read.get("sliding_window", None) is None:
            return ()
        return (read.integer("sliding_window"),) * num_layers

    @staticmethod
    def patterned_windows(read: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
        """Returns the window of each layer; without `layer_types`, every n-th layer has full attention.

        n is `sliding_window_pattern`. All other layers have `sliding_window`.
        """
        pattern = read.integer("sliding_window_pattern")
        types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers)]
        return read.windows(num_layers, types, read.integer("sliding_window"))


class LlamaAttention(Module):
    """Projections and rotary embedding. How tokens attend to each other is determined by the context."""

    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    same_input: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: Any, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config, self.layer = config, layer
        self.rope: Rope = config.rope_of(layer)
        self.scale: float = config.head_dim**-0.5
        self.soft_cap: float | None = None
        make = functools.partial(Linear, std=config.initializer_range, dtype=dtype, rngs=rngs)
        heads, size = config.num_attention_heads, config.head_dim
        self.make_projections(make)
        self.o_proj = make(
            heads * size, config.hidden_size, bias=config.output_bias, split=(even(heads, size), None)
        )
        kv_heads = config.num_key_value_heads
        self.q_norm = self.make_norm(even(heads, size), dtype) if config.qk_norm else None
        self.k_norm = self.make_norm(repeated(kv_heads, size), dtype) if config.qk_norm else None

    def make_projections(self, make: Callable[..., Linear]) -> None:
        """Creates the projections to queries, keys and values.

        Args:
            make: Creates a linear layer.
        """
        c = self.config
        make = functools.partial(make, c.hidden_size, bias=c.attention_bias)
        heads, kv_heads = even(c.num_attention_heads, c.head_dim), repeated(c.num_key_value_heads, c.head_dim)
        self.q_proj = make(c.num_attention_heads * c.head_dim, split=(None, heads))
        kv_width = c.num_key_value_heads * c.head_dim
        self.k_proj, self.v_proj = (make(kv_width, split=(None, kv_heads)) for _ in range(2))

    def make_norm(self, heads: tuple[Units, ...], dtype: jnp.dtype) -> Module:
        """Returns the module that normalizes queries or keys; in this class each head separately.

        Args:
            heads: The heads, and how they are divided among devices.
            dtype: Dtype of the weights.
        """
        return self.norm_class(self.config.head_dim, epsilon=self.config.rms_norm_eps, dtype=dtype)

    def project(self, x: Float[Array, "*t e"], context: ForwardContext) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values, each with its heads concatenated: [*t, heads * head_dim]."""
        return self.q_proj(x, context), self.k_proj(x, context), self.v_proj(x, context)

    def normalize_qk(self, q: Array, k: Array, context: ForwardContext) -> tuple[Array, Array]:
        """Returns queries and keys [*t, heads, head_dim], normalized if the model normalizes them.

        The rotary embedding follows.
        """
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q, context), self.k_norm(k, context)

    def rotate_qk(self, q: Array, k: Array, context: ForwardContext) -> tuple[Array, Array]:
        """Returns queries and keys [*t, heads, head_dim] after the rotary embedding."""
        rotate = context.rotations[self.rope]
        return rotate(q), rotate(k)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the attention block."""
        heads = (*x.shape[:-1], -1, self.config.head_dim)
        q, k, v = (y.reshape(heads) for y in self.project(x, context))
        q, k = self.normalize_qk(q, k, context)
        q, k = self.rotate_qk(q, k, context)
        out = self.attend(q, k, v, context)
        return self.o_proj(out.reshape(*x.shape[:-1], -1), context)

    def attend(self, q: Array, k: Array, v: Array, context: ForwardContext) -> Float[Array, "*t h d"]:
        """Returns the attention of every token, for rotated queries and keys."""
        return context.attend(self.layer, q, k, v, scale=self.scale, soft_cap=self.soft_cap)


class LlamaMLP(Module):
    """A gated MLP: SwiGLU, unless the config names another activation."""

    def __init__(self, config: Any, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.activation = config.hidden_act
        make = functools.partial(
            Linear, bias=config.mlp_bias, std=config.initializer_range, dtype=dtype, rngs=rngs
        )
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (make(size, inner, split=(None, even(inner))) for _ in range(2))
        self.down_proj = make(inner, size, split=(even(inner), None))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the MLP."""
        return self.down_proj(gated(self.activation, self.gate_proj, self.up_proj, x, context), context)


class LlamaDecoderLayer(Module):
    """Decoder layer: attention, then the MLP, each preceded by a norm and added to the residual stream."""

    attention_class: ClassVar[Callable[..., Module]] = LlamaAttention
    norm_class: ClassVar[Callable[..., Module]] = RMSNorm
    mlp_class: ClassVar[Callable[..., Module]] = LlamaMLP

    def __init__(self, config: Any, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.make_norms(functools.partial(self.norm_class, size, epsilon=epsilon, dtype=dtype))
        self.self_attn = self.attention_class(config, layer, dtype=dtype, rngs=rngs)
        self.mlp = self.make_mlp(config, layer, dtype=dtype, rngs=rngs)

    def make_norms(self, make: Callable[[], Module]) -> None:
        """Creates the norms of the layer.

        Args:
            make: Creates a norm.
        """
        self.input_layernorm, self.post_attention_layernorm = make(), make()

    def make_mlp(self, config: Any, layer: int, **options: Any) -> Module:
        """Returns the MLP of the layer."""
        return self.mlp_class(config, layer, **options)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        x = x + self.self_attn(self.input_layernorm(x, context), context)
        return x + self.mlp(self.post_attention_layernorm(x, context), context)


class LlamaForCausalLM(CausalLM):
    """A Llama. The same modules are used for training (dense call) and for serving (paged call)."""

    config_class: ClassVar[type[LlamaConfig]] = LlamaConfig
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE
    embed_path: ClassVar[str] = "embed_tokens"
    layer_class: ClassVar[Callable[..., Module]] = LlamaDecoderLayer
    norm_class: ClassVar[Callable[..., Any]] = RMSNorm
    has_head_bias: ClassVar[bool] = False
    has_head: ClassVar[bool] = True  # False for models without a language model head

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        std = config.initializer_range
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(vocab_size, hidden_size, std=std, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [self.layer_class(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)]
        )
        self.norm = self.norm_class(hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        head = functools.partial(Linear, bias=self.has_head_bias, std=std, dtype=dtype, rngs=rngs)
        is_tied = config.tie_word_embeddings or not self.has_head
        self.lm_head = None if is_tied else head(hidden_size, vocab_size, split=(None, padded(vocab_size)))

    def embed(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the token embeddings."""
        return self.embed_tokens(tokens, context)

    def apply_layers(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the last layer."""
        context = self.with_rotations(context)
        for layer in self.own_layers:
            x = layer(x, context)
        return x

    def with_rotations(self, context: ForwardContext) -> ForwardContext:
        """Returns the context with the rotations of the tokens, for each rotary embedding of the layers."""
        layers: list[Any] = [layer for layer in self.own_layers if hasattr(layer, "self_attn")]
        rotations = {rope: rope.at(context.positions) for rope in (x.self_attn.rope for x in layers)}
        return dataclasses.replace(context, rotations=rotations)

    def final_norm(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the normalized hidden states."""
        return self.norm(x, context)

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the float32 logits; zeros for models without a language model head."""
        head = self.head
        if head is None:
            # No token is sampled from these logits, but the step checks them. They are NaN if the hidden
            # state is not finite.
            zeros = jnp.sum(hidden, axis=-1, keepdims=True, dtype=jnp.float32) * 0
            return jnp.broadcast_to(zeros, (*hidden.shape[:-1], self.config.vocab_size))
        return head.logits(hidden)

    @property
    def head(self) -> Linear | Embedding | None:
        """The language model head; None for models without one."""
        if not self.has_head:
            return None
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches: keys and values, for all tokens or for a sliding window."""
        c = self.config
        shape = (c.num_key_value_heads, c.head_dim)
        windows = c.windows or (None,) * c.num_hidden_layers
        return [FullAttentionSpec(*shape) if w is None else SlidingWindowSpec(*shape, w) for w in windows]
