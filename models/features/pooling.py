"""Pooling: how a checkpoint turns the hidden states of a text into an embedding or class scores.

This module does not import JAX.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jax_paged.arguments.shown_values import shown
from jax_paged.models.checkpoint import read_json
from jax_paged.models.registry import POOLING_MODELS

PoolingType = Literal["LAST", "MEAN", "CLS"]
# Pooling types by their names in 1_Pooling/config.json: first the names in the older layout, then the names
# in the newer one.
_TYPES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
    "cls": "CLS",
    "mean": "MEAN",
    "lasttoken": "LAST",
}
_MODULES = ("Transformer", "Pooling", "Normalize")
# Names of the config file of the module Transformer. Older versions of sentence-transformers named it after
# the class of the model.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Tokenizer settings that do not change the tokens of a text.
_PADDING_SETTINGS = ("padding", "pad_to_multiple_of", "return_tensors", "return_attention_mask")

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Preprocessing that sentence-transformers applies to a text before the model reads it.

    Args:
        max_seq_length: Longer texts are truncated to this length (tokens); None for no truncation.
        truncation_side: The end at which tokens are removed.
        prompt: Text that is inserted before every text.
        lower_case: Whether texts are converted to lower case.
    """

    max_seq_length: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    prompt: str = ""
    lower_case: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """Computation of an embedding or of class scores from the last hidden states of a text.

    Args:
        type: Which hidden states are used: the last token's (LAST), the first token's (CLS), or the mean of
            all (MEAN).
        generates: Whether the model can also generate tokens.
        is_encoder: Whether the model is an encoder, which has no KV cache.
        embedding_size: Size of an embedding.
        normalize: Whether embeddings are scaled to length 1.
        dimensions: Sizes to which an embedding may be truncated (Matryoshka embeddings); None for any size,
            empty for none.
        labels: Names of the classes of a classifier; empty if the model computes embeddings.
        activation: Function that converts the class logits to scores.
        label_tokens: Ids of the tokens whose logits are the class logits; empty if the model has a
            classification head.
        is_two_way: Whether there is only one class logit: the second label token's logit minus the first
            one's.
        text: Preprocessing of texts for embeddings.
    """

    type: PoolingType
    generates: bool
    is_encoder: bool
    embedding_size: int
    normalize: bool = True
    dimensions: tuple[int, ...] | None = ()
    labels: tuple[str, ...] = ()
    activation: Literal["softmax", "sigmoid", "identity"] = "softmax"
    label_tokens: tuple[int, ...] = ()
    is_two_way: bool = False
    text: TextSettings = TextSettings()


def read_pooling(
    folder: Path | None,
    hf_config: Mapping[str, Any],
    architecture: str,
    hidden_size: int,
    *,
    pools: bool | None,
    pooling_type: str | None = None,
    normalize: bool | None = None,
) -> PoolingSpec | None:
    """Returns how a model computes embeddings or class scores; None if it only generates tokens.

    Args:
        folder: The checkpoint folder, which may hold the module configs of sentence-transformers; None if
            there is no folder.
        hf_config: The parsed config.json.
        architecture: The architecture of the model.
        hidden_size: Size of a hidden state.
        pools: Whether the user requests pooling; None to decide by the checkpoint.
        pooling_type: Replaces the pooling type of the checkpoint; None to keep it.
        normalize: Replaces the normalization setting of the checkpoint; None to keep it.

    Raises:
        ValueError: If generation is requested for a model that can only pool, or if the checkpoint has
            modules or settings that are not supported.
    """
    only_pools = architecture in POOLING_MODELS
    modules = _modules(folder) if folder is not None and pools is not False else None
    label_names = hf_config.get("classifier_from_token")
    if pools is False and only_pools:
        raise ValueError(f"`runner` must be 'auto' or 'pooling' with {architecture}, got 'generate'")
    if not (pools or only_pools or modules or label_names):
        return None
    found, normalizes = (modules.pooling_type, modules.normalizes) if modules else (None, True)
    is_encoder = POOLING_MODELS.get(architecture) == "encoder"
    default = "LAST" if not is_encoder else "MEAN" if architecture.endswith("Model") else "CLS"
    if hf_config.get("classifier_pooling") == "mean":
        default = "MEAN"
    spec = PoolingSpec(
        type=_type_of(pooling_type) if pooling_type else found or default,
        generates=not only_pools,
        is_encoder=is_encoder,
        embedding_size=hidden_size,
        normalize=normalizes if normalize is None else normalize,
        dimensions=_dimensions(hf_config),
    )
    if label_names:
        return _by_tokens(spec, folder, hf_config, label_names)
    if not architecture.endswith("Classification"):
        if folder is None or modules is None:
            return spec
        return dataclasses.replace(spec, text=_text_settings(folder, modules.transformer, hf_config))
    names = hf_config.get("id2label") or {}
    labels = [names.get(str(i), f"LABEL_{i}") for i in range(num_labels(hf_config))]
    return dataclasses.replace(spec, labels=tuple(labels), activation=_activation(hf_config, len(labels)))


def num_labels(hf_config: Mapping[str, Any]) -> int:
    """Returns the number of classes of a classifier. The default is the number of entries in id2label, or 2.

    Args:
        hf_config: The parsed config.json.
    """
    return hf_config.get("num_labels") or len(hf_config.get("id2label") or ()) or 2


def _type_of(name: str) -> PoolingType:
    for known in ("LAST", "MEAN", "CLS"):
        if name == known:
            return known
    raise ValueError(f"`pooling_type` must be one of 'LAST', 'MEAN', 'CLS', got {shown(name)}")


@dataclasses.dataclass(frozen=True)
class _Modules:
    """Modules of a sentence-transformers model.

    Args:
        pooling_type: The type in the config of the module Pooling.
        normalizes: Whether there is a module Normalize.
        transformer: Folder of the module Transformer, relative to the model folder.
    """

    pooling_type: PoolingType
    normalizes: bool
    transformer: str


def _modules(folder: Path) -> _Modules | None:
    """Returns the modules of sentence-transformers; None if the folder has no pooling module."""
    file = folder / "modules.json"
    if not file.exists():
        return None
    modules = {m["type"].rpartition(".")[2]: m["path"] for m in json.loads(file.read_text(encoding="utf-8"))}
    for name in modules:
        if name not in _MODULES:
            raise ValueError(f"each module of {file} must be one of {', '.join(_MODULES)}, got {shown(name)}")
    if "Pooling" not in modules:
        return None
    values = read_json(folder / modules["Pooling"] / "config.json")
    mode = values.get("pooling_mode")
    names = [mode] if isinstance(mode, str) else mode or []
    if not names:
        names = [n for n, value in values.items() if n.startswith("pooling_mode_") and value is True]
    if len(names) != 1 or names[0] not in _TYPES or values.get("include_prompt") is False:
        path = folder / modules["Pooling"] / "config.json"
        raise ValueError(
            f"{path} must select cls, mean or lasttoken pooling with include_prompt, got {shown(values)}"
        )
    return _Modules(_TYPES[names[0]], "Normalize" in modules, modules.get("Transformer", ""))


def _text_settings(folder: Path, transformer: str, hf_config: Mapping[str, Any]) -> TextSettings:
    """Returns the preprocessing that sentence-transformers applies to texts.

    Source: sentence-transformers, base/modules/transformer.py and base/model.py.

    Raises:
        ValueError: If the module Transformer has unsupported settings, or if a value is out of range.
    """
    file = next((f for n in _TRANSFORMER_FILES if (f := folder / transformer / n).is_file()), None)
    values = read_json(file) if file else {}
    tokenizer = read_json(f) if (f := folder / "tokenizer_config.json").is_file() else {}
    init_args = values.get("processor_kwargs") or values.get("tokenizer_args") or {}
    processing = values.get("processing_kwargs") or {}
    call_args = {**(processing.get("common") or {}), **(processing.get("text") or {})}
    lens = call_args.pop("max_length", None), init_args.get("model_max_length"), values.get("max_seq_length")
    length = next((n for n in lens if n is not None), tokenizer.get("model_max_length"))
    if call_args.pop("truncation", True) in (False, "do_not_truncate") or not isinstance(length, int | float):
        length = None
    if file is not None:
        _check_transformer(file, values, call_args, hf_config)
    if length is not None and length < 1:
        raise ValueError(
            f"`max_seq_length` of {file} must be null or an integer of at least 1, got {shown(length)}"
        )
    side = init_args.get("truncation_side") or tokenizer.get("truncation_side")
    if side is None and length is not None:
        side = _stored_side(folder)
    settings = TextSettings(
        # Tokenizers without a limit have a model_max_length of about 10**30.
        max_seq_length=None if length is None else int(min(length, 2**31)),
        truncation_side="left" if side == "left" else "right",
        prompt=_default_prompt(folder),
        lower_case=bool(values.get("do_lower_case")),
    )
    if settings.prompt:
        message = "the prompt %r is inserted before every text because of default_prompt_name in %s"
        _LOGGER.warning(message, settings.prompt, folder / "config_sentence_transformers.json")
    return settings


def _check_transformer(
    file: Path, values: Mapping[str, Any], call_args: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> None:
    """Raises a ValueError if the module Transformer does more than compute last hidden states."""
    problems = [
        f"each of `processing_kwargs` must be padding, truncation or max_length, got {name}={shown(value)}"
        for name, value in call_args.items()
        if name not in _PADDING_SETTINGS
    ]
    task = values.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        problems.append(f"`transformer_task` must be 'feature-extraction', got {shown(task)}")
    supported = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = values.get("modality_config") or {"text": supported}
    if not supported.items() <= (modalities.get("text") or {}).items():
        problems.append(f"`modality_config` must have {supported} for 'text', got {shown(modalities)}")
    for name, value in (values.get("config_kwargs") or values.get("config_args") or {}).items():
        if name in hf_config and hf_config[name] != value:
            allowed = f"{shown(hf_config[name])}, the value in config.json (hf_overrides can change it)"
            problems.append(f"`config_kwargs.{name}` must be {allowed}, got {shown(value)}")
    if problems:
        raise ValueError(f"{file} has settings that are not supported: {'; '.join(problems)}")


def _stored_side(folder: Path) -> str:
    """Returns the truncation side that tokenizer.json declares."""
    file = folder / "tokenizer.json"
    truncation = read_json(file).get("truncation") if file.is_file() else None
    return str((truncation or {}).get("direction", "right")).lower()


def _default_prompt(folder: Path) -> str:
    """Returns the prompt that sentence-transformers inserts before every text; usually it is empty."""
    file = folder / "config_sentence_transformers.json"
    values = read_json(file) if file.is_file() else {}
    name, prompts = values.get("default_prompt_name"), values.get("prompts") or {}
    if name is None:
        return ""
    if name not in prompts:
        raise ValueError(
            f"`default_prompt_name` of {file} must be one of {sorted(prompts)}, got {shown(name)}"
        )
    return prompts[name] or ""


def _dimensions(hf_config: Mapping[str, Any]) -> tuple[int, ...] | None:
    allowed = hf_config.get("matryoshka_dimensions")
    return tuple(allowed) if allowed else None if hf_config.get("is_matryoshka") else ()


def _activation(hf_config: Mapping[str, Any], num: int) -> Literal["softmax", "sigmoid", "identity"]:
    name = (hf_config.get("sentence_transformers") or {}).get("activation_fn")
    name = name or hf_config.get("sbert_ce_default_activation_function") or ""
    if name.endswith("Identity") or hf_config.get("problem_type") == "regression":
        return "identity"
    is_multiple = hf_config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if name.endswith("Sigmoid") or num == 1 or is_multiple else "softmax"


def _by_tokens(
    spec: PoolingSpec, folder: Path | None, hf_config: Mapping[str, Any], names: list[str]
) -> PoolingSpec:
    """Returns the spec of a causal model that is used as a classifier: class logits are logits of tokens."""
    if folder is None:
        raise ValueError("`classifier_from_token` needs a model folder with tokenizer.json")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(name) for name in names]
    is_two_way = bool(hf_config.get("is_original_qwen3_reranker"))
    is_two_way |= hf_config.get("method") == "from_2_way_softmax"
    if None in ids or not ids or (is_two_way and len(ids) != 2):
        raise ValueError(
            f"`classifier_from_token` must be a list of tokens of the vocabulary, exactly two for a two-way "
            f"softmax, got {shown(names)}"
        )
    labels = ("LABEL_0",) if is_two_way else tuple(names)
    activation = "sigmoid" if len(labels) == 1 else "softmax"
    return dataclasses.replace(
        spec, labels=labels, activation=activation, label_tokens=tuple(ids), is_two_way=is_two_way
    )
