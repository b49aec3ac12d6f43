"""GPUs that are not there, for which JAX lowers."""

import dataclasses

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


@dataclasses.dataclass(frozen=True)
class AbstractGpu(AbstractDevice):
    """What JAX asks of a device that it lowers for; its own AbstractDevice does not say the capability."""

    compute_capability: str


A100 = AbstractGpu("NVIDIA A100", 108, "gpu", "8.0")
RTX_3090 = AbstractGpu("NVIDIA GeForce RTX 3090", 82, "gpu", "8.6")
H100 = AbstractGpu("NVIDIA H100", 132, "gpu", "9.0")
B200 = AbstractGpu("NVIDIA B200", 148, "gpu", "10.0")
RTX_5090 = AbstractGpu("NVIDIA GeForce RTX 5090", 170, "gpu", "12.0")
JETSON_THOR = AbstractGpu("NVIDIA Thor", 20, "gpu", "11.0")
V100 = AbstractGpu("NVIDIA V100", 80, "gpu", "7.0")


def lowered(gpu, f, *specs):
    """Returns the text of f, lowered for a GPU."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        return jax.jit(f).trace(*specs).lower(lowering_platforms=("cuda",)).as_text()
