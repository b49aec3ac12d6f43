"""Hooks of modules: which modules they fit, and the transfer of the values that they capture to the host."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from flax import nnx
from jaxtyping import Array

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.errors import check
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.features.hooks import Hook
from jax_paged.models.layers import Linear
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.worker.input_batch import InputBatch


def check_order(model: LanguageModel, hooks: Sequence[Hook], grid: DeviceGrid) -> None:
    """Checks that devices have the output of hooked modules in its own order.

    Raises:
        ValueError: If one is in the order of the devices.
    """
    for hook in hooks:
        module = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model)}.get(hook.path)
        if isinstance(module, Linear):
            order = grid.columns(module.split)[-1]
            allowed = (
                f"a module whose outputs are in order on {grid.num_devices} devices, and no fused projection "
                "or one to fewer heads than devices"
            )
            check(order is None, "path", hook.path, allowed)


@dataclasses.dataclass(frozen=True, eq=False)
class PendingCaptures:
    """Captured values of a step, while the device computes them.

    Args:
        arrays: StepResult.captured.
        rows: By the index of each row with hooks that capture: its first token row, the number of its token
            rows, and the names of these hooks.
    """

    arrays: Mapping[str, Array]
    rows: dict[int, tuple[int, int, list[str]]]

    def read(self, num_live: Sequence[int] | None) -> dict[int, dict[str, np.ndarray]]:
        """Waits for the values; returns them by row and name.

        Args:
            num_live: How many decode steps each row took part in, if a step did several; None otherwise.
        """
        if not self.rows:
            return {}
        arrays = {name: np.asarray(x) for name, x in self.arrays.items()}
        found: dict[int, dict[str, np.ndarray]] = {}
        for i, (first, n, names) in self.rows.items():
            if num_live is None:
                found[i] = {name: arrays[name][first : first + n] for name in names}
            else:
                found[i] = {name: arrays[name][: num_live[i], i] for name in names}
        return found


def plan_captures(
    output: SchedulerOutput, batch: InputBatch, names: frozenset[str], captured: Mapping[str, Array]
) -> PendingCaptures | None:
    """Returns the captured values of a step; None if it captures none."""
    if not captured:
        return None
    rows, first = dict[int, tuple[int, int, list[str]]](), 0
    for i, row in enumerate(output.scheduled):
        if found := batch.features.hooks_on.get(row.seq_id, frozenset()) & names:
            rows[i] = first, row.num_tokens, sorted(found)
        first += row.num_tokens
    return PendingCaptures(captured, rows)
