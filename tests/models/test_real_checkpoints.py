"""What published checkpoints hold beside the weights that a model reads, and the types that they have."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jax_paged.models.loading.new_weights import with_weights
from jax_paged.models.loading.stored_tensors import INDEX_FILE, StoredTensor
from jax_paged.models.weights import load_model, random_checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A float32 checkpoint of each of three architectures, which declares no dtype."""
    folders = {}
    for config in (CONFIG, CONFIG | {"architectures": ["LlamaModel"]}, BERT):
        (name,) = config["architectures"]
        folders[name] = tmp_path_factory.mktemp(name)
        random_checkpoint(folders[name], config, "float32")
        (folders[name] / "config.json").write_text(json.dumps(config))
    return folders


@pytest.fixture
def folder(made: dict[str, Path], tmp_path: Path) -> Path:
    """A LlamaForCausalLM that a test may modify."""
    return shutil.copytree(made["LlamaForCausalLM"], tmp_path / "folder")


def convert(folder: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    """Changes each tensor of a checkpoint."""
    tensors = {key: change(key, value) for key, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")


def add(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_integer_tensors_are_no_weights(
    made: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """all-MiniLM-L6-v2 holds position_ids in int64, and keys without a prefix."""
    folder = shutil.copytree(made["BertModel"], tmp_path / "bert")
    tensors = load_file(folder / "model.safetensors")
    bare = {key.removeprefix("bert."): value for key, value in tensors.items()}
    bare["embeddings.position_ids"] = np.arange(64)[None]
    save_file(bare, folder / "model.safetensors")
    assert load_model(folder).dtype == jnp.float32
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    "change",
    [
        lambda key, value: value.astype(np.float16),
        lambda key, value: value if "norm" in key else value.astype(ml_dtypes.bfloat16),
        lambda key, value: value.astype(np.float16 if "mlp" in key else ml_dtypes.bfloat16),
    ],
    ids=["float16", "bfloat16 and float32", "float16 and bfloat16"],
)
def test_auto_is_bfloat16_for_types_that_models_do_not_have(
    folder: Path, change: Callable[[str, np.ndarray], np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    convert(folder, change)
    assert load_model(folder).dtype == jnp.bfloat16
    (warning,) = warnings_of(caplog)
    assert "dtype='float32'" in warning
    assert "bfloat16" in warning
    caplog.clear()
    assert load_model(folder, "float32").dtype == jnp.float32
    assert not warnings_of(caplog)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_auto_is_bfloat16_for_a_declared_float16(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nearly every AWQ and GPTQ checkpoint declares it."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {name: "float16"}))
    assert load_model(folder).dtype == jnp.bfloat16
    assert len(warnings_of(caplog)) == 1
    (folder / "config.json").write_text(json.dumps(CONFIG | {name: "float64"}))
    with pytest.raises(ValueError, match=r"`dtype` must be .* the checkpoint is float64, got 'auto'"):
        load_model(folder)


LAYER = "model.layers.0.self_attn"
UNUSED: dict[str, dict[str, np.ndarray]] = {
    "frequencies": {
        f"{LAYER}.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.rotary_emb.inv_freq": np.ones(4, np.float32),
        "language_model.rotary_emb.inv_freq": np.ones(4, np.float32),
    },
    "layers beyond the last": {
        "model.layers.2.mlp.up_proj.weight": np.ones((48, 32), np.float32),
        "model.layers.2.eh_proj.weight": np.ones((32, 64), np.float32),
        "model.layers.10.mlp.experts.7.up_proj.weight": np.ones((4, 4), np.float32),
    },
    "a value head": {
        "v_head.summary.weight": np.ones((1, 32), np.float32),
        "v_head.summary.bias": np.ones(1, np.float32),
    },
    "biases of zeros": {
        f"{LAYER}.q_proj.bias": np.zeros(32, np.float32),
        "model.norm.bias": np.zeros(32, np.float32),
        "lm_head.bias": np.zeros(64, np.float32),
    },
    "scales of keys and values": {
        f"{LAYER}.k_scale": np.ones(1, np.float32),
        f"{LAYER}.kv_scale": np.ones((), np.float32),
        f"{LAYER}.attn.v_scale": np.ones((), np.float32),
        f"{LAYER}.k_proj.k_scale": np.ones((), np.float32),
        f"{LAYER}.v_proj.output_scale": np.ones((), np.float32),
    },
    "positions": {"model.position_ids": np.arange(5)},
}


@pytest.mark.parametrize("tensors", UNUSED.values(), ids=UNUSED)
def test_tensors_that_no_model_reads_are_ignored(
    folder: Path, tensors: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    add(folder, tensors)
    assert load_model(folder).dtype == jnp.float32
    (warning,) = warnings_of(caplog)
    # The first is in every old checkpoint of the family, and ignored without a word.
    for key in tensors.keys() - {f"{LAYER}.rotary_emb.inv_freq"}:
        pattern = ".".join("*" if part.isdigit() else part for part in key.split("."))
        assert pattern in warning


@pytest.mark.parametrize(
    "key",
    [
        f"{LAYER}.q_proj.bias",
        "lm_head.bias",
        f"{LAYER}.q_norm.weight",
        "model.layers.1.mlp.experts.8.up_proj.weight",
        "score.weight",
    ],
)
def test_tensors_that_could_matter_stay_errors(folder: Path, key: str) -> None:
    add(folder, {key: np.ones(32, np.float32)})
    with pytest.raises(ValueError, match=rf"{key} is unexpected"):
        load_model(folder)


def test_a_model_without_a_head_leaves_a_stored_one(
    made: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(made["LlamaModel"], tmp_path / "folder")
    add(folder, {"lm_head.weight": np.ones((64, 32), np.float32)})
    load_model(folder)
    (warning,) = warnings_of(caplog)
    assert "lm_head.weight" in warning
    bare = {k.removeprefix("model."): v for k, v in load_file(folder / "model.safetensors").items()}
    save_file(bare, folder / "model.safetensors")
    load_model(folder)


def sharded(folder: Path, num_shards: int, names: str = "model-{:05d}-of-{:05d}.safetensors") -> list[Path]:
    """Divides the tensors of a folder among files without an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [folder / names.format(i + 1, num_shards) for i in range(num_shards)]
    for i, file in enumerate(files):
        save_file({key: tensors[key] for key in sorted(tensors)[i::num_shards]}, file)
    return files


def test_whole_shards_need_no_index(folder: Path) -> None:
    files = sharded(folder, 3)
    assert load_model(folder).dtype == jnp.float32
    files[1].unlink()
    with pytest.raises(ValueError) as error:
        load_model(folder)
    assert "model-00002-of-00003.safetensors" in str(error.value)
    assert INDEX_FILE in str(error.value)
    assert "other formats" not in str(error.value)


def test_safetensors_of_other_names_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(ValueError) as error:
        load_model(folder)
    assert "consolidated.safetensors" in str(error.value)
    assert "Rename" in str(error.value)
    assert "other formats" not in str(error.value)


def test_no_weight_is_read_to_find_what_is_unused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a bias is: it has few values."""
    read: list[str] = []
    original = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda tensor: read.append(tensor.key) or original(tensor))
    add(folder, {**UNUSED["a value head"], "unknown.weight": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match=r"unknown.weight is unexpected"):
        load_model(folder)
    assert not read


def test_new_weights_may_come_with_tensors_that_no_model_reads(folder: Path) -> None:
    """A trainer with a value head, such as TRL's, hands over all that it has."""
    model: Any = load_model(folder).model
    tensors = load_file(folder / "model.safetensors")
    more = UNUSED["a value head"] | UNUSED["biases of zeros"] | UNUSED["frequencies"]
    served: Any = with_weights(model, tensors | more, 256)
    np.testing.assert_array_equal(served.norm.scale[...], model.norm.scale[...])
    with pytest.raises(ValueError, match=r"lm_head.bias is unexpected"):
        with_weights(model, tensors | {"lm_head.bias": np.ones(64, np.float32)}, 256)
