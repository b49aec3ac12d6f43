"""Location of a model folder in Hugging Face layout or of a GGUF file, and its configuration.

Does not import JAX.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_paged.arguments.shown_values import shown
from jax_paged.models.loading.gguf.header import read_header, select_files, shards_of
from jax_paged.models.loading.gguf.hf_config import config_of, generation_config_of
from jax_paged.models.loading.pretrained import PRETRAINED, download_pretrained
from jax_paged.models.registry import get_architecture

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

# A repository on the hub with the type of a GGUF file or the file itself.
_HUB_GGUF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<kind>[\w-]+)|/(?P<file>[\w./-]+\.gguf))")

# In the config.json of multimodal models: the objects of the parts, and the fields that may be outside of
# text_config.
_PARTS = ("text_config", "vision_config")
_OUTER = ("dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")

_LOGGER = logging.getLogger(__name__)


def resolve_model_dir(model: str) -> Path:
    """Returns the folder or the GGUF file of a model, after downloading the model if it is a hub id.

    Args:
        model: "pagelet" (the built-in model); "smollm2" (downloaded when it is first used); a local folder in
            Hugging Face layout, or with one GGUF model; a local GGUF file; a hub id; or a hub id with a GGUF
            file ("org/repo/file.gguf") or with the type of one ("org/repo:Q4_K_M").

    Raises:
        ValueError: If `model` is none of these, if the hub cannot be reached and the model is not cached, or
            if the architecture of the model is not supported.
    """
    if model == "pagelet":
        return Path(__file__).parent / "pagelet"
    if model in PRETRAINED:
        return download_pretrained(PRETRAINED[model])
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _gguf_in(folder) or folder
    if model.endswith(".gguf") and (folder.is_file() or _HUB_GGUF.fullmatch(model) is None):
        return _existing_gguf(folder)
    # This import takes 0.2 s, and only hub models need it.
    from huggingface_hub import snapshot_download

    if match := _HUB_GGUF.fullmatch(model):
        return _download_gguf(match, snapshot_download)

    def download(patterns: list[str]) -> Path:
        try:
            return Path(snapshot_download(model, allow_patterns=patterns))
        # The HTTP library depends on the version of huggingface_hub. Some of its errors are not OSErrors.
        except Exception as e:
            raise ValueError(
                "`model` must be 'pagelet' (built in), 'smollm2' (downloaded at first use), a local folder "
                "with config.json and *.safetensors, a GGUF file, or a Hugging Face hub id such as "
                "'meta-llama/Llama-3.2-1B' or 'org/repo:Q4_K_M' (GGUF), got "
                f"{shown(model)}. There is no folder {folder.absolute()}, and the hub returned "
                f"{type(e).__name__}: {e} Check the spelling and the network, run `hf auth login` for a "
                "gated model, or download it elsewhere and pass its folder."
            ) from e

    config = download(["config.json"]) / "config.json"
    if "gguf" in model.lower() and not config.is_file():
        raise ValueError(
            f"`model` must name one of the GGUF files in the repository, such as '{model}:Q4_K_M', got "
            f"{model!r}"
        )
    # Reject unsupported architectures before the weights are downloaded.
    get_architecture(read_json(config))
    downloaded = download(HUB_FILES)
    # Without a network, snapshot_download returns the folder with whatever files are in the hub's cache.
    if not any(downloaded.glob("*.safetensors")):
        raise ValueError(
            f"`model` must be a Hugging Face hub id with model*.safetensors files, got {shown(model)}. "
            f"{downloaded} has no such file: either the hub has none, or it cannot be reached and only other "
            "files are cached. Check the spelling and the network, or download the model elsewhere."
        )
    return downloaded


def is_gguf(model: str | Path) -> bool:
    """Returns whether a path, or the name of a model, is the one of a GGUF file.

    Args:
        model: The path or name.
    """
    return str(model).endswith(".gguf") or _HUB_GGUF.fullmatch(str(model)) is not None


def _existing_gguf(file: Path) -> Path:
    """Returns a local GGUF file; of a split model, the first file."""
    first = shards_of(file)[0]
    if not first.is_file():
        raise ValueError(
            f"`model` must be an existing GGUF file, or one on the Hugging Face hub such as "
            f"'org/repo/file.gguf', got {shown(str(file))}"
        )
    get_architecture(config_of(read_header(first)))
    return first


def _gguf_in(folder: Path) -> Path | None:
    """Returns the GGUF model in a folder; None if there is none, or if there are safetensors files.

    Raises:
        ValueError: If the folder has several models.
    """
    if any(folder.glob("*.safetensors")):
        return None
    found = select_files([file.name for file in folder.glob("*.gguf")], None)
    if len(found) > 1:
        raise ValueError(f"`model` must be one of the GGUF files {found} in {folder}, got the folder")
    return _existing_gguf(folder / found[0]) if found else None


def _download_gguf(match: re.Match[str], download: Callable[..., str]) -> Path:
    """Returns a GGUF file of a repository on the hub after downloading it, with all files of a split model.

    Args:
        match: The match of _HUB_GGUF.
        download: huggingface_hub's snapshot_download.
    """
    repo, kind, name = match["repo"], match["kind"], match["file"]
    if name:
        patterns = [shard.name for shard in shards_of(Path(name))]
        patterns = [str(Path(name).with_name(pattern)) for pattern in patterns]
    else:
        # The names on the hub are in upper or lower case.
        letters = "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in kind)
        ends = f"{letters}.gguf", f"{letters}-?????-of-?????.gguf"
        patterns = [before + end for before in ("*[-._/]", "") for end in ends]
    try:
        folder = Path(download(repo, allow_patterns=patterns))
    except Exception as e:  # as in resolve_model_dir
        raise ValueError(
            f"`model` must be a GGUF file of a repository on the Hugging Face hub, got {match.string!r}, "
            f"and the hub returned {type(e).__name__}: {e} Check the spelling and the network, run `hf auth "
            "login` for a gated model, or download the file elsewhere and pass its path."
        ) from e
    if name:
        return _existing_gguf(folder / name)
    found = select_files([file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")], kind)
    if len(found) != 1:
        got = found or "none"
        raise ValueError(f"`model` must be one GGUF file, but {repo} has these of type {kind}: {got}")
    return _existing_gguf(folder / found[0])


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
        folder: The model folder, or a GGUF file, whose metadata takes the place of config.json.
        overrides: New values of fields. The fields of text_config and vision_config are replaced one by one;
            any other object is replaced as a whole.

    Raises:
        ValueError: If config.json does not exist, or if a field of the text model is overridden outside of
            text_config.
    """
    found = config_of(read_header(folder)) if is_gguf(folder) else read_json(folder / "config.json")
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
        folder: The model folder, or a GGUF file, whose metadata takes the place of generation_config.json.
    """
    if is_gguf(folder):
        return generation_config_of(read_header(folder))
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
