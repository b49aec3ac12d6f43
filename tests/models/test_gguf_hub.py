"""Hub ids of GGUF files: what is downloaded, and which file of a repository is the model."""

from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from helpers.gguf_files import write_gguf

from jax_paged.models.checkpoint import is_gguf, resolve_model_dir
from jax_paged.models.weights import random_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
REPOSITORY = (
    "config.json",
    "model-IQ4_XS.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "mmproj-Q8_0.gguf",
    "model.q8_0.gguf",
    "F16/model-F16-00001-of-00002.gguf",
    "F16/model-F16-00002-of-00002.gguf",
)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the hub with one that has a repository. Returns the names of the downloaded files."""
    folder, cache = tmp_path / "hf", tmp_path / "cache"
    random_checkpoint(folder, CONFIG, "float32")
    write_gguf(tmp_path / "model.gguf", folder)
    data, downloaded = (tmp_path / "model.gguf").read_bytes(), list[str]()

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        if repo_id != "org/repo":
            raise OSError("no such repository")
        for name in REPOSITORY:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                downloaded.append(name)
                (cache / name).parent.mkdir(parents=True, exist_ok=True)
                (cache / name).write_bytes(data)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return downloaded


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("org/repo:Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("org/repo:q4_k_m", ["model-Q4_K_M.gguf"]),
        ("org/repo:Q8_0", ["model.q8_0.gguf"]),
        ("org/repo/model-Q4_K_S.gguf", ["model-Q4_K_S.gguf"]),
    ],
)
def test_only_one_file_is_downloaded(hub: list[str], model: str, files: list[str]) -> None:
    assert is_gguf(model)
    assert resolve_model_dir(model).name == files[0]
    assert [name for name in hub if "mmproj" not in name] == files


@pytest.mark.parametrize("model", ["org/repo:F16", "org/repo/F16/model-F16-00001-of-00002.gguf"])
def test_all_files_of_a_split_model_are_downloaded(hub: list[str], model: str) -> None:
    # Both files of this hub are the same one, which the reader notices after the download.
    with pytest.raises(ValueError, match=r"model-F16-00002-of-00002.gguf has tensors that other files"):
        resolve_model_dir(model)
    assert hub == ["F16/model-F16-00001-of-00002.gguf", "F16/model-F16-00002-of-00002.gguf"]


def test_errors(hub: list[str]) -> None:
    with pytest.raises(ValueError, match=r"`model` must be one GGUF file, but org/repo has .* Q3_K: none"):
        resolve_model_dir("org/repo:Q3_K")
    with pytest.raises(ValueError, match=r"`model` must be an existing GGUF file.*got '.*none.gguf'"):
        resolve_model_dir("org/repo/none.gguf")
    with pytest.raises(ValueError, match=r"got 'org/other:Q8_0', and the hub returned OSError: no such repo"):
        resolve_model_dir("org/other:Q8_0")
    assert not hub


def test_folders(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    random_checkpoint(folder, CONFIG, "float32")
    write_gguf(folder / "a.gguf", folder)
    assert resolve_model_dir(str(folder)) == folder  # it has safetensors files
    (folder / "model.safetensors").unlink()
    assert resolve_model_dir(str(folder)) == folder / "a.gguf"
    (folder / "mmproj-a.gguf").write_bytes(b"")
    assert resolve_model_dir(str(folder)) == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"must be one of the GGUF files \['a.gguf', 'b.gguf'\] in .*/hf, got"
    ):
        resolve_model_dir(str(folder))
    assert not is_gguf(folder)
    assert not is_gguf("org/repo")
