"""How weights and pool are divided among devices: whole heads, experts or columns, by one rule.

A dimension of a weight is one or several lists of units side by side, and every device gets as many units of
each list. A projection to queries, keys and values with four query heads and one kv head, on two devices:

    columns           q0 q1 q2 q3 k0 v0
    device 0          q0 q1 k0 v0
    device 1          q2 q3 k0 v0

What such a projection returns is in the order of the devices, and a device's part of it is contiguous.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

# The mesh axis that everything is divided along.
TENSOR = "tensor"


@dataclasses.dataclass(frozen=True)
class Units:
    """What lies side by side in a dimension of a weight, and stays whole when it is divided.

    Args:
        num: How many units.
        size: Columns of a unit.
        kind: "even": every device gets as many. "repeated": or each unit lies on several devices, where there
            are fewer units than devices. "padded": or some devices have units that mean nothing, at the end.
            "experts": like "even", but only where experts are divided, and nothing else of their kernels.
    """

    num: int
    size: int = 1
    kind: Literal["even", "repeated", "padded", "experts"] = "even"

    def on(self, num_devices: int) -> int:
        """Returns how many units each device gets.

        Raises:
            ValueError: If they can't be divided.
        """
        if self.num % num_devices == 0:
            return self.num // num_devices
        if self.kind == "repeated" and num_devices % self.num == 0:
            return 1
        if self.kind == "padded":
            return -(-self.num // num_devices)
        more = " or a multiple" if self.kind == "repeated" else ""
        raise ValueError(f"a divisor{more} of {self.num}")

    def columns(self, num_devices: int) -> Int[np.ndarray, "n c"]:
        """Returns the columns that each device has, counted from the first unit; -1 for padding."""
        num = self.on(num_devices)
        units = np.arange(num_devices * num).reshape(num_devices, num)
        if self.kind == "repeated":
            units = units * self.num // (num_devices * num)
        columns = (units[..., None] * self.size + np.arange(self.size)).reshape(num_devices, -1)
        return np.where(columns < self.num * self.size, columns, -1)


# The units of every dimension of a weight; None where it is not divided.
Split = tuple[tuple[Units, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class DeviceGrid:
    """The devices that one model is divided among.

    Args:
        mesh: They lie along its axis TENSOR.
        splits_experts: Whether each expert is whole on one device; else each is divided among all.
    """

    mesh: Mesh | AbstractMesh
    splits_experts: bool = False

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return self.mesh.shape[TENSOR]

    @property
    def devices(self) -> list[jax.Device]:
        """Those of this process; they are no abstract ones."""
        assert isinstance(self.mesh, Mesh), "abstract devices hold nothing"
        return list(self.mesh.local_devices)

    def divided(self, split: Split) -> list[tuple[Units, ...] | None]:
        """Returns what is divided of a weight: its experts, or the other dimensions."""
        kinds = [units[0].kind if units else None for units in split]
        if self.splits_experts and "experts" in kinds:
            return [units if kind == "experts" else None for units, kind in zip(split, kinds, strict=True)]
        return [None if kind == "experts" else units for units, kind in zip(split, kinds, strict=True)]

    def columns(self, split: Split) -> list[Int[np.ndarray, " c"] | None]:
        """Returns the columns of every dimension in the order of the devices, -1 for padding; None for all.

        Raises:
            ValueError: If they can't be divided; the message says how many devices are allowed.
        """
        columns: list[Int[np.ndarray, " c"] | None] = []
        for units in self.divided(split):
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
        """Returns the shape of a weight on all devices together, of that in its checkpoint."""
        columns = self.columns(split)
        return tuple(n if c is None else len(c) for n, c in zip(whole, columns, strict=True))

    def spec(self, split: Split) -> PartitionSpec:
        """Returns the mesh axis of every dimension of a weight whose columns are in the devices' order."""
        return PartitionSpec(*(units and TENSOR for units in self.divided(split)))

    def sharding(self, split: Split) -> NamedSharding:
        """Returns how such a weight lies on the devices."""
        return NamedSharding(self.mesh, self.spec(split))

    def parts(self, y: Array, units: Sequence[Units]) -> list[Array]:
        """Takes an output apart whose last dimension holds several lists of units.

        Args:
            y: In the order of the devices.
            units: The lists.

        Returns:
            The columns of each list, in the order of the devices.
        """
        ends = np.cumsum([u.on(self.num_devices) * u.size for u in units])
        by_device = y.reshape(*y.shape[:-1], self.num_devices, -1)
        return [x.reshape(*y.shape[:-1], -1) for x in jnp.split(by_device, ends[:-1], axis=-1)]

    def on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Returns a function that every device computes on its own part of the arguments."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def gather(self, y: Array) -> Array:
        """Returns an array of which every device has all, of one whose last dimension is divided."""
        # Without the first constraint XLA would gather the weights that y is made with.
        divided = PartitionSpec(*[None] * (y.ndim - 1), TENSOR)
        for spec in (divided, PartitionSpec()):
            y = jax.lax.with_sharding_constraint(y, NamedSharding(self.mesh, spec))
        return y


def even(num: int, size: int = 1) -> tuple[Units, ...]:
    """Returns units of which every device gets as many."""
    return (Units(num, size),)


def repeated(num: int, size: int) -> tuple[Units, ...]:
    """Returns units that lie on several devices each, where there are fewer of them than devices."""
    return (Units(num, size, "repeated"),)


def padded(num: int) -> tuple[Units, ...]:
    """Returns units that need not be a multiple of the devices."""
    return (Units(num, kind="padded"),)


def whole_logits(
    logits: Float[Array, "... w"], vocab_size: int, grid: DeviceGrid | None
) -> Float[Array, "... v"]:
    """Returns logits of which every device has all, without those of padding.

    They are gathered once: what draws from them would otherwise wait for the other devices at every turn.
    """
    return logits if grid is None else grid.gather(logits)[..., :vocab_size]


def whole_shape(shape: Sequence[int], split: Split) -> tuple[int, ...]:
    """Returns the shape of a weight in its checkpoint's order, of its shape on devices."""
    return tuple(
        n if units is None else sum(u.num * u.size for u in units)
        for n, units in zip(shape, split, strict=True)
    )


def taken(value: np.ndarray, columns: Sequence[Int[np.ndarray, " c"] | None]) -> np.ndarray:
    """Returns a weight with its columns in another order; zeros where that says -1."""
    for axis, order in enumerate(columns):
        if order is not None:
            value = np.take(value, np.maximum(order, 0), axis)
            if (order < 0).any():
                shape = [-1 if i == axis else 1 for i in range(value.ndim)]
                value = np.where((order < 0).reshape(shape), np.zeros((), value.dtype), value)
    return value
