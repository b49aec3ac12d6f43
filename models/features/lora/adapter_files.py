"""Adapter folders in PEFT's format: checked against a model and read into NumPy arrays. Needs no JAX.

adapter_config.json describes the adapter. For a LoRA, adapter_model.safetensors holds lora_A [rank, in] and
lora_B [out, rank] for each adapted linear map, whose output y becomes y + (x A^T) B^T * scale. For a soft
prompt, it holds prompt_embeddings [tokens, hidden_size], which are placed before the embeddings of the
prompt.

Source: Hu et al., LoRA, 2021; Kalajdzievski, A Rank Stabilization Scaling Factor, 2023 (use_rslora); Lester
et al., The Power of Scale for Parameter-Efficient Prompt Tuning, 2021.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# ml_dtypes registers bfloat16 with NumPy.
import ml_dtypes  # noqa: F401
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from jax_paged.arguments.shown_values import one_of, shown

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# PEFT's settings that change the computation of an adapter, with the values that mean a plain LoRA.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "bias": ("none",),
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "monteclora_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "velora_config": (None,),
}
# Values of init_lora_weights, or their beginnings, that also change the weights of the base model. An adapter
# folder does not contain these changes.
_CHANGES_MODEL = ("corda", "loftq", "lora_ga", "olora", "pissa")
# The maximum number of problems that an error message lists.
_MAX_SHOWN = 20


class LoraPair(NamedTuple):
    """The low-rank update of a linear map: it adds (x @ a) @ b to the output.

    Args:
        a: [in, rank], in the dtype of the model.
        b: [rank, out], in the dtype of the model; includes the scale.
    """

    a: np.ndarray
    b: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in host memory: a LoRA, or a soft prompt.

    Args:
        key: Hash of the contents. Adapters with the same contents have the same key, whatever their names.
        pairs: The updates by the name of the linear map in the checkpoint; empty for a soft prompt.
        prompt: float32 [tokens, hidden_size], the vectors of a soft prompt; None for a LoRA.
    """

    key: str
    pairs: Mapping[str, LoraPair]
    prompt: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class AdapterLimits:
    """Limits that an adapter must satisfy.

    Args:
        maps: Input and output size of each linear map that may be adapted, by its name in the checkpoint.
        max_rank: The maximum rank of a LoRA.
        hidden_size: Size of the vectors of a soft prompt; 0 if soft prompts are not allowed.
        max_prompt_tokens: The maximum length of a soft prompt (tokens).
        dtype: Name of the dtype of the model's weights.
    """

    maps: Mapping[str, tuple[int, int]]
    max_rank: int
    hidden_size: int
    max_prompt_tokens: int
    dtype: str


def read_adapter(folder: Path, limits: AdapterLimits) -> Adapter:
    """Reads an adapter folder.

    Args:
        folder: A folder that PEFT's save_pretrained has written.
        limits: Limits of the model and the engine.

    Raises:
        ValueError: If the folder holds no adapter, or if the adapter does not satisfy the limits. The message
            lists the problems.
    """
    problems: list[str] = []
    try:
        config = _read_config(folder)
        tensors = _read_tensors(folder)
    except ValueError as error:
        raise ValueError(f"the adapter in {folder} can't be read: {error}") from error
    read = {"LORA": _read_lora, "PROMPT_TUNING": _read_prompt}.get(str(config.get("peft_type")))
    if read is None:
        problems.append(
            f"`peft_type` must be 'LORA' or 'PROMPT_TUNING', got {shown(config.get('peft_type'))}"
        )
        adapter = None
    else:
        adapter = read(config, tensors, limits, problems)
    if problems:
        more = [f"and {len(problems) - _MAX_SHOWN} more"] if len(problems) > _MAX_SHOWN else []
        lines = "".join(f"\n  {problem}" for problem in [*problems[:_MAX_SHOWN], *more])
        raise ValueError(f"the adapter in {folder} does not fit the model or the engine settings:{lines}")
    assert adapter is not None, "reading returned neither an adapter nor a problem"
    return adapter


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"the folder must contain {_CONFIG}, which PEFT writes: {error.strerror or error}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{_CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{_CONFIG} must be a JSON object, got a {type(config).__name__}")
    return config


def _read_tensors(folder: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(folder / _TENSORS)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{_TENSORS} must be a safetensors file: {error}") from error


def _read_lora(
    config: dict[str, Any], tensors: dict[str, np.ndarray], limits: AdapterLimits, problems: list[str]
) -> Adapter | None:
    _check_plain(config, problems)
    _check_targets(config.get("target_modules"), limits, problems)
    sizes = _Sizes.read(config, problems)
    halves: dict[str, dict[str, np.ndarray]] = {}
    for key, tensor in sorted(tensors.items()):
        match = re.fullmatch(rf"(?:{re.escape(_PREFIX)})?(.+)\.lora_([AB])(?:\.default)?\.weight", key)
        if match is None:
            problems.append(f"each tensor must be lora_A or lora_B of a linear layer, got {key}")
        elif match[1] not in limits.maps:
            problems.append(f"each tensor must be for {_targets(limits)}, got {key} for {match[1]}")
        else:
            halves.setdefault(match[1], {})[match[2]] = tensor
    if not tensors:
        problems.append(f"{_TENSORS} must contain lora_A and lora_B of linear layers, got no tensors")
    pairs: dict[str, LoraPair] = {}
    for name, half in halves.items():
        pair = _pair(name, half, sizes, limits, problems)
        if pair is not None:
            pairs[name] = pair
    return None if problems else Adapter(_key(pairs), pairs)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Ranks and scales in an adapter's config."""

    rank: int
    alpha: float
    ranks: dict[str, int]
    alphas: dict[str, float]
    is_stabilized: bool

    @classmethod
    def read(cls, config: dict[str, Any], problems: list[str]) -> "_Sizes | None":
        """Reads the ranks and scales; notes problems and returns None if there are any."""

        def is_rank(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value > 0

        def is_alpha(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

        known = len(problems)
        for name, is_good, allowed in (
            ("r", is_rank, "an integer above 0"),
            ("lora_alpha", is_alpha, "a finite number"),
        ):
            if not is_good(config.get(name)):
                problems.append(f"`{name}` must be {allowed}, got {shown(config.get(name))}")
        patterns: list[dict[str, Any]] = []
        for name, is_good, values in (
            ("rank_pattern", is_rank, "integers above 0"),
            ("alpha_pattern", is_alpha, "finite numbers"),
        ):
            pattern = config.get(name) or {}
            ok = (
                isinstance(pattern, dict)
                and all(map(is_good, pattern.values()))
                and all(map(_compiles, pattern))
            )
            if not ok:
                problems.append(
                    f"`{name}` must map names or regular expressions to {values}, got {shown(pattern)}"
                )
            patterns.append(pattern)
        stabilized = config.get("use_rslora") or False
        if not isinstance(stabilized, bool):
            problems.append(f"`use_rslora` must be true or false, got {shown(stabilized)}")
        if len(problems) > known:
            return None
        return cls(config["r"], config["lora_alpha"], *patterns, stabilized)

    def of(self, name: str) -> tuple[int, float]:
        """Returns the rank and the scale of a linear map."""
        rank = _by_pattern(self.ranks, name, self.rank)
        alpha = _by_pattern(self.alphas, name, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.is_stabilized else rank)


def _by_pattern(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the end of a name, as in PEFT."""
    return next((v for key, v in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        return False
    return True


def _check_plain(config: dict[str, Any], problems: list[str]) -> None:
    for name, plain in _PLAIN.items():
        value = config.get(name, plain[0])
        if value not in plain:
            problems.append(f"`{name}` must be {one_of(plain)}, got {shown(value)}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_MODEL):
        problems.append(
            f"`init_lora_weights` must be a method that leaves the base model unchanged, got {start!r}. "
            "Convert it with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )


def _check_targets(targets: Any, limits: AdapterLimits, problems: list[str]) -> None:
    for target in targets if isinstance(targets, list) else []:
        if not any(name == target or name.endswith(f".{target}") for name in limits.maps):
            problems.append(f"each of `target_modules` must be {_targets(limits)}, got {shown(target)}")


def _targets(limits: AdapterLimits) -> str:
    """Returns the linear layers that adapters may change, as a phrase for messages."""
    names = ", ".join(sorted({name.rpartition(".")[2] for name in limits.maps}))
    return f"one of {names}" if names else "a linear layer that adapters may change (this model has none)"


def _pair(
    name: str,
    half: dict[str, np.ndarray],
    sizes: _Sizes | None,
    limits: AdapterLimits,
    problems: list[str],
) -> LoraPair | None:
    if half.keys() != {"A", "B"}:
        problems.append(f"{name} must have lora_A and lora_B, got only lora_{next(iter(half))}")
        return None
    if sizes is None:
        return None
    rank, scale = sizes.of(name)
    num_in, num_out = limits.maps[name]
    known = len(problems)
    if rank > limits.max_rank:
        problems.append(f"the rank of {name} must be at most {limits.max_rank} (max_lora_rank), got {rank}")
    for letter, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
        tensor = half[letter]
        if tensor.shape != shape:
            problems.append(f"{name}.lora_{letter} must have shape {shape}, got {tensor.shape}")
        elif not np.issubdtype(tensor.dtype, np.floating) and tensor.dtype.name != "bfloat16":
            problems.append(f"{name}.lora_{letter} must have a float dtype, got {tensor.dtype}")
    if len(problems) > known:
        return None
    with np.errstate(over="ignore"):  # overflows are reported below
        a = half["A"].astype(np.float32).T
        b = half["B"].astype(np.float32).T * np.float32(scale)
        pair = LoraPair(*(np.ascontiguousarray(x.astype(limits.dtype)) for x in (a, b)))
    if not all(np.isfinite(x.astype(np.float32)).all() for x in pair):
        # In the rows of other requests, zeros are multiplied by these numbers: 0 * infinity would be NaN.
        problems.append(f"{name} must have finite values in {limits.dtype}")
        return None
    return pair


def _read_prompt(
    config: dict[str, Any], tensors: dict[str, np.ndarray], limits: AdapterLimits, problems: list[str]
) -> Adapter | None:
    if not limits.hidden_size:
        problems.append("a soft prompt needs an engine with enable_prompt_embeds=True")
    if config.get("num_transformer_submodules") not in (None, 1):
        problems.append(
            f"`num_transformer_submodules` must be 1, got {config['num_transformer_submodules']!r}"
        )
    if tensors.keys() != {"prompt_embeddings"}:
        problems.append(f"the only tensor must be prompt_embeddings, got {shown(sorted(tensors))}")
    if problems:
        return None
    prompt, tokens = tensors["prompt_embeddings"].astype(np.float32), config.get("num_virtual_tokens")
    shape = (tokens, limits.hidden_size)
    if prompt.shape != shape:
        problems.append(f"prompt_embeddings must have shape {shape}, got {prompt.shape}")
    elif not 0 < prompt.shape[0] <= limits.max_prompt_tokens:
        allowed = f"in [1, {limits.max_prompt_tokens}] to leave room for a prompt within max_model_len"
        problems.append(f"`num_virtual_tokens` must be {allowed}, got {tokens}")
    elif not np.isfinite(prompt).all():
        problems.append("prompt_embeddings must have finite values")
    # The pair serves only to compute the hash.
    return None if problems else Adapter(_key({"": LoraPair(prompt, prompt[:0])}), {}, prompt)


def _key(pairs: Mapping[str, LoraPair]) -> str:
    """Returns a hash of the contents of an adapter."""
    digest = hashlib.sha256()
    for name in sorted(pairs):
        for array in pairs[name]:
            digest.update(f"{name}\0{array.shape}\0{array.dtype}\0".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
