"""Where a model folder is, and what is read of it without JAX."""

import json
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from jax_paged.models import checkpoint
from jax_paged.models.checkpoint import resolve_model_dir

WITHOUT_JAX = """
import sys
from jax_paged.models.checkpoint import read_json, resolve_model_dir
assert read_json(resolve_model_dir("pagelet") / "config.json")["model_type"] == "llama"
print(sorted({"jax", "jaxlib", "flax", "ml_dtypes", "numpy"} & sys.modules.keys()))
"""


def test_it_does_not_import_jax() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WITHOUT_JAX]
    out = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model_dir("pagelet") == Path(checkpoint.__file__).parent / "pagelet"
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    assert not asked
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(
        ValueError, match=r"`architectures` of config.json must be a list with one of ApertusForCausalLM,"
    ):
        resolve_model_dir("org/name")
    assert asked == [("org/name", ["config.json"])]
    (tmp_path / "cache" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert resolve_model_dir("org/name") == tmp_path / "cache"
    repo_id, patterns = asked[-1]
    assert repo_id == "org/name"
    assert not any(p.endswith((".bin", ".pt", ".pth", ".py", "*")) for p in patterns)

    def unreachable(repo_id: str, *, allow_patterns: list[str]) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"`model` must be 'pagelet' .* got 'org/name'.*OSError: no route"):
        resolve_model_dir("org/name")


def test_a_path_is_never_asked_for_at_the_hub() -> None:
    with pytest.raises(ValueError, match=r"`model` must be .* got '/no/such/folder'. There is no folder"):
        resolve_model_dir("/no/such/folder")
