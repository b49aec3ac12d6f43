"""Hooks: a check of the hooked modules, and the transfer of captured values to the host."""

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


def check_column_order(model: LanguageModel, hooks: Sequence[Hook], grid: DeviceGrid) -> None:
    """Checks that the output columns of hooked modules are in the model's order on the devices.

    On several devices, the columns of some projections are reordered (see DeviceGrid.columns).

    Args:
        model: The model.
        hooks: The hooks.
        grid: The devices.

    Raises:
        ValueError: If the columns of a hooked module are reordered.
    """
    for hook in hooks:
        module = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model)}.get(hook.path)
        if isinstance(module, Linear):
            order = grid.columns(module.split)[-1]
            allowed = (
                f"a module whose outputs are in order on {grid.num_devices} devices, not a fused projection "
                "or a projection to fewer heads than devices"
            )
            check(order is None, "path", hook.path, allowed)


@dataclasses.dataclass(frozen=True, eq=False)
class PendingCaptures:
    """Captured values of a step that the device is computing.

    Args:
        arrays: StepResult.captured.
        rows: First token row, number of token rows, and names of the capturing hooks, by index of the
            scheduled sequence.
    """

    arrays: Mapping[str, Array]
    rows: dict[int, tuple[int, int, list[str]]]

    def read(self, num_live: Sequence[int] | None) -> dict[int, dict[str, np.ndarray]]:
        """Waits for the values; returns them by index of the scheduled sequence and by name.

        Args:
            num_live: Number of decode steps that each sequence took part in, for multi-step decoding; None
                for other steps.
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
    """Returns the captured values of a step; None if the engine has no hooks that capture.

    Args:
        output: The step.
        batch: State of the batch slots.
        names: Names of the hooks that capture.
        captured: StepResult.captured.
    """
    if not captured:
        return None
    rows, first = dict[int, tuple[int, int, list[str]]](), 0
    for i, row in enumerate(output.scheduled):
        if found := batch.features.hooks_on.get(row.seq_id, frozenset()) & names:
            rows[i] = first, row.num_tokens, sorted(found)
        first += row.num_tokens
    return PendingCaptures(captured, rows)
