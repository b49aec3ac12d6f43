"""The devices of an engine, and the backend that computes matrix products on them."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_paged.config.engine_args import EngineArgs
from jax_paged.errors import check
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid
from jax_paged.pallas_kernels.native import products, quantized_products

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which weight matrices are rearranged once, when a model is loaded, for products on a CPU.

    Args:
        floats: Whether float matrices are packed for oneDNN.
        quantized: Whether quantized matrices are packed for the native backend.
    """

    floats: bool
    quantized: bool


def device_grids(args: EngineArgs, first_device: int, num_stages: int) -> tuple[DeviceGrid, ...]:
    """Returns the devices of each pipeline stage of an engine.

    Args:
        args: The engine's arguments, which contain the number of devices per stage.
        first_device: Index of the first device, among the devices that JAX sees.
        num_stages: Number of stages in this process.

    Raises:
        ValueError: If there are not enough devices.
    """
    size, devices = args.tensor_parallel_size, jax.devices()[first_device:]
    allowed = f"at most {len(devices)}, the number of devices that JAX sees"
    if first_device:
        allowed += f" from index {first_device} on"
    hint = ""
    if jax.default_backend() == "cpu":
        hint = ". To use a CPU as N devices, set XLA_FLAGS=--xla_force_host_platform_device_count=N"
    check(size <= len(devices), "tensor_parallel_size", size, allowed, remedy=hint)
    seen = f"because JAX sees {jax.device_count()} devices"
    most = len(devices) // size
    allowed = f"at most {most} {seen} and each stage takes {size}"
    check(num_stages <= most, "pipeline_parallel_size", num_stages, allowed, remedy=hint)
    most = jax.device_count() // (size * num_stages)
    allowed = f"at most {most} {seen} and each engine takes {size * num_stages}"
    num_replicas = args.data_parallel_size
    check(num_replicas <= most, "data_parallel_size", num_replicas, allowed, remedy=hint)
    parts = np.array(devices[: size * num_stages]).reshape(num_stages, size)
    return tuple(DeviceGrid(Mesh(part, (TENSOR,)), args.enable_expert_parallel) for part in parts)


def choose_matmul_backend(args: EngineArgs, dtype: jnp.dtype) -> products.MatmulBackend:
    """Returns the backend that computes matrix products with weights of a dtype.

    Raises:
        ValueError: If the requested backend is not available here, or not on several devices.
    """
    backend = products.resolve_matmul_backend(args.matmul_backend, dtype, name="matmul_backend")
    if args.tensor_parallel_size > 1:
        allowed = "'auto' or 'xla' with tensor_parallel_size above 1 because oneDNN does not divide weights"
        check(args.matmul_backend != "onednn", "matmul_backend", args.matmul_backend, allowed)
        return "xla"
    if args.matmul_backend == "auto" and backend == "xla" and jax.default_backend() == "cpu":
        problem = products.problem(dtype)
        _LOGGER.warning("XLA packs the weights in every step; oneDNN packs them once, but %s", problem)
    return backend


def choose_packing(args: EngineArgs, matmul_backend: str, *, is_quantized: bool) -> Packing:
    """Returns which weights are packed.

    Args:
        args: Arguments of the engine. matmul_backend="xla" disables packing.
        matmul_backend: The backend that `choose_matmul_backend` has returned.
        is_quantized: Whether the model has quantized weights.
    """
    may_pack = args.matmul_backend != "xla" and args.tensor_parallel_size == 1
    problem = quantized_products.problem()
    if is_quantized and may_pack and problem is not None and jax.default_backend() == "cpu":
        _LOGGER.warning(
            "XLA decodes quantized weights in every product; packed ones are faster, but %s", problem
        )
    return Packing(matmul_backend == "onednn", may_pack and problem is None)
