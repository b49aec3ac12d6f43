"""Small kernels: what is read of every format, what is made on the fly, and what is refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers.quantized_checkpoints import AWQ, FORMATS, FP8, GPTQ, scheme, write_quantized
from safetensors.numpy import save_file

from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.loading.stored_tensors import read_headers
from jax_paged.models.quantization.config import quantization_of, read_quantization
from jax_paged.models.quantization.online import quantize
from jax_paged.models.quantization.quantize import choose_online_dtype, kernel_places, quantize_model
from jax_paged.models.quantization.quantized_linear import (
    QuantizedArrays,
    QuantizedWeight,
    multiply,
)
from jax_paged.models.weights import load_model, random_checkpoint, save_model

FIXTURES = Path(__file__).parent / "fixtures"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
SHORT = {"awq_32", "gptq_ordered_32", "packed_32", "fp8_block"}
NAMES = [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    random_checkpoint(folder, LLAMA, "float32")
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    random_checkpoint(folder, MOE, "float32")
    return folder


def kernels(model: Any) -> dict[str, Any]:
    return {".".join(map(str, place.path)): place.kernel for place in kernel_places(model)}


def tokens(length: int = 20) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 96, (2, length))


@pytest.mark.parametrize("name", FORMATS)
def test_kernels_are_bit_for_bit_what_the_format_means(name: str, made: Path, tmp_path: Path) -> None:
    meant = write_quantized(name, made, tmp_path / "q")
    loaded = load_model(tmp_path / "q", "float32")
    found = kernels(loaded.model)
    assert len(meant) == 7
    for key, value in meant.items():
        kernel = found[key.removeprefix("model.").replace(".weight", ".kernel")]
        assert isinstance(kernel, QuantizedWeight)
        np.testing.assert_array_equal(np.asarray(kernel.dense("float32")).T, value, err_msg=key)
        rounded_once = value.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(np.asarray(kernel.dense("bfloat16")).T, rounded_once, err_msg=key)
    assert isinstance(found["lm_head.kernel"], nnx.Param)
    in_files = (tmp_path / "q" / "model.safetensors").stat().st_size
    assert loaded.weight_bytes < 1.2 * in_files


REFERENCES = Path(__file__).parent / "quantized"
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": AWQ | {"group_size": 16},
    "gptq": GPTQ | {"group_size": 16, "desc_act": True},
    "packed": scheme(4, "int", "group", group_size=16),
    "packed_asymmetric": scheme(4, "int", "group", group_size=16, symmetric=False),
    "int8": scheme(8, "int", "channel"),
    "fp8_tensor": scheme(8, "float", "tensor"),
    "fp8_channel": scheme(8, "float", "channel"),
    "fp8_block": scheme(8, "float", "block", block_structure=[16, 16]),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_quantisers_have_written_is_what_they_read(name: str, tmp_path: Path) -> None:
    """Files of AutoAWQ, AutoGPTQ and compressed-tensors, and the floats that these make of them."""
    assert {file.stem for file in REFERENCES.iterdir()} == CONFIGS.keys()
    shutil.copy(REFERENCES / f"{name}.safetensors", tmp_path / "model.safetensors")
    stored = read_headers(tmp_path)
    expected = stored.pop("dense").read()
    _, weight_format = quantization_of({"quantization_config": CONFIGS[name]})
    assert weight_format is not None
    form = weight_format.scheme(stored, *expected.shape)
    assert form is not None
    assert not isinstance(form.source, str)
    known = form.source.tensors(*expected.shape)
    assert known.keys() == stored.keys()
    for end, (shape, dtypes) in known.items():
        assert stored[end].shape == shape
        assert stored[end].dtype in dtypes
    parts = form.source.arrays({end: stored[end].read() for end in known})
    kernel = QuantizedWeight(form, expected.shape, (None, None), jax.tree.map(jnp.asarray, parts))
    np.testing.assert_array_equal(kernel.dense("float32"), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_dense_call_is_that_of_the_floats(name: str, made: Path, tmp_path: Path) -> None:
    write_quantized(name, made, tmp_path / "q", tmp_path / "floats")
    small, floats = (load_model(tmp_path / f, "float32").model for f in ("q", "floats"))
    # Sums of 96 products in another order.
    np.testing.assert_allclose(small(tokens()), floats(tokens()), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["gptq_asymmetric_16", "fp8_block"])
def test_experts_are_read_and_multiply(name: str, experts: Path, tmp_path: Path) -> None:
    write_quantized(name, experts, tmp_path / "q", tmp_path / "floats")
    small, floats = (load_model(tmp_path / f, "float32").model for f in ("q", "floats"))
    ours, theirs = kernels(small), kernels(floats)
    path = "layers.0.mlp.experts.down_proj"
    assert ours[path].shape == (4, 32, 64)
    np.testing.assert_array_equal(ours[path].dense("float32"), theirs[path][...])
    np.testing.assert_allclose(small(tokens()), floats(tokens()), atol=1e-4, rtol=1e-5)


def test_maps_of_latents_are_read_and_multiply(tmp_path: Path) -> None:
    """As the published DeepSeek-V3: fp8 by blocks, and a layer behind the last that is not read."""
    meant = write_quantized("fp8_block", FIXTURES / "deepseek_v3_groups", tmp_path / "q", tmp_path / "floats")
    tensors = {key: tensor.read() for key, tensor in read_headers(tmp_path / "q").items()}
    tensors |= {
        f"model.layers.61.{end}": np.ones(2, np.float32) for end in ("enorm.weight", "eh_proj.weight")
    }
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    small, floats = (load_model(tmp_path / f, "float32").model for f in ("q", "floats"))
    ours = kernels(small)
    assert sum(isinstance(kernel, QuantizedWeight) for kernel in ours.values()) == 2 * 5 + 3 * 3
    path = "layers.1.self_attn.kv_b_proj"
    expected = meant[f"model.{path}.weight"].T
    np.testing.assert_array_equal(ours[f"{path}.kernel"].dense("float32"), expected)
    np.testing.assert_allclose(small(tokens()), floats(tokens()), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("gpt_oss", "int8"), ("gemma4_moe_capped", "fp8")])
def test_experts_in_one_tensor_are_made_small(name: str, kind: Any) -> None:
    """Those of gpt-oss, which have biases, and those of Gemma 4, which are stored transposed."""
    floats = load_model(FIXTURES / name, "float32").model
    small = quantize_model(floats, kind)
    loaded, of_memory = load_model(FIXTURES / name, "float32", quantization=kind).model, kernels(small)
    for path, kernel in kernels(loaded).items():
        if isinstance(kernel, QuantizedWeight):
            assert jax.tree.all(jax.tree.map(np.array_equal, kernel.arrays, of_memory[path].arrays)), path
    for place in kernel_places(floats):
        if isinstance(kernel := of_memory[".".join(map(str, place.path))], QuantizedWeight):
            place.kernel.set_value(kernel.dense("float32"))
    expert_kernels = [
        path for path, k in of_memory.items() if isinstance(k, QuantizedWeight) and "experts" in path
    ]
    assert len(expert_kernels) == 2 * floats.config.num_hidden_layers
    np.testing.assert_allclose(loaded(tokens()), floats(tokens()), atol=1e-4, rtol=1e-5)


def test_experts_in_one_tensor_of_bytes_are_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "gemma4_moe_capped", tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: tensor.read() for key, tensor in read_headers(folder).items()}
    key = next(key for key in tensors if key.endswith("0.experts.down_proj"))
    scale = {f"{key}_scale_inv": np.ones(len(tensors[key]), np.float32)}
    save_file(tensors | {key: tensors[key].astype(FP8)} | scale, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model.layers.0.experts.down_proj must be of type F32, BF16, F16, got F8_E4M3"
    ):
        load_model(folder, "float32")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_on_the_fly_is_a_scale_per_output_and_a_byte_per_number(kind: Any, experts: Path) -> None:
    floats = load_model(experts, "float32").model
    loaded, in_memory = load_model(experts, "float32", quantization=kind), quantize_model(floats, kind)
    of_floats, of_memory = kernels(floats), kernels(in_memory)
    for path, kernel in kernels(loaded.model).items():
        value = np.asarray(of_floats[path][...])
        if path in ("lm_head.kernel", "layers.0.mlp.gate.kernel"):
            np.testing.assert_array_equal(kernel[...], value)
            continue
        largest = np.abs(value).max(-2, keepdims=True)
        top = {"int8": 127, "fp8": 448}[kind]
        scale = largest * np.float32(1 / top)
        held = np.round(value / scale).astype(np.int8) if kind == "int8" else (value / scale).astype(FP8)
        np.testing.assert_array_equal(np.asarray(kernel.arrays.values), held, err_msg=path)
        np.testing.assert_array_equal(kernel.dense("float32"), held.astype(np.float32) * scale)
        assert jax.tree.map(np.array_equal, kernel.arrays, of_memory[path].arrays)
        error = np.abs(np.asarray(kernel.dense("float32")) - value)
        assert (error <= (scale / 2 if kind == "int8" else np.abs(value) / 16 + scale / 512) * 1.001).all()
    for path, param in nnx.to_flat_state(nnx.state(floats, nnx.Param)):
        assert param[...] is not None, f"{path} is still the caller's"
    size = sum(np.asarray(x).nbytes for x in jax.tree.leaves(nnx.state(loaded.model)))
    assert loaded.weight_bytes == size


def test_a_column_of_zeros_is_zeros(made: Path) -> None:
    model = load_model(made, "float32").model
    place = kernel_places(model)[0]
    place.kernel.set_value(place.kernel[...].at[:, 3].set(0))
    (kernel,) = [k for k in kernels(quantize_model(model, "fp8")).values() if isinstance(k, QuantizedWeight)][
        :1
    ]
    assert not np.asarray(kernel.dense("float32"))[:, 3].any()


def test_what_is_left_of_floats_can_be_trained(made: Path, tmp_path: Path) -> None:
    """Small kernels are constants of a gradient; those of norms, embeddings and head are what they were."""
    write_quantized("awq_32", made, tmp_path / "q", tmp_path / "floats")

    def gradients(folder: Path) -> dict[str, np.ndarray]:
        model = load_model(folder, "float32").model
        grads = nnx.grad(lambda m: jnp.mean(jax.nn.log_softmax(m(tokens()))[..., 3]))(model)
        return {".".join(map(str, p)): np.asarray(x[...]) for p, x in nnx.to_flat_state(grads)}

    small, floats = gradients(tmp_path / "q"), gradients(tmp_path / "floats")
    assert small.keys() == {k for k in floats if not k.endswith("_proj.kernel")}
    for path, value in small.items():
        np.testing.assert_allclose(value, floats[path], atol=1e-5, rtol=1e-4, err_msg=path)


def edited(folder: Path, out: Path, config: dict[str, Any] | None = None, **tensors: Any) -> Path:
    """Copies a checkpoint with another quantization_config, or tensors of q_proj; None leaves out."""
    out.mkdir()
    hf_config = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps(hf_config | ({"quantization_config": config} if config else {}))
    )
    changed = {f"model.layers.0.self_attn.q_proj.{end}": x for end, x in tensors.items()}
    found = {key: tensor.read() for key, tensor in read_headers(folder).items()} | changed
    save_file({k: v for k, v in found.items() if v is not None}, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"bits": 4},
            "`quantization_config.quant_method` must be one of 'awq', 'compressed-tensors',",
        ),
        (
            {"quant_method": "bitsandbytes"},
            "`quantization_config.quant_method` must be one of 'awq', 'compressed-tensors',",
        ),
        (
            {"quant_method": "hqq"},
            "`quantization_config.quant_method` must be one of 'awq', 'compressed-tensors',",
        ),
        (
            {"quant_method": "gguf"},
            "`quantization_config.quant_method` must be one of 'awq', 'compressed-tensors',",
        ),
        (AWQ | {"version": "gemv"}, "`quantization_config.version` must be 'gemm', got 'gemv'"),
        (AWQ | {"bits": 3}, "`quantization_config.bits` must be 4, got 3"),
        (AWQ | {"zero_point": False}, "`quantization_config.zero_point` must be True, got False"),
        (AWQ | {"group_size": 0}, "`quantization_config.group_size` must be -1 or a positive integer, got 0"),
        (GPTQ | {"bits": 8}, "`quantization_config.bits` must be 4, got 8"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "`quantization_config.checkpoint_format` must be 'gptq' or 'gptq_v2', got 'marlin'",
        ),
        (GPTQ | {"dynamic": {"-:q_proj": {}}}, "dynamic` must be {} or null"),
        (
            {"quant_method": "fp8", "fmt": "e5m2"},
            "`quantization_config.fmt` must be 'e4m3' or 'float8_e4m3fn', got 'e5m2'",
        ),
        (
            {"quant_method": "fp8", "scale_fmt": "e5m2"},
            "`quantization_config.scale_fmt` must be 'float' or 'ue8m0', got 'e5m2'",
        ),
        (
            scheme(4, "float", "tensor_group"),
            "`quantization_config.config_groups.group_0.weights.type` must be 'int', got 'float'",
        ),
        (
            scheme(8, "int", "channel") | {"format": "marlin-24"},
            "`quantization_config.format` must be one of 'float-quantized', 'int-quantized',",
        ),
        (
            scheme(8, "int", "channel") | {"sparsity_config": {"format": "sparse-24"}},
            r"`quantization_config.sparsity_config` must be \{\} or null, got \{'format': 'sparse-24'\}",
        ),
        (
            scheme(8, "int", "channel") | {"transform_config": {"config_groups": {}}},
            r"`quantization_config.transform_config` must be \{\} or null, got \{'config_groups': \{\}\}",
        ),
    ],
)
def test_other_formats_are_refused(config: dict[str, Any], message: str, made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(edited(made, tmp_path / "bad", config))


def test_a_quantized_kv_cache_is_only_advice() -> None:
    """The scales of keys and values are not used: kv_cache_dtype says what the cache holds."""
    config = {"quantization_config": scheme(8, "int", "channel") | {"kv_cache_scheme": {"num_bits": 8}}}
    read = ConfigReader(config)
    assert read_quantization(read) is not None
    read.finish()


def test_scales_of_powers_of_two_are_read_if_they_are_floats(made: Path, tmp_path: Path) -> None:
    """DeepSeek-V3.1 has such floats; other checkpoints have their exponents, which are bytes."""
    write_quantized("fp8_block", made, tmp_path / "q")
    config = FORMATS["fp8_block"][0] | {"scale_fmt": "ue8m0"}
    same = load_model(edited(tmp_path / "q", tmp_path / "floats", config), "float32").model
    np.testing.assert_array_equal(same(tokens()), load_model(tmp_path / "q", "float32").model(tokens()))
    key = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    exponents = np.full(read_headers(tmp_path / "q")[key].shape, 120, np.uint8)
    bad = edited(tmp_path / "q", tmp_path / "bytes", config, weight_scale_inv=exponents)
    with pytest.raises(ValueError, match=r"weight_scale_inv must be of type F32.*got U8"):
        load_model(bad, "float32")


def test_tensors_that_do_not_fit_are_all_listed(made: Path, tmp_path: Path) -> None:
    write_quantized("awq_32", made, tmp_path / "q")
    bad = edited(
        tmp_path / "q",
        tmp_path / "bad",
        qzeros=None,
        scales=np.ones((1, 64), np.float16),
        qweight=np.ones((64, 8), np.int8),
        bits=np.ones(1, np.float32),
    )
    with pytest.raises(ValueError) as error:
        load_model(bad, "float32")
    stem = "  model.layers.0.self_attn.q_proj."
    assert [line for line in str(error.value).splitlines() if line.startswith(stem)] == [
        f"{stem}bits is unexpected",
        f"{stem}qweight must be of type I32, got I8",
        f"{stem}qzeros is missing",
        f"{stem}scales must have shape (2, 64) by config.json, got (1, 64)",
    ]


def test_groups_out_of_order_need_desc_act(made: Path, tmp_path: Path) -> None:
    write_quantized("gptq_ordered_32", made, tmp_path / "q")
    config = FORMATS["gptq_ordered_32"][0] | {"desc_act": False}
    with pytest.raises(ValueError, match=r"_proj.* can't be read: g_idx must assign consecutive rows"):
        load_model(edited(tmp_path / "q", tmp_path / "bad", config), "float32")
    far = edited(tmp_path / "q", tmp_path / "far", g_idx=np.full(64, 2, np.int32))
    with pytest.raises(
        ValueError, match=r"q_proj\.\* can't be read: each group of g_idx must be in \[0, 1\], got 2"
    ):
        load_model(far, "float32")


def test_biases_of_zeros_are_not_read(made: Path, tmp_path: Path) -> None:
    """AutoGPTQ gives every map a bias: Qwen2.5's published checkpoints have them."""
    write_quantized("gptq_32", made, tmp_path / "q")
    zeros = edited(tmp_path / "q", tmp_path / "zeros", bias=np.zeros(64, np.float16))
    assert load_model(zeros, "float32").weight_bytes == load_model(tmp_path / "q", "float32").weight_bytes
    ones = edited(tmp_path / "q", tmp_path / "ones", bias=np.ones(64, np.float16))
    with pytest.raises(ValueError, match=r"q_proj\.bias is unexpected"):
        load_model(ones, "float32")
    floats = edited(made, tmp_path / "floats", bias=np.zeros(64, np.float16))
    assert load_model(floats, "float32").weight_bytes == load_model(made, "float32").weight_bytes


def test_the_argument_has_to_fit_the_checkpoint(made: Path, tmp_path: Path) -> None:
    write_quantized("awq_32", made, tmp_path / "q")
    assert load_model(tmp_path / "q", "float32", quantization="awq").weight_bytes
    with pytest.raises(ValueError, match=r"`quantization` must be None or 'awq'.*.*got 'int8'"):
        load_model(tmp_path / "q", "float32", quantization="int8")
    with pytest.raises(
        ValueError, match=r"`quantization` must be one of None, 'int4', 'int8', 'fp8' .*got 'gptq'"
    ):
        load_model(made, "float32", quantization="gptq")


def test_mxfp4_becomes_floats_and_nothing_else(made: Path, tmp_path: Path) -> None:
    folder = FIXTURES / "gpt_oss_mxfp4"
    model = load_model(folder, "float32", quantization="mxfp4").model
    assert not any(isinstance(kernel, QuantizedWeight) for kernel in kernels(model).values())
    assert choose_online_dtype([model], "mxfp4") is None
    with pytest.raises(ValueError, match=r"`quantization` must be None or 'mxfp4'.*.*got 'int8'"):
        load_model(folder, "float32", quantization="int8")
    with pytest.raises(
        ValueError, match=r"`.*quant_method` must be one of 'awq', 'compressed-tensors'.*got 'mxfp4'"
    ):
        load_model(edited(made, tmp_path / "bad", {"quant_method": "mxfp4"}))


def test_small_models_are_not_saved(made: Path, tmp_path: Path) -> None:
    model = load_model(made, "float32", quantization="int8").model
    with pytest.raises(ValueError, match="must have float weights, got a quantized model"):
        save_model(model, tmp_path / "out", json.loads((made / "config.json").read_text()))


def test_floats_of_one_kernel_at_a_time(made: Path) -> None:
    """Of kernels that a loop multiplies by, XLA holds the floats of one or two, and not those of all."""
    x, size, num = jnp.ones((2, 512)), 512 * 512, 12
    kernels = [jnp.ones((512, 512)) * i for i in range(num)]
    parts = [quantize(kernel, "int8") for kernel in kernels]
    grouped = [p._replace(scales=jnp.repeat(p.scales, 4, axis=0)) for p in parts]

    def burst(x: jax.Array, parts: list[QuantizedArrays], group_size: int) -> jax.Array:
        def step(_: Any, x: jax.Array) -> jax.Array:
            for each in parts:
                x = jnp.tanh(multiply(x, each, group_size, x.dtype))
            return x

        return jax.lax.fori_loop(0, 4, step, x)

    for form, group_size in ((parts, 512), (grouped, 128)):
        compiled = jax.jit(burst, static_argnums=2).lower(x, form, group_size).compile()
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < 3 * 4 * size, "less than 3 of 12 in floats"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq_32", "gptq_ordered_32", "fp8_channel", "on_the_fly_int8"])
def test_loading_takes_little_more_than_the_weights(name: str, tmp_path: Path) -> None:
    """The peak of a process that loads a checkpoint, above what it has taken before."""
    config = LLAMA | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16}
    config |= {"vocab_size": 512, "dtype": "bfloat16"}
    random_checkpoint(tmp_path, config, "bfloat16")
    folder, kind = tmp_path, None
    if name in FORMATS:
        folder = tmp_path / "q"
        write_quantized(name, tmp_path, folder)
    else:
        kind = name.removeprefix("on_the_fly_")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), kind or ""], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    size, grown = map(int, done.stdout.split())
    assert size > 80e6
    assert grown < 1.2 * size, f"{grown / size:.2f}"


PEAK = """
import sys
from pathlib import Path
import jax, numpy as np
from jax_paged.models.quantization.online import quantize_file
from jax_paged.models.weights import load_model

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

# What compiling takes, and what is compiled, is not what loading takes.
for rows in (1024, 2816):
    quantize_file(np.ones((rows, 256), "bfloat16"), "bfloat16", "int8")
folder, kind = Path(sys.argv[1]), sys.argv[2] or None
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
loaded = load_model(folder, "bfloat16", quantization=kind)
print(loaded.weight_bytes, status("VmHWM") - before)
"""
