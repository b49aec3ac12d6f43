"""Division of weights and of the KV cache among devices, in whole heads, experts or columns.

A dimension of a weight consists of one or several lists of units, side by side. A unit consists of columns:
this module calls the indices of every dimension columns, including the rows of a matrix. Every device gets
the same number of units of each list. For example, a projection to queries, keys and values with four query
heads and one kv head is divided between two devices like this:

    columns           q0 q1 q2 q3 k0 v0
    device 0          q0 q1 k0 v0
    device 1          q2 q3 k0 v0

The output of such a projection has its columns in the order of the devices, so each device's part is
contiguous.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

# The mesh axis of tensor parallelism.
TENSOR = "tensor"


@dataclasses.dataclass(frozen=True)
class Units:
    """A list of units in a dimension of a weight. A unit is never divided.

    Args:
        num: Number of units.
        size: Number of columns in a unit.
        division: "even": every device gets the same number of units. "repeated": if there are fewer units
            than devices, each unit is on several devices; otherwise like "even". "padded": the last devices
            may get units of padding. "experts": like "even", but divided only with expert parallelism. Then
            no other dimension of the weight is divided.
    """

    num: int
    size: int = 1
    division: Literal["even", "repeated", "padded", "experts"] = "even"

    def per_device(self, num_devices: int) -> int:
        """Returns the number of units that each device gets.

        Args:
            num_devices: Number of devices.

        Raises:
            ValueError: If the units cannot be divided. The message is only the allowed number of devices,
                such as "a divisor of 8"; the caller completes the sentence.
        """
        if self.num % num_devices == 0:
            return self.num // num_devices
        if self.division == "repeated" and num_devices % self.num == 0:
            return 1
        if self.division == "padded":
            return -(-self.num // num_devices)
        more = " or a multiple" if self.division == "repeated" else ""
        raise ValueError(f"a divisor{more} of {self.num}")

    def columns(self, num_devices: int) -> Int[np.ndarray, "n c"]:
        """Returns the columns of each device, counted from the first unit; -1 for padding.

        Args:
            num_devices: Number of devices.

        Returns:
            int [num_devices, columns per device].
        """
        num = self.per_device(num_devices)
        units = np.arange(num_devices * num).reshape(num_devices, num)
        if self.division == "repeated":
            units = units * self.num // (num_devices * num)
        columns = (units[..., None] * self.size + np.arange(self.size)).reshape(num_devices, -1)
        return np.where(columns < self.num * self.size, columns, -1)


# The units of each dimension of a weight; None for a dimension that is not divided.
Split = tuple[tuple[Units, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class DeviceGrid:
    """The devices that share one model.

    Args:
        mesh: The devices, along the mesh axis TENSOR.
        is_expert_parallel: Whether each expert is on one device. If not, every expert is divided among all
            devices.
    """

    mesh: Mesh | AbstractMesh
    is_expert_parallel: bool = False

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.mesh.shape[TENSOR]

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of this process. The mesh must not be abstract."""
        assert isinstance(self.mesh, Mesh), "an abstract mesh has no devices"
        return list(self.mesh.local_devices)

    def divided_units(self, split: Split) -> list[tuple[Units, ...] | None]:
        """Returns the units of each dimension that is divided; None for the others.

        With expert parallelism, weights of experts are divided by expert, and all other dimensions are whole.
        Otherwise the dimension of experts is whole.

        Args:
            split: The units of each dimension of a weight.
        """
        kinds = [units[0].division if units else None for units in split]
        if self.is_expert_parallel and "experts" in kinds:
            return [units if kind == "experts" else None for units, kind in zip(split, kinds, strict=True)]
        return [None if kind == "experts" else units for units, kind in zip(split, kinds, strict=True)]

    def columns(self, split: Split) -> list[Int[np.ndarray, " c"] | None]:
        """Returns the order of the columns of each dimension when the parts of all devices are concatenated.

        Args:
            split: The units of each dimension of a weight.

        Returns:
            For each dimension, int [c]: the checkpoint's column at each position, or -1 for padding; None if
            the columns are in the order of the checkpoint.

        Raises:
            ValueError: If a dimension cannot be divided. The message is only the allowed number of devices,
                such as "a divisor of 8"; the caller completes the sentence.
        """
        columns: list[Int[np.ndarray, " c"] | None] = []
        for units in self.divided_units(split):
            if units is None:
                columns.append(None)
                continue
            first = np.cumsum([0, *(u.num * u.size for u in units)])
            parts = [u.columns(self.num_devices) for u in units]
            parts = [np.where(part < 0, -1, part + start) for part, start in zip(parts, first, strict=False)]
            order = np.concatenate(parts, axis=1).reshape(-1)
            is_plain = len(order) == first[-1] and (order == np.arange(len(order))).all()
            columns.append(None if is_plain else order)
        return columns

    def shape(self, whole: Sequence[int], split: Split) -> tuple[int, ...]:
        """Returns the shape of a weight when the parts of all devices are concatenated.

        Args:
            whole: Shape of the weight in the checkpoint.
            split: The units of each dimension of the weight.
        """
        columns = self.columns(split)
        return tuple(n if c is None else len(c) for n, c in zip(whole, columns, strict=True))

    def spec(self, split: Split) -> PartitionSpec:
        """Returns the PartitionSpec of a weight whose columns are in the order of the devices.

        Args:
            split: The units of each dimension of the weight.
        """
        return PartitionSpec(*(units and TENSOR for units in self.divided_units(split)))

    def sharding(self, split: Split) -> NamedSharding:
        """Returns the NamedSharding of a weight whose columns are in the order of the devices.

        Args:
            split: The units of each dimension of the weight.
        """
        return NamedSharding(self.mesh, self.spec(split))

    def split_output(self, y: Array, units: Sequence[Units]) -> list[Array]:
        """Splits an output whose last dimension holds the columns of several lists of units.

        Args:
            y: float [..., W], with columns in the order of the devices.
            units: The lists of units.

        Returns:
            One array [..., w] for each list, with columns in the order of the devices.
        """
        ends = np.cumsum([u.per_device(self.num_devices) * u.size for u in units])
        by_device = y.reshape(*y.shape[:-1], self.num_devices, -1)
        return [x.reshape(*y.shape[:-1], -1) for x in jnp.split(by_device, ends[:-1], axis=-1)]

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Returns a function that every device computes on its own part of the arguments (jax.shard_map).

        Args:
            function: The function of one device.
            in_specs: PartitionSpec of each argument, or a pytree of them.
            out_specs: PartitionSpec of each result, or a pytree of them.
        """
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def gather(self, y: Array) -> Array:
        """Returns the whole array on every device, given an array whose last dimension is divided.

        Args:
            y: [..., W].

        Returns:
            [..., W], replicated.
        """
        # Without the first constraint, XLA would gather the weights that y is computed from.
        divided = PartitionSpec(*[None] * (y.ndim - 1), TENSOR)
        for spec in (divided, PartitionSpec()):
            y = jax.lax.with_sharding_constraint(y, NamedSharding(self.mesh, spec))
        return y


def even(num: int, size: int = 1) -> tuple[Units, ...]:
    """Returns units of which every device gets the same number.

    Args:
        num: Number of units.
        size: Number of columns in a unit.
    """
    return (Units(num, size),)


def repeated(num: int, size: int) -> tuple[Units, ...]:
    """Returns units that are repeated on several devices if there are fewer units than devices.

    Args:
        num: Number of units.
        size: Number of columns in a unit.
    """
    return (Units(num, size, "repeated"),)


def padded(num: int) -> tuple[Units, ...]:
    """Returns units of one column that are padded to a multiple of the number of devices.

    Args:
        num: Number of units.
    """
    return (Units(num, division="padded"),)


def whole_logits(
    logits: Float[Array, "... w"], vocab_size: int, grid: DeviceGrid | None
) -> Float[Array, "... v"]:
    """Returns the whole logits on every device, without the columns of padding.

    They are gathered once because otherwise the operations of the sampler would each wait for the other
    devices.

    Args:
        logits: float32 [..., W], the vocabulary divided among devices and padded.
        vocab_size: V, the size of the vocabulary without padding.
        grid: The devices that share the model; None if `logits` is already whole.

    Returns:
        float32 [..., V].
    """
    return logits if grid is None else grid.gather(logits)[..., :vocab_size]


def whole_shape(shape: Sequence[int], split: Split) -> tuple[int, ...]:
    """Returns the shape of a weight in its checkpoint, given its shape on the devices.

    Args:
        shape: Shape of the weight when the parts of all devices are concatenated.
        split: The units of each dimension of the weight.
    """
    return tuple(
        n if units is None else sum(u.num * u.size for u in units)
        for n, units in zip(shape, split, strict=True)
    )


def take_columns(value: np.ndarray, columns: Sequence[Int[np.ndarray, " c"] | None]) -> np.ndarray:
    """Returns an array with the columns of each dimension in another order.

    Args:
        value: The array.
        columns: For each dimension, int [c]: the indices to select, or -1 for zeros; None for all columns in
            their order.
    """
    for axis, order in enumerate(columns):
        if order is not None:
            value = np.take(value, np.maximum(order, 0), axis)
            if (order < 0).any():
                shape = [-1 if i == axis else 1 for i in range(value.ndim)]
                value = np.where((order < 0).reshape(shape), np.zeros((), value.dtype), value)
    return value
