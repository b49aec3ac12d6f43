"""Checkpoint folders: what is loaded, and what is rejected before a weight is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jax_paged.models import weights
from jax_paged.models.checkpoint import end_token_ids, read_config
from jax_paged.models.loading import stored_tensors
from jax_paged.models.loading.stored_tensors import StoredTensor
from jax_paged.models.weights import load_model, random_checkpoint, random_model, save_model

SHARDED = Path(__file__).parent / "fixtures" / "wide_heads_mlp_bias_sharded"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attention_bias": True,
    "eos_token_id": 2,
}
TIED = CONFIG | {"tie_word_embeddings": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    random_checkpoint(folder, CONFIG | {"initializer_range": 0.2}, "float32")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A checkpoint of CONFIG that a test may modify."""
    return shutil.copytree(made, tmp_path / "folder")


def values(model: Any) -> dict[str, np.ndarray]:
    """Returns the weights by NNX path."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): np.asarray(param[...]) for path, param in flat}


def edit(folder: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Replaces, adds or (None) removes tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_loaded_is_the_same(tmp_path: Path, config: dict[str, Any], dtype: Any) -> None:
    made = random_model(config, dtype, seed=3)
    save_model(made.model, tmp_path / "new", config)
    loaded = load_model(tmp_path / "new", "auto")
    assert loaded.dtype == made.dtype == jnp.dtype(dtype)
    before, after = values(made.model), values(loaded.model)
    assert before.keys() == after.keys()
    for path, value in before.items():
        assert after[path].dtype == loaded.dtype
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    assert nnx.graphdef(loaded.model) == nnx.graphdef(made.model)
    assert loaded.weight_bytes == made.weight_bytes == sum(v.nbytes for v in before.values())
    assert (loaded.vocab_size, loaded.max_model_len, loaded.architecture) == (64, 256, "LlamaForCausalLM")
    with pytest.raises(ValueError, match="`hf_config` must be the config of the model, LlamaConfig"):
        save_model(made.model, tmp_path / "new", config | {"hidden_size": 64})


def test_random_weights_follow_the_seed_and_the_config() -> None:
    config = CONFIG | {"initializer_range": 0.1}
    one, again, other = (values(random_model(config, "float32", seed).model) for seed in (1, 1, 2))
    for path, value in one.items():
        np.testing.assert_array_equal(value, again[path])
        if value.ndim == 2:
            assert not np.array_equal(value, other[path])
            # 5 standard errors of a standard deviation.
            assert value.std() == pytest.approx(0.1, rel=5 / np.sqrt(2 * value.size)), path
    matrices = [v.tobytes() for v in one.values() if v.ndim == 2]
    assert len(set(matrices)) == len(matrices)


def test_cast_to_bfloat16(folder: Path) -> None:
    exact, rounded = load_model(folder), load_model(folder, "bfloat16")
    for path, value in values(exact.model).items():
        np.testing.assert_array_equal(values(rounded.model)[path], value.astype(ml_dtypes.bfloat16))
    assert rounded.weight_bytes * 2 == exact.weight_bytes
    tokens = jnp.arange(32).reshape(2, 16)
    call = nnx.jit(lambda model, tokens: model(tokens))
    a, b = call(exact.model, tokens), call(rounded.model, tokens)
    assert b.dtype == jnp.float32
    # bfloat16 rounds by 2^-9; over two layers the errors stay within a few per cent of the logits' spread.
    assert float(jnp.abs(a - b).max()) < 0.1 * float(a.std())


def test_shards(tmp_path: Path) -> None:
    whole = {}
    for file in SHARDED.glob("*.safetensors"):
        whole |= load_file(file)
    shutil.copy(SHARDED / "config.json", tmp_path)
    save_file(whole, tmp_path / "model.safetensors")
    sharded, single = values(load_model(SHARDED).model), values(load_model(tmp_path).model)
    assert len(list(SHARDED.glob("*.safetensors"))) > 1
    assert len(sharded) == len(whole)
    for path, value in sharded.items():
        np.testing.assert_array_equal(value, single[path])


def test_bad_shards_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SHARDED, folder)
    (folder / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lists missing shards: \['model-00002-of-00004.safetensors'\]"):
        load_model(folder)
    shutil.copy(folder / "model-00001-of-00004.safetensors", folder / "model-00002-of-00004.safetensors")
    with pytest.raises(ValueError, match=r"is in two files, .*00001-of-00004.* and .*00002-of-00004"):
        load_model(folder)
    for weight_map in (None, ["a"], {"lm_head.weight": 3}):
        (folder / stored_tensors.INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match="`weight_map` of"):
            load_model(folder)
    shutil.copy(SHARDED / "model-00001-of-00004.safetensors", tmp_path / "outside.safetensors")
    (folder / stored_tensors.INDEX_FILE).write_text(
        json.dumps({"weight_map": {"x": "../outside.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"outside\.safetensors"):
        load_model(folder)


def test_all_wrong_weights_are_in_one_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q_proj = "model.layers.0.self_attn.q_proj"
    changes = {
        f"{q_proj}.bias": None,
        f"{q_proj}.weight": np.zeros((32, 16), np.float32),
        "model.norm.weight": np.zeros(32, np.int8),
        "model.layers.1.mlp.other_proj.weight": np.zeros((48, 32), np.float32),
        "lm_head.weight": None,
        # Older checkpoints hold this one, but no model reads it.
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
    }
    edit(folder, changes)
    monkeypatch.delattr(StoredTensor, "read")
    with pytest.raises(ValueError) as error:
        load_model(folder)
    assert str(error.value).splitlines()[1:] == [
        "  lm_head.weight is missing, and config.json does not tie it to another weight",
        f"  {q_proj}.bias is missing",
        f"  {q_proj}.weight must have shape (32, 32) by config.json, got (32, 16)",
        "  model.layers.1.mlp.other_proj.weight is unexpected",
        "  model.norm.weight must be of type F32, BF16, F16, got I8",
    ]


def test_vocabulary_larger_than_the_embedding(folder: Path) -> None:
    edit_config(folder, vocab_size=65)
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight must have shape \(65, 32\) by config.json, got \(64, 32\)"
    ):
        load_model(folder)


def test_square_weights_are_transposed(folder: Path) -> None:
    # The shape of a square matrix doesn't show whether it was transposed.
    stored = load_file(folder / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    kernel = values(load_model(folder).model)["layers.1.self_attn.q_proj.kernel"]
    assert stored.shape == kernel.shape == (32, 32)
    np.testing.assert_array_equal(kernel, stored.T)


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    random_checkpoint(tmp_path, TIED, "float32")
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit(tmp_path, {"lm_head.weight": embedding})
    assert not any("lm_head" in path for path in values(load_model(tmp_path).model))
    edit(tmp_path, {"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_model(tmp_path)
    edit(tmp_path, {"lm_head.weight": embedding[:10]})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_model(tmp_path)


def test_float16_is_read_in_other_types(folder: Path) -> None:
    halves = {k: v.astype(np.float16) for k, v in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors")
    for own in ({"dtype": "float16"}, {"dtype": None, "torch_dtype": "float16"}, {"dtype": None}):
        edit_config(folder, **own)
        kernel = values(load_model(folder).model)["lm_head.kernel"]
        np.testing.assert_array_equal(kernel, halves["lm_head.weight"].T.astype(ml_dtypes.bfloat16))
    kernel = values(load_model(folder, "float32").model)["lm_head.kernel"]
    np.testing.assert_array_equal(kernel, halves["lm_head.weight"].T)
    with pytest.raises(
        ValueError, match=r"`dtype` must be one of 'auto', 'float32', 'bfloat16'.*got 'float16'"
    ):
        weights._choose_dtype("float16", {}, {})


def test_a_declared_type_goes_before_stored_ones(folder: Path) -> None:
    edit(folder, {"model.norm.weight": np.ones(32, ml_dtypes.bfloat16)})
    assert load_model(folder).dtype == jnp.float32
    edit_config(folder, dtype=None)
    assert load_model(folder).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("config_id", "generation_id", "expected"),
    [
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, [5, 6], {5, 6}),
        (None, 7, {7}),
        (None, None, set()),
        (64, None, "`eos_token_id` must be null, an id in [0, 63] or a list of ids, got 64"),
        (2, [-1], "`eos_token_id` must be null, an id in [0, 63] or a list of ids, got [-1]"),
        (True, None, "`eos_token_id` must be null, an id in [0, 63] or a list of ids, got True"),
        ("</s>", None, "`eos_token_id` must be null, an id in [0, 63] or a list of ids, got '</s>'"),
    ],
)
def test_end_tokens(folder: Path, config_id: Any, generation_id: Any, expected: set[int] | str) -> None:
    edit_config(folder, eos_token_id=config_id)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_id}))
    if isinstance(expected, set):
        assert load_model(folder).eos_token_ids == expected
    else:
        with pytest.raises(ValueError) as error:
            load_model(folder)
        assert expected in str(error.value)


def test_overrides_of_the_text_model() -> None:
    """Qwen3.5's model card extends its context like this."""
    folder = SHARDED.parent / "qwen3_5_nested"
    whole = read_config(folder, {})
    text = {"max_position_embeddings": 32}
    found = read_config(folder, {"text_config": text, "dtype": "float32"})
    assert found == whole | {"text_config": whole["text_config"] | text, "dtype": "float32"}
    assert (
        weights.outline(folder, "float32", None, {"text_config": text}).config.max_position_embeddings == 32
    )
    assert read_config(SHARDED, text) == read_config(SHARDED, {}) | text
    with pytest.raises(ValueError, match=r"`text_config` of config.json must be an object, got 5"):
        weights.outline(folder, "float32", None, {"text_config": 5})
    for bad in (text, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}):
        with pytest.raises(ValueError, match=r"`hf_overrides` must set \['\w+'\] inside text_config"):
            weights.outline(folder, "float32", None, bad)


def test_what_only_the_text_config_says() -> None:
    """Published Qwen3.5 and Qwen3-VL name their type and their end token there."""
    hf_config: dict[str, Any] = {"text_config": {"dtype": "bfloat16", "eos_token_id": [1, 3]}}
    mixed = {d: StoredTensor(Path(), d, 0, (1,), d) for d in ("F32", "BF16")}
    assert weights._choose_dtype("auto", hf_config, mixed) == jnp.bfloat16
    assert weights._choose_dtype("auto", hf_config | {"torch_dtype": "float32"}, mixed) == jnp.float32
    assert end_token_ids({}, hf_config, 8) == {1, 3}
    assert end_token_ids({}, hf_config | {"eos_token_id": 2}, 8) == {2}
    assert end_token_ids({"eos_token_id": 5}, hf_config, 8) == {5}


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        (
            {"do_sample": False, "top_k": 5, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": None, "top_k": 50, "max_length": 9}, {"top_k": 50}),
        (
            {"do_sample": False, "max_new_tokens": 2048, "max_tokens": 5},
            {"temperature": 0.0, "max_tokens": 2048},
        ),
        ({"max_new_tokens": 0}, {}),
        ({"max_new_tokens": "many"}, {}),
    ],
)
def test_sampling_defaults(folder: Path, generation_config: dict[str, Any], expected: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    assert load_model(folder).sampling_defaults == expected


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        load_model(tmp_path)
    random_checkpoint(tmp_path, CONFIG, "float32")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for broken in (content[:-1], content[:100], b"version https://git-lfs.github.com/spec/v1\n", b""):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"model.safetensors is incomplete or not a safetensors file"):
            load_model(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"contains neither .*'pytorch_model.bin'.* convert them"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json must be a JSON object, got a list"):
        load_model(tmp_path)


def test_weights_are_not_read_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, read_one = [], StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda stored: read.append(stored.key) or read_one(stored))
    loaded = load_model(folder)
    assert len(read) == len(set(read)) == len(jax.tree.leaves(nnx.state(loaded.model)))


def test_stacked_experts(tmp_path: Path) -> None:
    folder = shutil.copytree(SHARDED.parent / "qwen3_moe_tied", tmp_path / "model")
    key = "model.layers.1.mlp.experts.{}.down_proj.weight"
    stored = load_file(folder / "model.safetensors")
    stack = values(load_model(folder, "bfloat16").model)["layers.1.mlp.experts.down_proj"]
    assert stack.shape == (8, 24, 32)
    for i, kernel in enumerate(stack):
        np.testing.assert_array_equal(kernel, stored[key.format(i)].T.astype(ml_dtypes.bfloat16))
    extra = np.zeros((32, 24), np.float32)
    edit(folder, {key.format(3): None, key.format(5): extra.T.copy(), key.format(8): extra})
    with pytest.raises(ValueError) as error:
        load_model(folder)
    assert str(error.value).splitlines()[1:] == [
        f"  {key.format(3)} is missing",
        f"  {key.format(5)} must have shape (32, 24) by config.json, got (24, 32)",
        f"  {key.format(8)} is unexpected",
    ]


def test_weights_do_not_follow_the_file(folder: Path) -> None:
    model = load_model(folder).model
    before = values(model)
    file = folder / "model.safetensors"
    with file.open("r+b") as f:
        f.seek(-1000, 2)
        f.write(b"\1" * 1000)
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
