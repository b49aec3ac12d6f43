"""What config.json says under quantization_config: the one place that reads it.

A method that is added gets a line in METHODS, and its layout a class as those in quantized_formats.py.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.quantization.formats import AwqFormat, CompressedFormat, GptqFormat, WeightFormat


def _group_size(read: ConfigReader) -> int | None:
    """Returns the rows of a group; None for all, which is written as -1."""
    size = read.get("group_size", 128)
    ok = isinstance(size, int) and not isinstance(size, bool) and (size == -1 or size > 0)
    read.check(ok, "group_size", size, "-1 or a positive integer")
    return size if ok and size != -1 else None


def _awq(read: ConfigReader) -> WeightFormat:
    read.choice("bits", 4, (4,))
    read.choice("zero_point", True, (True,))
    version = read.get("version", read.get("format", "gemm"))
    read.check(str(version).lower() == "gemm", "version", version, "'gemm'")
    backend = read.get("backend", "auto")
    read.check(backend != "llm-awq", "backend", backend, "that of another layout than llm-awq's")
    return AwqFormat(_group_size(read))


def _gptq(read: ConfigReader) -> WeightFormat:
    read.choice("bits", None, (4,))
    dynamic = read.get("dynamic", {})
    read.check(dynamic == {}, "dynamic", dynamic, "{} or null: the same for all maps")
    name = "checkpoint_format" if read.get("checkpoint_format", None) is not None else "format"
    version = read.choice(name, "gptq", ("gptq", "gptq_v2"))
    ordered = read.choice("desc_act", False, (False, True))
    return GptqFormat(_group_size(read), ordered, version == "gptq_v2")


def _fp8(read: ConfigReader) -> WeightFormat:
    read.choice("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    # DeepSeek-V3.1 has powers of two ("ue8m0") as floats; where they are bytes, the headers say so.
    read.choice("scale_fmt", "float", ("float", "ue8m0"))
    read.choice("expert_dtype", "fp8", ("fp8",))
    return CompressedFormat(_block(read, "weight_block_size"))


def _compressed(read: ConfigReader) -> WeightFormat:
    formats = "float-quantized", "int-quantized", "naive-quantized", "pack-quantized"
    read.choice("format", None, formats)
    # kv_cache_scheme is not read: the engine's kv_cache_dtype says what the cache holds.
    rotations = read.get("transform_config", {})
    read.check(rotations == {}, "transform_config", rotations, "{} or null")
    sparsity = read.get("sparsity_config", {})
    ok = sparsity == {} or (isinstance(sparsity, dict) and sparsity.get("format") == "dense")
    read.check(ok, "sparsity_config", sparsity, "{} or null")
    groups, blocks = read.table("config_groups"), set()
    read.check(bool(groups), "config_groups", groups, "an object with a group or more")
    for name, group in groups.items():
        held = group if isinstance(group, dict) else {}
        given = held.get("weights")
        own = read.nested("config_groups", groups).nested(name, held).nested("weights", given or {})
        own.check(isinstance(given, dict), "num_bits", None, "4 or 8")
        bits = own.choice("num_bits", 8, (4, 8))
        own.choice("type", "int", ("int", "float") if bits == 8 else ("int",))
        own.choice("dynamic", False, (False,))
        strategy = own.choice("strategy", "tensor", ("tensor", "channel", "group", "block"))
        blocks.add(_block(own, "block_structure") if strategy == "block" else None)
        for end in ("output_activations",):
            read.check(not held.get(end), end, held.get(end), "null")
    read.check(len(blocks) < 2, "config_groups", groups, "groups of which all or none have blocks")
    return CompressedFormat(next(iter(blocks), None))


def _mxfp4(read: ConfigReader) -> None:
    """Kernels become floats as they are read (mxfp4.py); which of them are stored so, their keys say."""


METHODS: dict[str, Callable[[ConfigReader], WeightFormat | None]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
# Methods whose weights stay quantized on the device; every family supports them.
STORED_METHODS = ("awq", "compressed-tensors", "fp8", "gptq")


def read_quantization(read: ConfigReader, methods: Collection[str] = STORED_METHODS) -> WeightFormat | None:
    """Returns how the kernels of a checkpoint are held; None if they are floats, or become floats.

    What is wrong is noted with the other problems of the config.

    Args:
        read: Of the whole config.json.
        methods: What the family can have.
    """
    values = read.table("quantization_config")
    if not values:
        return None
    own = read.nested("quantization_config", values)
    method = own.get("quant_method", None)
    if not own.check(method in methods, "quant_method", method, " or ".join(map(repr, methods))):
        return None
    return METHODS[method](own)


def quantization_of(hf_config: Mapping[str, Any]) -> tuple[str | None, WeightFormat | None]:
    """Returns the method of a config.json that was read without problems, and how kernels are held."""
    values = hf_config.get("quantization_config") or {}
    return values.get("quant_method"), read_quantization(ConfigReader(hf_config), METHODS)


def _block(read: ConfigReader, name: str) -> tuple[int, int] | None:
    """Returns the columns and rows of a block; None if there are no blocks."""
    block = read.get(name, None)
    if block is None:
        return None
    ok = (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(n, int) and n > 0 for n in block)
    )
    read.check(ok, name, block, "two positive integers")
    return (block[0], block[1]) if ok else None
