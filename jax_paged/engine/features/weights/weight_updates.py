"""New weights for a running engine, and what becomes of everything that the old weights have computed."""

import uuid
from typing import TYPE_CHECKING, Literal

from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.feature import EngineFeature
from jax_paged.errors import check, check_choice

if TYPE_CHECKING:
    from jax_paged.models.loading.new_weights import NewWeights

Running = Literal["error", "recompute", "keep"]


class WeightUpdates(EngineFeature):
    """Methods of LLMEngine that replace its weights between two steps."""

    @property
    def weight_version(self) -> str:
        """The name of the weights that draw tokens now: what update_weights was told, or how often it ran."""
        return self._core.weight_version

    def update_weights(
        self,
        weights: "NewWeights",
        *,
        running: Running = "error",
        weight_version: str | None = None,
    ) -> None:
        """Serves other weights from now on; nothing is compiled, and no cached prefix of older ones is hit.

        Args:
            weights: A model, its nnx.State, tensors by the names of a checkpoint (a mapping or pairs), or a
                folder or hub id; names, shapes and types are those of the model that is served. Arrays on
                the device are shared: a program that they are donated to takes them away.
            running: What becomes of running requests. With "error" there must be none; "recompute" computes
                all their tokens again, those they have drawn included; "keep" goes on from the keys and
                values of the older weights, which no other request is given. While the engine sleeps it means
                nothing: requests that were kept are computed again when it wakes up.
            weight_version: A name for outputs to carry; None counts the updates.

        Pinned prefixes are computed again, under their names; while requests run they are an error.

        Raises:
            ValueError: If the weights do not fit, and nothing has changed then; or if pinned prefixes can't
                be computed again.
            RuntimeError: If requests run, or prefixes are pinned, that must not be; nothing has changed.
        """
        core, version = self._core, weight_version
        core.check_alive()
        check_choice("running", running, ("error", "recompute", "keep"))
        ok = version is None or (isinstance(version, str) and version != "")
        check(ok, "weight_version", version, "None or a non-empty string")
        if core.pause_reason is None:
            if not core.drain():
                _check_running(core, running)
            core.settle()
        core.executor.update_weights(weights)
        core.num_weight_updates += 1
        core.weight_version = str(core.num_weight_updates) if version is None else version
        if core.pause_reason is None:  # an engine that sleeps does so when it wakes up
            self._forget_prefixes(uuid.uuid4().hex if running == "keep" else None)


def _check_running(core: EngineCore, running: Running) -> None:
    if running == "error":
        raise RuntimeError(
            "requests are running; finish or abort them, or pass running='recompute' or 'keep'"
        )
    if running == "recompute":
        check_can_recompute(core)
    _raise(_pinned(core))


def check_can_recompute(core: EngineCore) -> None:
    """Checks that running requests can lose all that they have computed, and compute it again.

    Raises:
        RuntimeError: If they can't; the message lists every reason.
    """
    problems = _pinned(core)
    if core.planned is not None:
        problems.append("a plan of schedule() has not run: run it, or step()")
    dropped = [
        repr(state.group.request_id)
        for state in core.requests.values()
        if any(seq.num_dropped_tokens for seq in state.group.unfinished)
    ]
    if dropped:
        problems.append(
            f"the requests {', '.join(dropped)} have dropped blocks, and can't be computed again: let them "
            "finish, or abort them"
        )
    _raise(problems)


def _pinned(core: EngineCore) -> list[str]:
    names = ", ".join(map(repr, core.scheduler.block_manager.pinned))
    what = "unpin them, or let all requests finish, so that they can be computed again"
    return [f"the prefixes {names} are pinned: {what}"] if names else []


def _raise(problems: list[str]) -> None:
    if problems:
        raise RuntimeError("\n".join(problems))
