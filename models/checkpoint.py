"""Location of a model folder in Hugging Face layout, and its JSON files. Does not import JAX."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_paged.arguments.shown_values import shown
from jax_paged.models.registry import get_architecture

GGUF_HINT = (
    "GGUF files are not supported. Convert them to safetensors with transformers: "
    "AutoModelForCausalLM.from_pretrained(REPOSITORY, gguf_file=FILE).save_pretrained(FOLDER), and the same "
    "with AutoTokenizer"
)
# The patterns match neither pickled weights nor Python files, so that nothing that is downloaded can be
# executed.
HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "vocab.txt",
    "merges.txt",
]

# In the config.json of multimodal models: the objects of the parts, and the fields that may be outside of
# text_config.
_PARTS = ("text_config", "vision_config")
_OUTER = ("dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")

_LOGGER = logging.getLogger(__name__)


def resolve_model_dir(model: str) -> Path:
    """Returns the folder of a model, after downloading the model if it is a hub id.

    Args:
        model: "pagelet" (the built-in model), a local folder in Hugging Face layout, or a hub id.

    Raises:
        ValueError: If `model` is none of these, if the hub cannot be reached and the model is not cached, or
            if the architecture of a hub model is not supported.
    """
    if model == "pagelet":
        return Path(__file__).parent / "pagelet"
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if model.endswith(".gguf"):
        raise ValueError(
            f"`model` must be a folder or hub id with safetensors files, got {shown(model)}. {GGUF_HINT}"
        )
    # This import takes 0.2 s, and only hub models need it.
    from huggingface_hub import snapshot_download

    def download(patterns: list[str]) -> Path:
        return Path(snapshot_download(model, allow_patterns=patterns))

    try:
        config = download(["config.json"]) / "config.json"
    except (OSError, ValueError) as e:
        raise ValueError(
            f"`model` must be 'pagelet' (built in), a local folder with config.json and *.safetensors, or a "
            f"Hugging Face hub id such as 'meta-llama/Llama-3.2-1B', got {shown(model)}. There is no folder "
            f"{folder.absolute()}, and the hub returned {type(e).__name__}: {e} Check the spelling and the "
            "network, run `hf auth login` for a gated model, or download it elsewhere and pass its folder."
            + (f" {GGUF_HINT}." if "gguf" in model.lower() else "")
        ) from e
    # Reject unsupported architectures before the weights are downloaded.
    get_architecture(read_json(config))
    return download(HUB_FILES)


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of a model folder.

    Args:
        file: Path of the file.

    Raises:
        ValueError: If the file does not exist or does not hold a JSON object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ValueError(f"{file} does not exist; a model folder has config.json and *.safetensors") from e
    except ValueError as e:
        raise ValueError(f"{file} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{file} must be a JSON object, got a {type(value).__name__}")
    return value


def read_config(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with some fields replaced.

    Args:
        folder: The model folder.
        overrides: New values of fields. The fields of text_config and vision_config are replaced one by one;
            any other object is replaced as a whole.

    Raises:
        ValueError: If config.json does not exist, or if a field of the text model is overridden outside of
            text_config.
    """
    found = read_json(folder / "config.json")
    text = found.get("text_config")
    inner = (
        {*text, "rope_parameters", "rope_scaling"} - {*found, *_OUTER} if isinstance(text, dict) else set()
    )
    if misplaced := sorted(inner & overrides.keys()):
        raise ValueError(f"`hf_overrides` must set {misplaced} inside text_config, got them at the top level")
    both = [n for n in _PARTS if all(isinstance(x.get(n), dict) for x in (found, overrides))]
    return {**found, **overrides, **{name: found[name] | overrides[name] for name in both}}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Returns the object in generation_config.json; an empty dict if the file does not exist.

    Args:
        folder: The model folder.
    """
    file = folder / "generation_config.json"
    return read_json(file) if file.exists() else {}


def end_token_ids(
    generation_config: dict[str, Any], hf_config: dict[str, Any], vocab_size: int
) -> frozenset[int]:
    """Returns the ids of the tokens that end a sequence.

    eos_token_id is read from generation_config.json, else from config.json, else from its text_config.

    Args:
        generation_config: The parsed generation_config.json.
        hf_config: The parsed config.json.
        vocab_size: Number of tokens in the vocabulary.

    Raises:
        ValueError: If eos_token_id is not null, an id below vocab_size, or a list of such ids.
    """
    given = (generation_config, hf_config, hf_config.get("text_config") or {})
    value = next((x["eos_token_id"] for x in given if x.get("eos_token_id") is not None), None)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
        raise ValueError(
            f"`eos_token_id` must be null, an id in [0, {vocab_size - 1}] or a list of ids, "
            f"got {shown(value)}"
        )
    return frozenset(ids)


def sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters that a checkpoint recommends, by their names in SamplingParams.

    If do_sample is false, the temperature is 0, and top_k, top_p and min_p are left out. max_new_tokens
    becomes max_tokens. It is ignored with a warning if it is not a positive integer.

    Args:
        generation_config: The parsed generation_config.json.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens")
    max_tokens = generation_config.get("max_new_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        message = "max_new_tokens of generation_config.json is ignored: it must be an integer above 0, got %r"
        _LOGGER.warning(message, max_tokens)
        max_tokens = None
    values = {**generation_config, "max_tokens": max_tokens}
    if values.get("do_sample") is False:
        values |= {**dict.fromkeys(names[1:4]), "temperature": 0.0}
    return {name: values[name] for name in names if values.get(name) is not None}
