"""What a pooling model makes of a text, as its checkpoint says. Needs no JAX."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jax_paged.models.checkpoint import read_json
from jax_paged.models.registry import POOLING_MODELS

PoolingType = Literal["LAST", "MEAN", "CLS"]
# By their names in 1_Pooling/config.json, of the older layout and of the newer one.
_TYPES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
    "cls": "CLS",
    "mean": "MEAN",
    "lasttoken": "LAST",
}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """What is made of a text's last hidden states.

    Args:
        type: The last token's are taken, the first one's (CLS), or the mean of all.
        generates: Whether the model draws tokens, too.
        is_encoder: Whether it reads whole texts, and caches nothing.
        embedding_size: Numbers of an embedding.
        normalize: Whether an embedding is scaled to length 1.
        dimensions: To how many numbers it may be cut (matryoshka); None for any, empty for none.
        labels: The classes of a classifier, whose logits are in the place of an embedding; empty without.
        activation: What makes scores of these logits.
        label_tokens: Tokens whose logits are those of the classes; empty if the model has a head for them.
        is_two_way: Whether the logit is the second label token's above the first one's.
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
    """Returns what a model makes of texts; None if it only generates.

    Args:
        folder: Of the checkpoint, where sentence-transformers describes its modules; None if there is none.
        hf_config: Its config.json.
        architecture: Of the model.
        hidden_size: Numbers of a hidden state.
        pools: Whether it is asked to pool, or not to; None leaves it to the checkpoint.
        pooling_type: In place of the checkpoint's.
        normalize: In place of the checkpoint's.

    Raises:
        ValueError: If it can do nothing else, or if its modules are not supported.
    """
    only_pools = architecture in POOLING_MODELS
    modules = _modules(folder) if folder is not None and pools is not False else None
    label_names = hf_config.get("classifier_from_token")
    if pools is False and only_pools:
        raise ValueError(f"runner is 'generate'; allowed with {architecture}: 'auto' or 'pooling'")
    if not (pools or only_pools or modules or label_names):
        return None
    found, normalizes = modules or (None, True)
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
        return spec
    names = hf_config.get("id2label") or {}
    labels = [names.get(str(i), f"LABEL_{i}") for i in range(num_labels(hf_config))]
    return dataclasses.replace(spec, labels=tuple(labels), activation=_activation(hf_config, len(labels)))


def num_labels(hf_config: Mapping[str, Any]) -> int:
    """Returns the number of classes of a classifier; transformers' default is 2."""
    return hf_config.get("num_labels") or len(hf_config.get("id2label") or ()) or 2


def _type_of(name: str) -> PoolingType:
    for known in ("LAST", "MEAN", "CLS"):
        if name == known:
            return known
    raise ValueError(f"pooling_type is {name!r}; allowed: 'LAST' or 'MEAN' or 'CLS'")


def _modules(folder: Path) -> tuple[PoolingType, bool] | None:
    """Returns the pooling that sentence-transformers would do, and whether it normalises; None for none."""
    file = folder / "modules.json"
    if not file.exists():
        return None
    import json

    modules = {m["type"].rpartition(".")[2]: m["path"] for m in json.loads(file.read_text(encoding="utf-8"))}
    for name in modules:
        if name not in _MODULES:
            raise ValueError(f"{file} names the module {name!r}; allowed: {', '.join(_MODULES)}")
    if "Pooling" not in modules:
        return None
    values = read_json(folder / modules["Pooling"] / "config.json")
    mode = values.get("pooling_mode")
    names = [mode] if isinstance(mode, str) else mode or []
    if not names:
        names = [n for n, value in values.items() if n.startswith("pooling_mode_") and value is True]
    if len(names) != 1 or names[0] not in _TYPES or values.get("include_prompt") is False:
        shown = folder / modules["Pooling"] / "config.json"
        raise ValueError(f"{shown} is {values!r}; allowed: one of cls, mean, lasttoken, with the prompt")
    return _TYPES[names[0]], "Normalize" in modules


def _dimensions(hf_config: Mapping[str, Any]) -> tuple[int, ...] | None:
    allowed = hf_config.get("matryoshka_dimensions")
    return tuple(allowed) if allowed else None if hf_config.get("is_matryoshka") else ()


def _activation(hf_config: Mapping[str, Any], num: int) -> Literal["softmax", "sigmoid", "identity"]:
    own = (hf_config.get("sentence_transformers") or {}).get("activation_fn")
    own = own or hf_config.get("sbert_ce_default_activation_function") or ""
    if own.endswith("Identity") or hf_config.get("problem_type") == "regression":
        return "identity"
    is_multiple = hf_config.get("problem_type") == "multi_label_classification"
    return "sigmoid" if own.endswith("Sigmoid") or num == 1 or is_multiple else "softmax"


def _by_tokens(
    spec: PoolingSpec, folder: Path | None, hf_config: Mapping[str, Any], names: list[str]
) -> PoolingSpec:
    """Returns a causal model as a classifier: the logits of some tokens are those of the classes."""
    if folder is None:
        raise ValueError("classifier_from_token needs a model folder, with its tokenizer.json")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [tokenizer.token_to_id(name) for name in names]
    is_two_way = bool(hf_config.get("is_original_qwen3_reranker"))
    is_two_way |= hf_config.get("method") == "from_2_way_softmax"
    if None in ids or not ids or (is_two_way and len(ids) != 2):
        raise ValueError(
            f"classifier_from_token is {names!r}; allowed: tokens of the vocabulary, two for two-way softmax"
        )
    labels = ("LABEL_0",) if is_two_way else tuple(names)
    activation = "sigmoid" if len(labels) == 1 else "softmax"
    return dataclasses.replace(
        spec, labels=labels, activation=activation, label_tokens=tuple(ids), is_two_way=is_two_way
    )
