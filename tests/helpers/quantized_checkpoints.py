"""Writes a checkpoint in the formats of quantisers, by their documented layouts, and as floats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
# Tensors of one linear map by the ends of their keys, and the float matrix [in, out] that they mean.
Written = tuple[dict[str, np.ndarray], np.ndarray]


def words(values: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Packs numbers of four bits: bits 4 i to 4 i + 3 of a word are number order[i] of its eight."""
    values = np.moveaxis(values.astype(np.uint32), axis, -1)
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // 8), np.uint32)
    for i, place in enumerate(order):
        packed |= values[..., place::8] << np.uint32(4 * i)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def rounded(
    kernel: np.ndarray, group: np.ndarray, top: int, *, symmetric: bool, scale_dtype: Any = np.float16
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rounds a matrix [in, out] to 0 ... top; returns numbers, zeros, scales, and what they mean."""
    num_groups = group.max() + 1
    low = np.stack([kernel[group == g].min(0) for g in range(num_groups)])
    high = np.stack([kernel[group == g].max(0) for g in range(num_groups)])
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    scales = np.maximum((high - low) / top, 1e-4).astype(scale_dtype)
    s = scales.astype(np.float32)
    zeros = np.full(s.shape, (top + 1) // 2) if symmetric else np.clip(np.round(-low / s), 0, top)
    zeros = zeros.astype(np.int64)
    numbers = np.clip(np.round(kernel / s[group]) + zeros[group], 0, top).astype(np.int64)
    return numbers, zeros, scales, (numbers - zeros[group]).astype(np.float32) * s[group]


def groups_of(rows: int, size: int) -> np.ndarray:
    return np.arange(rows) // (rows if size == -1 else size)


def awq(size: int) -> Callable[[np.ndarray], Written]:
    def write(kernel: np.ndarray) -> Written:
        q, z, s, dense = rounded(kernel, groups_of(len(kernel), size), 15, symmetric=False)
        return {"qweight": words(q, 1, AWQ_ORDER), "qzeros": words(z, 1, AWQ_ORDER), "scales": s}, dense

    return write


def gptq(
    size: int, *, symmetric: bool = True, ordered: bool = False, version: int = 1
) -> Callable[[np.ndarray], Written]:
    def write(kernel: np.ndarray) -> Written:
        group = groups_of(len(kernel), size)
        if ordered:
            group = np.random.default_rng(len(kernel)).permutation(group)
        q, z, s, dense = rounded(kernel, group, 15, symmetric=symmetric)
        zeros = words(z, 1)
        if version == 1:  # 1 less of each number, as one subtraction
            zeros = (zeros.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
        found = {"qweight": words(q, 0), "qzeros": zeros, "scales": s, "g_idx": group.astype(np.int32)}
        return found, dense

    return write


def packed(size: int, *, symmetric: bool = True, ordered: bool = False) -> Callable[[np.ndarray], Written]:
    def write(kernel: np.ndarray) -> Written:
        group = groups_of(len(kernel), size)
        if ordered:
            group = np.random.default_rng(len(kernel)).permutation(group)
        q, z, s, dense = rounded(kernel, group, 15, symmetric=symmetric, scale_dtype=ml_dtypes.bfloat16)
        found = {
            "weight_packed": words(q.T, 1),
            "weight_scale": np.ascontiguousarray(s.T),
            "weight_shape": np.array(kernel.shape[::-1], np.int64),
        }
        found |= {} if symmetric else {"weight_zero_point": words(z.T, 0)}
        found |= {"weight_g_idx": group.astype(np.int32)} if ordered else {}
        return found, dense

    return write


def int8(*, symmetric: bool = True) -> Callable[[np.ndarray], Written]:
    def write(kernel: np.ndarray) -> Written:
        group = np.zeros(len(kernel), int)
        q, z, s, dense = rounded(kernel, group, 255, symmetric=symmetric, scale_dtype=np.float32)
        found = {"weight": np.ascontiguousarray((q - 128).astype(np.int8).T), "weight_scale": s.T.copy()}
        found |= {} if symmetric else {"weight_zero_point": (z - 128).astype(np.int8).T.copy()}
        return found, dense

    return write


def fp8(
    kind: str, block: tuple[int, int] = (1, 1), name: str = "weight_scale"
) -> Callable[[np.ndarray], Written]:
    def write(kernel: np.ndarray) -> Written:
        weight = kernel.T  # [out, in], as it is stored
        largest = np.abs(weight)
        if kind == "tensor":
            scale = (largest.max() / 448).astype(np.float32).reshape(())
            of_each = np.broadcast_to(scale, weight.shape)
        elif kind == "channel":
            scale = (largest.max(1, keepdims=True) / 448).astype(ml_dtypes.bfloat16)
            of_each = np.broadcast_to(scale.astype(np.float32), weight.shape)
        else:
            rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
            scale, of_each = np.zeros((rows, columns), np.float32), np.zeros(weight.shape, np.float32)
            for i in range(rows):
                for j in range(columns):
                    part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                    scale[i, j] = largest[part].max() / 448
                    of_each[part] = scale[i, j]
        held = np.clip(weight / of_each, -448, 448).astype(FP8)
        found = {"weight": np.ascontiguousarray(held), name: np.ascontiguousarray(scale)}
        if kind == "tensor":
            found["input_scale"] = np.array(0.5, np.float32)
        return found, (held.astype(np.float32) * of_each).T

    return write


def scheme(bits: int, kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": False} | others
    form = {4: "pack-quantized"}.get(bits, f"{kind}-quantized")
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False, "damp_percent": 0.1}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
BLOCK = (48, 40)  # divides no matrix
# By name: the quantization_config, and what writes a matrix.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], Written]]] = {
    "awq_32": (AWQ | {"group_size": 32}, awq(32)),
    "awq_whole": (AWQ | {"group_size": -1}, awq(-1)),
    "gptq_32": (GPTQ | {"group_size": 32}, gptq(32)),
    "gptq_asymmetric_16": (GPTQ | {"group_size": 16, "sym": False}, gptq(16, symmetric=False)),
    "gptq_ordered_32": (
        GPTQ | {"group_size": 32, "sym": False, "desc_act": True},
        gptq(32, symmetric=False, ordered=True),
    ),
    "gptq_v2_whole": (
        GPTQ | {"group_size": -1, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
        gptq(-1, symmetric=False, version=2),
    ),
    "packed_32": (scheme(4, "int", "group", group_size=32), packed(32)),
    "packed_asymmetric_16": (
        scheme(4, "int", "group", group_size=16, symmetric=False),
        packed(16, symmetric=False),
    ),
    "packed_ordered_32": (
        scheme(4, "int", "group", group_size=32, actorder="group"),
        packed(32, ordered=True),
    ),
    "packed_channel": (scheme(4, "int", "channel"), packed(-1)),
    "int8": (scheme(8, "int", "channel"), int8()),
    "int8_asymmetric": (scheme(8, "int", "channel", symmetric=False), int8(symmetric=False)),
    "fp8_channel": (scheme(8, "float", "channel"), fp8("channel")),
    "fp8_tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("tensor")),
    "fp8_block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
        fp8("block", BLOCK, "weight_scale_inv"),
    ),
    "compressed_block": (
        scheme(8, "float", "block", block_structure=list(BLOCK)),
        fp8("block", BLOCK),
    ),
}


def write_quantized(name: str, base: Path, folder: Path, floats: Path | None = None) -> dict[str, np.ndarray]:
    """Writes a checkpoint of floats in another format; returns the float matrices that it means, by key.

    Args:
        name: Of FORMATS.
        base: The checkpoint of floats.
        folder: Of the new one.
        floats: Where to write a checkpoint of the float matrices.
    """
    config, write = FORMATS[name]
    tensors, meant = dict(load_file(base / "model.safetensors")), {}
    found = dict(tensors)
    for key, value in tensors.items():
        if key.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            del found[key]
            written, dense = write(value.astype(np.float32).T)
            found |= {key.removesuffix("weight") + end: x for end, x in written.items()}
            meant[key] = np.ascontiguousarray(dense.T)
    hf_config = json.loads((base / "config.json").read_text())
    for out, content, extra in (
        (folder, found, {"quantization_config": config}),
        (floats, tensors | meant, {}),
    ):
        if out is not None:
            out.mkdir(exist_ok=True)
            save_file(content, out / "model.safetensors")
            (out / "config.json").write_text(json.dumps(hf_config | extra))
            for file in ("tokenizer.json", "tokenizer_config.json"):
                if (base / file).exists():
                    (out / file).write_bytes((base / file).read_bytes())
    return meant
