"""Rotary position embeddings (RoPE): their settings in config.json, and the rotation.

Source: Su et al., RoFormer, 2021; frequencies and defaults as in transformers' modeling_rope_utils.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_paged.models.hf_format import ConfigReader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class Rotation(NamedTuple):
    """Rotation of the queries or keys of some tokens.

    Args:
        cos: float32 [..., 1, n / 2], cosine of the angle of each token's pairs, times the magnitude.
        sin: float32 [..., 1, n / 2], sine of the angle of each token's pairs, times the magnitude.
        is_interleaved: Which dimensions form a pair; see Rope.
    """

    cos: Float[Array, "... 1 p"]
    sin: Float[Array, "... 1 p"]
    is_interleaved: bool

    def __call__(self, x: Float[Array, "... h d"]) -> Float[Array, "... h d"]:
        """Rotates the first n dimensions of each head, in float32.

        Args:
            x: float [..., H, D], queries or keys.

        Returns:
            [..., H, D] in the dtype of x.
        """
        n = 2 * self.cos.shape[-1]
        x32 = x.astype(jnp.float32)
        rotated, rest = x32[..., :n], x32[..., n:]
        if self.is_interleaved:
            first, second = rotated[..., ::2], rotated[..., 1::2]
        else:
            first, second = jnp.split(rotated, 2, axis=-1)
        parts = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        if self.is_interleaved:
            parts = [jnp.stack(parts, axis=-1).reshape(rotated.shape)]
        return jnp.concatenate([*parts, rest], axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Frequencies of rotary position embeddings, and the pairs of dimensions that are rotated.

    Args:
        frequencies: Angle per position of each pair (radians). Dimensions after the last pair are not
            rotated. If it is empty, no dimension is rotated.
        magnitude: Factor of the rotated pairs.
        is_interleaved: Whether a pair is (2i, 2i + 1). If not, a pair is (i, i + n / 2), where n is the
            number of rotated dimensions.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    is_interleaved: bool = False

    def at(self, positions: Int[Array, "..."]) -> Rotation:
        """Returns the rotation of tokens at some positions.

        Args:
            positions: int32 [...], position of each token.
        """
        return self.at_pair_positions(positions[..., None, None])

    def at_pair_positions(self, positions: Int[Array, "... 1 p"]) -> Rotation:
        """Returns the rotation of tokens whose pairs have different positions, as in M-RoPE.

        Args:
            positions: int32 [..., 1, n / 2], position of each pair of each token.
        """
        angles = positions.astype(jnp.float32) * jnp.asarray(self.frequencies, jnp.float32)
        cos, sin = jnp.cos(angles) * self.magnitude, jnp.sin(angles) * self.magnitude
        # Without the barrier, XLA would recompute them in every layer and for every head.
        cos, sin = lax.optimization_barrier((cos, sin))
        return Rotation(cos, sin, self.is_interleaved)


def base_frequencies(dim: int, theta: float) -> tuple[float, ...]:
    """Returns the unscaled frequencies, a geometric series: theta ** (-2i / dim) for pair i.

    Args:
        dim: Number of rotated dimensions.
        theta: Base of the frequencies.
    """
    return tuple(theta ** (-2 * i / dim) for i in range(dim // 2))


def rope_values(read: ConfigReader, max_position_embeddings: int) -> ConfigReader:
    """Returns a reader of the rotary settings in a config.json.

    config.json holds them either in `rope_parameters`, or in the older `rope_theta` and `rope_scaling`.

    Args:
        read: The reader of config.json.
        max_position_embeddings: From config.json. It is the original context length if the settings have
            none.
    """
    name = "rope_scaling" if read.get("rope_scaling", None) else "rope_parameters"
    nested = read.table(name)
    ok = not any(isinstance(value, dict) for value in nested.values())
    read.check(ok, name, nested, "the same rotary values for all layers, not an object per layer type")
    # The precedence is the same as in transformers.
    outer = ("rope_theta", "partial_rotary_factor")
    values: dict[str, Any] = {k: read.get(k, None) for k in outer}
    values = {k: v for k, v in values.items() if v is not None}
    values |= {"original_max_position_embeddings": max_position_embeddings} | nested
    if (original := read.get("original_max_position_embeddings", None)) is not None:
        values["original_max_position_embeddings"] = original
    return read.nested(name, values)


def rotated_dim(read: ConfigReader, head_dim: int) -> int:
    """Returns the number of rotated dimensions of a head, from `partial_rotary_factor`.

    Args:
        read: The reader that `rope_values` returns. Problems are noted in it.
        head_dim: Size of a head.
    """
    part = read.number("partial_rotary_factor", 1.0)
    dim = int(head_dim * part)
    ok = dim % 2 == 0 and 0 < dim <= head_dim
    allowed = "a fraction of head_dim that gives an even number of dimensions"
    return dim if read.check(ok, "partial_rotary_factor", part, allowed) else 2


def _rope_type(read: ConfigReader) -> str:
    return read.choice("rope_type", read.get("type", "default"), ROPE_TYPES)


def _yarn_factor(read: ConfigReader, max_position_embeddings: int) -> float:
    implied = max_position_embeddings / read.integer("original_max_position_embeddings")
    return read.number("factor", implied, low=1.0, low_open=False)


def _dynamic_length(read: ConfigReader, max_position_embeddings: int, max_model_len: int | None) -> int:
    """Returns the sequence length that the frequencies of "dynamic" are computed for; see max_positions."""
    limit = int(max_position_embeddings * read.number("factor", low=1.0, low_open=False))
    return min(max(max_model_len or 0, max_position_embeddings), limit)


def max_positions(read: ConfigReader, max_position_embeddings: int, max_model_len: int | None = None) -> int:
    """Returns the maximum sequence length (tokens), which RoPE scaling may extend.

        rope_type         maximum
        default, llama3   max_position_embeddings (Llama 3's value already includes the scaling)
        linear            max_position_embeddings * factor
        yarn              original_max_position_embeddings * factor
        dynamic           max_position_embeddings, or max_model_len if that is more, up to
                          max_position_embeddings * factor

    The frequencies of "dynamic" depend on the sequence length. transformers recomputes them as a sequence
    grows. With a KV cache, the keys that are already cached would keep their old frequencies. Here the
    frequencies are computed for one length, the maximum, and used for all sequences. If max_model_len is None
    or at most max_position_embeddings, every sequence has the same frequencies as in transformers. If it is
    larger, only sequences of exactly the maximum length do. With the largest possible max_model_len, the
    frequencies are the same as in vLLM.

    Source: vLLM's _get_and_verify_max_len, which always extends "dynamic" as far as possible.

    Args:
        read: The reader that `rope_values` returns. Problems are noted in it.
        max_position_embeddings: From config.json.
        max_model_len: The maximum sequence length that the user requests (tokens); None for the default.
    """
    rope_type = _rope_type(read)
    if rope_type == "linear":
        return int(max_position_embeddings * read.number("factor", low=1.0, low_open=False))
    if rope_type == "yarn":
        factor = _yarn_factor(read, max_position_embeddings)
        return int(read.integer("original_max_position_embeddings") * factor)
    if rope_type == "dynamic":
        return _dynamic_length(read, max_position_embeddings, max_model_len)
    return max_position_embeddings


def read_rope(
    read: ConfigReader,
    head_dim: int,
    max_position_embeddings: int,
    theta: float = 10000.0,
    max_model_len: int | None = None,
    *,
    is_partial: bool = False,
) -> Rope:
    """Returns the rotary position embeddings that some settings describe.

    Args:
        read: The reader that `rope_values` returns. Problems are noted in it.
        head_dim: Size of a head.
        max_position_embeddings: From config.json.
        theta: Base of the frequencies if the settings have none.
        max_model_len: The maximum sequence length that the user requests (tokens); only "dynamic" depends on
            it.
        is_partial: Whether `partial_rotary_factor` may leave some dimensions of a head unrotated.
    """
    if is_partial:
        head_dim = rotated_dim(read, head_dim)
    else:
        read.choice("partial_rotary_factor", 1.0, (1.0,))
    theta = read.number("rope_theta", theta, low=1.0)
    rope_type = _rope_type(read)
    base = base_frequencies(head_dim, theta)
    if rope_type == "default":
        return Rope(base)
    if rope_type == "dynamic":
        length = _dynamic_length(read, max_position_embeddings, max_model_len)
        return _dynamic(read, base, theta, length / max_position_embeddings)
    if rope_type == "linear":
        factor = read.number("factor", low=1.0, low_open=False)
        return Rope(tuple(f / factor for f in base))
    if rope_type == "llama3":
        return _llama3(read, base)
    return _yarn(read, base, theta, _yarn_factor(read, max_position_embeddings))


def _dynamic(read: ConfigReader, base: tuple[float, ...], theta: float, ratio: float) -> Rope:
    """Returns frequencies with a larger base for sequences longer than the original context.

    `ratio` is the sequence length divided by the original context length.

    Source: bloc97 and emozilla, dynamically scaled NTK-aware RoPE, 2023; see Peng et al., YaRN, 2023.
    """
    factor, dim = read.number("factor", low=1.0, low_open=False), 2 * len(base)
    if ratio <= 1:
        return Rope(base)
    allowed = "a type other than 'dynamic' because heads have 2 dimensions"
    if not read.check(dim > 2, "rope_type", "dynamic", allowed):
        return Rope(base)
    return Rope(base_frequencies(dim, theta * (factor * ratio - (factor - 1)) ** (dim / (dim - 2))))


def _llama3(read: ConfigReader, base: tuple[float, ...]) -> Rope:
    """Returns frequencies in which long wavelengths are stretched by `factor`, and short ones are kept.

    Wavelengths in between are interpolated.

    Source: the Llama 3.1 release.
    """
    original = read.integer("original_max_position_embeddings")
    factor, low = read.number("factor", low=1.0, low_open=False), read.number("low_freq_factor")
    high = read.number("high_freq_factor", low=low)

    def stretch(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        return (1 - share) * frequency / factor + share * frequency

    return Rope(tuple(map(stretch, base)))


def yarn_score_factor(read: ConfigReader) -> float:
    """Returns the factor that DeepSeek's variant of YaRN applies to attention scores; 1 without YaRN.

    Source: DeepSeek-AI, DeepSeek-V2, 2024, its published code.

    Args:
        read: The reader that `rope_values` returns. Problems are noted in it.
    """
    scale = read.number("mscale_all_dim", 0.0, low_open=False)
    if _rope_type(read) != "yarn" or scale == 0:
        return 1.0
    return (0.1 * scale * math.log(read.number("factor", low=1.0, low_open=False)) + 1.0) ** 2


def _yarn(read: ConfigReader, base: tuple[float, ...], theta: float, factor: float) -> Rope:
    """Returns frequencies in which slowly rotating pairs are stretched by `factor`, and fast ones are kept.

    Pairs in between are interpolated.

    Source: Peng et al., YaRN, 2023.
    """
    original = read.integer("original_max_position_embeddings")
    mscale, mscale_all_dim = (read.number(n, 0.0, low_open=False) for n in ("mscale", "mscale_all_dim"))
    fast, slow = read.number("beta_fast", 32.0), read.number("beta_slow", 1.0)
    truncate = read.choice("truncate", True, (False, True))

    def magnitude(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    both = mscale > 0 and mscale_all_dim > 0
    default_magnitude = magnitude(mscale) / magnitude(mscale_all_dim) if both else magnitude()
    dim = 2 * len(base)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dim // 2)]
    frequencies = tuple(f / factor * r + f * (1 - r) for f, r in zip(base, ramp, strict=True))
    return Rope(frequencies, read.number("attention_factor", default_magnitude, low_open=False))
