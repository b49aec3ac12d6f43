"""GGUF files of every architecture have the configuration and weights of the checkpoint they were made of."""

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from flax import nnx
from helpers.gguf_files import ARCHITECTURES, write_gguf
from jax.sharding import Mesh

from jax_paged.models.checkpoint import read_config, read_generation_config, resolve_model_dir
from jax_paged.models.loading.gguf.block_types import BLOCK_TYPES, FLOAT_TYPES
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid
from jax_paged.models.quantization.quantize import kernel_places
from jax_paged.models.quantization.quantized_linear import QuantizedWeight
from jax_paged.models.weights import load_model, random_checkpoint
from jax_paged.pallas_kernels.native import quantized_products
from jax_paged.worker.loading.weights import packed_quantized

pytestmark = pytest.mark.thorough

FIXTURES = Path(__file__).parent / "fixtures"
# Checkpoints with values that a GGUF file has no place for, which are replaced by what llama.cpp assumes.
CHANGED: dict[str, dict[str, Any]] = {
    "gqa4_llama3": {},
    "llama3_tied_biases_old_config": {"mlp_bias": False, "attention_bias": False},
    "llama_linear_rope": {},
    "mistral": {},
    "qwen2_tied_yarn": {},
    "qwen3_tied": {},
    "qwen3_moe_tied": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_linear_rope": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 3},
    "phi3_longrope": {},
    "phi3_window": {},
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "gpt_oss_old_config": {"swiglu_limit": 7.0, "layer_types": ["sliding_attention", "full_attention"]},
}


def checkpoint(folder: Path, name: str, **changes: Any) -> Path:
    """Writes a random checkpoint with the configuration of a fixture. Returns its folder."""
    config = json.loads((FIXTURES / name / "config.json").read_text()) | CHANGED[name] | changes
    random_checkpoint(folder, config, "float32")
    # The written config.json has no other dtype than float32.
    return folder


def weights(model: nnx.Module) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(model))}


def table_of(model: Any) -> np.ndarray:
    """Returns the embeddings. A quantized table is a matrix whose columns are the vectors."""
    table = model.embed_tokens.embedding
    return np.asarray(table.dense(np.float32).T if isinstance(table, QuantizedWeight) else table[...])


def assert_same_weights(found: nnx.Module, want: nnx.Module, atol: float = 0.0) -> None:
    first, second = weights(found), weights(want)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(value, second[name], rtol=0, atol=atol, err_msg=name)


QUICK = ("llama3_tied_biases_old_config", "qwen3_moe_tied", "gemma3_linear_rope", "phi3_longrope", "gpt_oss")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.quick] * (name in QUICK)) for name in CHANGED]
)
def test_same_configuration_and_weights_as_the_checkpoint(tmp_path: Path, name: str) -> None:
    folder, file = checkpoint(tmp_path / "hf", name), tmp_path / "model.gguf"
    write_gguf(file, folder)
    want, found = load_model(folder), load_model(file)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    assert found.architecture == ("LlamaForCausalLM" if name == "mistral" else architecture)
    config = {"rms_norm_eps": found.config.rms_norm_eps, "rope": found.config.rope}
    first, second = (vars(x.config) | {"initializer_range": 0, **config} for x in (found, want))
    assert not {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)} - {
        "windows"
    }
    assert [w for w in first["windows"] if w] == [w for w in second["windows"] if w]
    assert found.config.rms_norm_eps == pytest.approx(
        want.config.rms_norm_eps, rel=1e-7
    )  # float32 in the file
    # The file has thetas and factors in float32.
    np.testing.assert_allclose(found.config.rope.frequencies, want.config.rope.frequencies, rtol=1e-6)
    assert found.config.rope.magnitude == pytest.approx(want.config.rope.magnitude, rel=1e-6)
    # The file stores a Gemma's norm as 1 + weight, which is rounded to a multiple of 2^-23 below 2. The
    # difference is exact.
    assert_same_weights(found.model, want.model, 2**-24 if "gemma" in name else 0.0)
    assert found.dtype == np.float32


def test_every_architecture_is_tested() -> None:
    names = {
        json.loads((FIXTURES / name / "config.json").read_text())["architectures"][0] for name in CHANGED
    }
    assert names == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", ["F16", "BF16", *BLOCK_TYPES])
def test_every_type_keeps_its_values(tmp_path: Path, kind: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 48}
    folder = checkpoint(
        tmp_path / "hf", "qwen3_moe_tied", **wide, moe_intermediate_size=256, num_hidden_layers=1
    )
    write_gguf(tmp_path / "model.gguf", folder, lambda name, value: "F32" if "gate_inp" in name else kind)
    found, reader = load_model(tmp_path / "model.gguf", "float32"), gguf.GGUFReader(tmp_path / "model.gguf")
    assert load_model(tmp_path / "model.gguf").dtype == "bfloat16"
    want = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    model = found.model
    np.testing.assert_array_equal(table_of(model), want["token_embd.weight"])
    layer = model.layers[0]
    for kernel, name in (
        (layer.self_attn.q_proj.kernel, "attn_q"),
        (layer.self_attn.o_proj.kernel, "attn_output"),
        (layer.mlp.experts.gate_proj, "ffn_gate_exps"),
        (layer.mlp.experts.down_proj, "ffn_down_exps"),
    ):
        assert isinstance(kernel, QuantizedWeight) == (kind not in FLOAT_TYPES)
        value = kernel.dense(np.float32) if isinstance(kernel, QuantizedWeight) else kernel[...]
        np.testing.assert_array_equal(value, want[f"blk.0.{name}.weight"].swapaxes(-1, -2))


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "MXFP4"])
def test_experts_of_gpt_oss(tmp_path: Path, kind: str) -> None:
    sizes = {
        "intermediate_size": 64,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
    }
    folder = checkpoint(tmp_path / "hf", "gpt_oss", **sizes)
    write_gguf(tmp_path / "model.gguf", folder, lambda name, value: kind if "exps" in name else "F32")
    model, reader = (
        load_model(tmp_path / "model.gguf", "float32").model,
        gguf.GGUFReader(tmp_path / "model.gguf"),
    )
    want = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    gate, up, down = (want[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down"))
    experts = model.layers[0].mlp.experts
    kernels = [
        np.asarray(k.dense(np.float32) if isinstance(k, QuantizedWeight) else k[...])
        for k in (experts.gate_up_proj, experts.down_proj)
    ]
    np.testing.assert_array_equal(kernels[0][..., ::2], gate.swapaxes(1, 2))
    np.testing.assert_array_equal(kernels[0][..., 1::2], up.swapaxes(1, 2))
    np.testing.assert_array_equal(kernels[1], down.swapaxes(1, 2))


def test_logits_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hf", "mistral")
    write_gguf(tmp_path / "model.gguf", folder, lambda name, value: "Q4_1")
    found = load_model(tmp_path / "model.gguf", "float32").model
    tokens = np.arange(24)[None] * 7 % 256
    logits = np.asarray(found(tokens))
    dense = load_model(folder).model
    kernels = {place.path: place.kernel for place in kernel_places(found)}
    for place in kernel_places(dense):
        place.kernel[...] = kernels[place.path].dense(np.float32)
    dense.embed_tokens.embedding[...] = table_of(found)
    # Sums of at most 64 products in float32, in another order, through two layers.
    np.testing.assert_allclose(logits, dense(tokens), rtol=1e-4, atol=1e-4)
    assert np.abs(logits - np.asarray(load_model(folder).model(tokens))).max() > 1e-3  # 4 bits are not exact


@pytest.mark.parametrize("has_native", [True, False])
def test_quantized_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_native: bool) -> None:
    """The table is quantized if the native backend can look up its columns; the vectors are the same."""
    folder = checkpoint(tmp_path / "hf", "qwen3_tied")
    write_gguf(tmp_path / "model.gguf", folder, lambda name, value: "Q8_0")
    problem = None if has_native else "none"
    monkeypatch.setattr(quantized_products, "problem", lambda: problem)
    model: Any = load_model(tmp_path / "model.gguf", "float32").model
    assert isinstance(model.embed_tokens.embedding, QuantizedWeight) == has_native
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    stored = next(t for t in reader.tensors if t.name == "token_embd.weight")
    want = gguf.quants.dequantize(stored.data, stored.tensor_type)
    np.testing.assert_array_equal(table_of(model), want)


@pytest.mark.skipif(quantized_products.problem() is not None, reason="needs the native backend")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K"])
def test_logits_of_packed_weights(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    folder = checkpoint(tmp_path / "hf", "qwen3_tied", **sizes)
    write_gguf(tmp_path / "model.gguf", folder, lambda name, value: kind)
    plain: Any = load_model(tmp_path / "model.gguf", "float32").model
    tokens = np.arange(12)[None] * 7 % 256
    want, found = np.asarray(plain(tokens)), np.asarray(packed_quantized(plain, in_place=False)(tokens))
    # Sums of 256 products in float32, in another order.
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.quick
def test_split_files(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hf", "qwen3_tied")
    for name in ("one", "parts"):
        (tmp_path / name).mkdir()
    write_gguf(tmp_path / "one" / "model.gguf", folder)
    write_gguf(tmp_path / "parts" / "model.gguf", folder, split_max_tensors=7)
    names = sorted(file.name for file in (tmp_path / "parts").iterdir())
    assert len(names) > 2
    for given in (tmp_path / "parts", tmp_path / "parts" / names[0], tmp_path / "parts" / names[1]):
        first = resolve_model_dir(str(given))
        assert first.name == names[0]
        assert_same_weights(load_model(first).model, load_model(tmp_path / "one" / "model.gguf").model)
    (tmp_path / "parts" / names[1]).unlink()
    with pytest.raises(
        ValueError, match=f"must contain all files of the model, but these are missing.*{names[1]}"
    ):
        resolve_model_dir(str(tmp_path / "parts"))


@pytest.mark.quick
def test_unsupported_types_and_architectures(tmp_path: Path) -> None:
    folder, file = checkpoint(tmp_path / "hf", "mistral"), tmp_path / "model.gguf"
    write_gguf(file, folder)
    # The type of a tensor follows its dimensions: F32 is 0, IQ4_NL is 20.
    data = file.read_bytes()
    at = data.index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 2 * 8
    file.write_bytes(data[:at] + (20).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(
        ValueError, match=r"blk.0.ffn_down.weight of .* supported type \(F32, .*Q6_K.*got IQ4_NL"
    ):
        load_model(file)
    file.write_bytes(data.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05" + bytes(7) + b"lxama"))
    with pytest.raises(
        ValueError, match=r"`general.architecture` of .* must be one of 'llama', .*got 'lxama'"
    ):
        resolve_model_dir(str(file))


def test_quantization_argument(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hf", "mistral")
    write_gguf(tmp_path / "floats.gguf", folder)
    write_gguf(tmp_path / "q8.gguf", folder, lambda name, value: "Q8_0")
    want = load_model(folder, quantization="int8").model
    assert_same_weights(load_model(tmp_path / "floats.gguf", quantization="int8").model, want)
    with pytest.raises(
        ValueError, match=r"`quantization` must be None for the weights in .*q8.gguf, got 'int8'"
    ):
        load_model(tmp_path / "q8.gguf", quantization="int8")


@pytest.mark.quick
def test_end_tokens_and_sampling_parameters(tmp_path: Path) -> None:
    folder, file = checkpoint(tmp_path / "hf", "mistral"), tmp_path / "model.gguf"
    tokens = ["a", "<|im_end|>", "</s>", "<|end|>", "<|eot_id|>", "<|return|>"]

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_types([1, 3, 3, 4, 1, 3])
        writer.add_eos_token_id(2)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)

    write_gguf(file, folder, metadata=metadata)
    # Token 4 is ordinary text, although it has the name of an end token.
    assert read_generation_config(file) == {"eos_token_id": [1, 2, 3, 5], "temperature": 0.5, "top_k": 20}
    tokens.append("<|call|>")

    def harmony(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_token_types([1, 3, 3, 4, 1, 3, 3])

    write_gguf(tmp_path / "harmony.gguf", folder, metadata=harmony)
    assert read_generation_config(tmp_path / "harmony.gguf") == {"eos_token_id": [1, 5, 6]}
    assert load_model(file).eos_token_ids == {1, 2, 3, 5}


def test_overrides(tmp_path: Path) -> None:
    folder, file = checkpoint(tmp_path / "hf", "mistral"), tmp_path / "model.gguf"
    write_gguf(file, folder)
    assert read_config(file, {"rope_theta": 5.0})["rope_theta"] == 5.0


def test_devices_share_the_weights(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "hf", "mistral", hidden_size=64, intermediate_size=128)
    write_gguf(tmp_path / "model.gguf", folder, lambda name, value: "Q5_1")
    grid = DeviceGrid(Mesh(np.array(jax.devices()[:2]), (TENSOR,)))
    found = load_model(tmp_path / "model.gguf", "float32", grid=grid).model
    assert_same_weights(found, load_model(tmp_path / "model.gguf", "float32").model)
