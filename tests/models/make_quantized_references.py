"""Makes tests/models/quantized: a linear map as quantisers' own packages write it, and what they read of it.

The tests need none of them; this script does. In the environment of make_references.py:

    pip install --no-deps compressed-tensors==0.20.0 autoawq==0.2.9 auto-gptq==0.7.1 loguru
    python tests/models/make_quantized_references.py

Every file holds the tensors of a map that takes 64 numbers and returns 32, by the ends of their keys, and
"dense", the float32 matrix [64, 32] that the package makes of them. Of the packages for AWQ and GPTQ only
single files are used: the rest needs a GPU.
"""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

FOLDER = Path(__file__).parent / "quantized"
ROWS, COLUMNS, GROUP = 64, 32, 16
Tensors = dict[str, torch.Tensor]


def folder_of(package: str) -> Path:
    """Returns where a package lies, without importing it."""
    return Path(importlib.util.find_spec(package).submodule_search_locations[0])


def module_of(file: Path) -> Any:
    """Returns a file as a module, without importing its package."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linear_of(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(ROWS, COLUMNS, bias=False)
    linear.weight.data = weight
    return linear


def scales_of(weight: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and zeros [out, groups] of numbers of four bits; zeros are at least 1."""
    parts = [weight[:, group == g] for g in range(ROWS // GROUP)]
    low = torch.stack([p.amin(1) for p in parts], 1)
    high = torch.stack([p.amax(1) for p in parts], 1)
    scales = ((high - low) / 15).half().float()
    return scales, (-low / scales).round().clamp(1, 15)


def awq(weight: torch.Tensor) -> Tensors:
    folder = folder_of("awq")
    packing = module_of(folder / "utils" / "packing_utils.py")
    stand_ins = {
        "awq": {},
        "awq.utils": {},
        "awq.utils.module": {"try_import": lambda name: (None, "")},
        "awq.utils.utils": {"get_best_device": lambda: "cpu"},
        "awq.utils.packing_utils": vars(packing),
    }
    for name, parts in stand_ins.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(parts)
    gemm = module_of(folder / "modules" / "linear" / "gemm.py")
    scales, zeros = (x.T.contiguous() for x in scales_of(weight, torch.arange(ROWS) // GROUP))
    made = gemm.WQLinear_GEMM.from_linear(linear_of(weight), 4, GROUP, False, scales, zeros)
    dense = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales.float(), 4, GROUP)
    return {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales, "dense": dense}


def gptq(weight: torch.Tensor) -> Tensors:
    module = module_of(folder_of("auto_gptq") / "nn_modules" / "qlinear" / "qlinear_cuda.py")
    group = (torch.arange(ROWS) // GROUP)[torch.randperm(ROWS)].to(torch.int32)
    scales, zeros = scales_of(weight, group)
    made = module.QuantLinear(4, GROUP, ROWS, COLUMNS, bias=False, weight_dtype=torch.float32)
    made.pack(linear_of(weight), scales, zeros, group)
    dense = made(torch.eye(ROWS))
    found = {name: getattr(made, name) for name in ("qweight", "qzeros", "g_idx")}
    return found | {"scales": made.scales.half(), "dense": dense}


def compressed(form: str, **settings: Any) -> Any:
    def make(weight: torch.Tensor) -> Tensors:
        args = QuantizationArgs(**settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        columns = weight.reshape(COLUMNS, -1, GROUP if settings["strategy"] == "group" else ROWS)
        if settings["strategy"] == "tensor":
            scale, zero = calculate_qparams(weight.amin().reshape(1), weight.amax().reshape(1), args)
        elif settings["strategy"] == "block":
            blocks = weight.reshape(COLUMNS // GROUP, GROUP, ROWS // GROUP, GROUP)
            scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        else:
            scale, zero = calculate_qparams(columns.amin(-1), columns.amax(-1), args)
        compressor = BaseCompressor.get_value_from_registry(form)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        found = compressor.compress(state, scheme)
        return found | {"dense": compressor.decompress(found, scheme)["weight"].float().T}

    return make


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
MAKERS = {
    "awq": awq,
    "gptq": gptq,
    "packed": compressed("pack-quantized", symmetric=True, **INT4),
    "packed_asymmetric": compressed("pack-quantized", symmetric=False, **INT4),
    "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "fp8_tensor": compressed("float-quantized", strategy="tensor", **FP8),
    "fp8_channel": compressed("float-quantized", strategy="channel", **FP8),
    "fp8_block": compressed("float-quantized", strategy="block", block_structure=[GROUP, GROUP], **FP8),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MAKERS:
        torch.manual_seed(0)
        found = MAKERS[name](torch.randn(COLUMNS, ROWS) * 0.3)
        save_file({k: v.detach().contiguous() for k, v in found.items()}, FOLDER / f"{name}.safetensors")
        print(name, {k: (v.dtype, tuple(v.shape)) for k, v in found.items()})


if __name__ == "__main__":
    main()
