"""Where a model's folder is; needs no JAX."""

import json
from pathlib import Path

# No pickled weights and no code: nothing that is downloaded can run.
HUB_FILES = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]


def resolve_model_dir(model: str) -> Path:
    """Returns the folder of a model, downloading it if it is a hub id.

    Args:
        model: "pagelet" (built in), a local folder in Hugging Face layout, or a hub id.

    Raises:
        ValueError: If it is none of these, the hub cannot be reached and its cache does not hold it, or
            the model there is of a family that is not supported.
    """
    if model == "pagelet":
        return Path(__file__).parent / "pagelet"
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # 0.2 s, and only hub models need it

    def download(patterns: list[str]) -> Path:
        return Path(snapshot_download(model, allow_patterns=patterns))

    try:
        config = download(["config.json"]) / "config.json"
    except (OSError, ValueError) as e:
        raise ValueError(
            f"model is {model!r}; allowed: 'pagelet' (built in), a local folder with config.json and "
            f"*.safetensors, or a Hugging Face hub id such as 'meta-llama/Llama-3.2-1B'. There is no folder "
            f"{folder.absolute()}, and the hub gave {type(e).__name__}: {e} Check the spelling and the "
            "network, run `hf auth login` for a gated model, or download it elsewhere and pass its folder."
        ) from e
    from jax_paged.models.registry import get_model_class  # imports JAX, and only hub models need it

    get_model_class(
        json.loads(config.read_text(encoding="utf-8"))
    )  # refuses a model of another family before its weights are fetched
    return download(HUB_FILES)
