"""The devices of an engine, and how weights, pool and everything else lie on them."""

import jax
import numpy as np
from jax.sharding import Mesh

from jax_paged.checks import check
from jax_paged.models.layers import TENSOR


def device_mesh(tensor_parallel_size: int, first_device: int = 0, data_parallel_size: int = 1) -> Mesh:
    """Returns the devices that one model is split over, along the axis TENSOR.

    Args:
        tensor_parallel_size: How many.
        first_device: The first of them, among those that JAX sees.
        data_parallel_size: How many such models there are to be, side by side.

    Raises:
        ValueError: If there are not so many.
    """
    num_devices, devices = jax.device_count(), jax.devices()[first_device:]
    hint = ""
    if jax.default_backend() == "cpu":
        hint = " (a CPU is as many as XLA_FLAGS=--xla_force_host_platform_device_count=N says)"
    allowed = f"at most {len(devices)}, the devices that JAX sees"
    if first_device:
        allowed += f" from number {first_device} on"
    check(tensor_parallel_size <= len(devices), "tensor_parallel_size", tensor_parallel_size, allowed + hint)
    most = num_devices // tensor_parallel_size
    allowed = (
        f"at most {most}, as JAX sees {num_devices} devices, and each engine takes {tensor_parallel_size}"
    )
    check(data_parallel_size <= most, "data_parallel_size", data_parallel_size, allowed + hint)
    return Mesh(np.array(devices[:tensor_parallel_size]), (TENSOR,))
