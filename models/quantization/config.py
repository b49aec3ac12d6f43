"""Reader of the quantization_config in config.json.

To add a method, add a line to METHODS, and a class for its layout to formats.py.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax_paged.arguments.shown_values import one_of
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.quantization.formats import AwqFormat, CompressedFormat, GptqFormat, WeightFormat


def _group_size(read: ConfigReader) -> int | None:
    """Returns the number of rows in a group; None if all rows are one group (-1 in config.json)."""
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
    read.check(backend != "llm-awq", "backend", backend, "any value except 'llm-awq'")
    return AwqFormat(_group_size(read))


def _gptq(read: ConfigReader) -> WeightFormat:
    read.choice("bits", None, (4,))
    dynamic = read.get("dynamic", {})
    read.check(dynamic == {}, "dynamic", dynamic, "{} or null because settings per layer are not supported")
    name = "checkpoint_format" if read.get("checkpoint_format", None) is not None else "format"
    version = read.choice(name, "gptq", ("gptq", "gptq_v2"))
    ordered = read.choice("desc_act", False, (False, True))
    return GptqFormat(_group_size(read), ordered, version == "gptq_v2")


def _fp8(read: ConfigReader) -> WeightFormat:
    read.choice("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    # The scales of DeepSeek-V3.1 are powers of two ("ue8m0") that are stored as floats. A checkpoint that
    # stores them as bytes is rejected when the headers of its files are checked.
    read.choice("scale_fmt", "float", ("float", "ue8m0"))
    read.choice("expert_dtype", "fp8", ("fp8",))
    return CompressedFormat(_block(read, "weight_block_size"))


def _compressed(read: ConfigReader) -> WeightFormat:
    formats = "float-quantized", "int-quantized", "naive-quantized", "pack-quantized"
    read.choice("format", None, formats)
    # kv_cache_scheme is not read because the engine argument kv_cache_dtype defines the dtype of the KV
    # cache.
    rotations = read.get("transform_config", {})
    read.check(rotations == {}, "transform_config", rotations, "{} or null")
    sparsity = read.get("sparsity_config", {})
    ok = sparsity == {} or (isinstance(sparsity, dict) and sparsity.get("format") == "dense")
    read.check(ok, "sparsity_config", sparsity, "{} or null")
    groups, blocks = read.table("config_groups"), set()
    read.check(bool(groups), "config_groups", groups, "an object with at least one group")
    for name, group in groups.items():
        settings = group if isinstance(group, dict) else {}
        weights = settings.get("weights")
        own = read.nested("config_groups", groups).nested(name, settings).nested("weights", weights or {})
        own.check(isinstance(weights, dict), "num_bits", None, "4 or 8")
        bits = own.choice("num_bits", 8, (4, 8))
        own.choice("type", "int", ("int", "float") if bits == 8 else ("int",))
        own.choice("dynamic", False, (False,))
        strategy = own.choice("strategy", "tensor", ("tensor", "channel", "group", "block"))
        blocks.add(_block(own, "block_structure") if strategy == "block" else None)
        activations = settings.get("output_activations")
        read.check(not activations, "output_activations", activations, "null")
    read.check(len(blocks) < 2, "config_groups", groups, "groups with the same block structure")
    return CompressedFormat(next(iter(blocks), None))


def _mxfp4(read: ConfigReader) -> None:
    """Returns None because the weights are decoded to floats while they are read; see mxfp4.py.

    The keys in the checkpoint show which weights are stored in MXFP4.
    """


METHODS: dict[str, Callable[[ConfigReader], WeightFormat | None]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
# Methods that a family supports unless it lists others. Their weights stay quantized on the device.
COMMON_METHODS = ("awq", "compressed-tensors", "fp8", "gptq")


def read_quantization(read: ConfigReader, methods: Collection[str] = COMMON_METHODS) -> WeightFormat | None:
    """Returns the format of a checkpoint's quantized weights; None if the weights are floats on the device.

    Problems are noted with the other problems of the config.

    Args:
        read: The reader of the whole config.json.
        methods: The quantization methods that the family supports.
    """
    values = read.table("quantization_config")
    if not values:
        return None
    own = read.nested("quantization_config", values)
    method = own.get("quant_method", None)
    if not own.check(method in methods, "quant_method", method, one_of(methods)):
        return None
    return METHODS[method](own)


def quantization_of(hf_config: Mapping[str, Any]) -> tuple[str | None, WeightFormat | None]:
    """Returns the quantization method of a checkpoint, and the format of its quantized weights.

    Args:
        hf_config: A parsed config.json that has been read without problems.

    Returns:
        The method (None for float weights), and the format (None if the weights are floats on the device).
    """
    values = hf_config.get("quantization_config") or {}
    return values.get("quant_method"), read_quantization(ConfigReader(hf_config), METHODS)


def _block(read: ConfigReader, name: str) -> tuple[int, int] | None:
    """Returns the number of columns and rows in a block; None if there are no blocks."""
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
