"""Where a model folder is, and what is read of it without JAX."""

import json
import os
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
    with pytest.raises(
        ValueError, match=r"`model` must be .* with model\*.safetensors files, got 'org/name'"
    ):
        resolve_model_dir("org/name")
    (tmp_path / "cache" / "model.safetensors").touch()
    assert resolve_model_dir("org/name") == tmp_path / "cache"
    repo_id, patterns = asked[-1]
    assert repo_id == "org/name"
    assert not any(p.endswith((".bin", ".pt", ".pth", ".py", "*")) for p in patterns)


class OutOfReach(Exception):
    """An error of an HTTP library, which is no OSError."""


@pytest.mark.parametrize("error", [OSError("no route"), OutOfReach("no route")])
@pytest.mark.parametrize("num_answers", [0, 1])
def test_a_hub_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_answers: int, error: Exception
) -> None:
    """The hub may go away between config.json and the weights."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    answers = iter([str(tmp_path)] * num_answers)

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        for answer in answers:
            return answer
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    text = rf"`model` must be 'pagelet' .* got 'org/name'.*{type(error).__name__}: no route"
    with pytest.raises(ValueError, match=text):
        resolve_model_dir("org/name")


def test_a_cached_config_without_a_network_is_no_model(tmp_path: Path) -> None:
    """huggingface_hub itself, in a process without a network: it returns whatever is cached."""
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c" * 40)
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    code = "from jax_paged.models.checkpoint import resolve_model_dir; resolve_model_dir('org/name')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 1
    last_line = out.stderr.strip().splitlines()[-1]
    assert last_line.startswith(
        "ValueError: `model` must be a Hugging Face hub id with model*.safetensors files"
    )
    assert str(snapshot) in last_line


def test_a_path_is_never_asked_for_at_the_hub() -> None:
    with pytest.raises(ValueError, match=r"`model` must be .* got '/no/such/folder'. There is no folder"):
        resolve_model_dir("/no/such/folder")
