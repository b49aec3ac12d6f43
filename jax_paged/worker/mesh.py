"""The devices of an engine, and what multiplies by weights on them."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_paged.checks import check
from jax_paged.config import EngineArgs
from jax_paged.models.sharding import TENSOR, DeviceGrid
from jax_paged.pallas_kernels.native import products

_LOGGER = logging.getLogger(__name__)


def device_grid(args: EngineArgs, first_device: int) -> DeviceGrid:
    """Returns the devices that the model of an engine is divided among.

    Args:
        args: Say how many.
        first_device: The first of them, among those that JAX sees.
        data_parallel_size: How many such models there are to be, side by side.

    Raises:
        ValueError: If there are not so many.
    """
    size, devices = args.tensor_parallel_size, jax.devices()[first_device:]
    allowed = f"at most {len(devices)}, the devices that JAX sees"
    if first_device:
        allowed += f" from number {first_device} on"
    hint = ""
    if jax.default_backend() == "cpu":
        hint = " (a CPU is as many as XLA_FLAGS=--xla_force_host_platform_device_count=N says)"
    check(size <= len(devices), "tensor_parallel_size", size, allowed + hint)
    most = jax.device_count() // size
    allowed = f"at most {most}, as JAX sees {jax.device_count()} devices, and each engine takes {size}"
    check(args.data_parallel_size <= most, "data_parallel_size", args.data_parallel_size, allowed + hint)
    return DeviceGrid(Mesh(np.array(devices[:size]), (TENSOR,)), args.enable_expert_parallel)


def choose_products(args: EngineArgs, dtype: jnp.dtype) -> products.Products:
    """Returns what multiplies by weights of a type.

    Raises:
        ValueError: If what is asked for can't be had here, or not on several devices.
    """
    backend = products.resolve_products(args.matmul_backend, dtype, name="matmul_backend")
    if args.tensor_parallel_size > 1:
        allowed = "'auto' or 'xla' with tensor_parallel_size above 1, as packed weights are not divided"
        check(args.matmul_backend != "onednn", "matmul_backend", args.matmul_backend, allowed)
        return "xla"
    if args.matmul_backend == "auto" and backend == "xla" and jax.default_backend() == "cpu":
        problem = products.problem(dtype)
        _LOGGER.warning("XLA packs the weights in every step; oneDNN does it once, but %s", problem)
    return backend
