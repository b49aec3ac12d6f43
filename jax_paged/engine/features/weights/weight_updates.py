"""Weight updates of a running engine, and their effect on requests and cached prefixes."""

import uuid
from typing import TYPE_CHECKING, Literal

from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.feature import EngineFeature
from jax_paged.errors import check, check_choice

if TYPE_CHECKING:
    from jax_paged.models.loading.new_weights import NewWeights

Running = Literal["error", "recompute", "keep"]


class WeightUpdates(EngineFeature):
    """Methods of LLMEngine that replace the weights between two steps."""

    @property
    def weight_version(self) -> str:
        """The name of the current weights, from the last update; by default the number of updates."""
        return self._core.weight_version

    def update_weights(
        self,
        weights: "NewWeights",
        *,
        running: Running = "error",
        weight_version: str | None = None,
    ) -> None:
        """Replaces the weights. Nothing is compiled, and prefixes that older weights computed are not reused.

        Pinned prefixes are recomputed with the new weights. While requests are running, pinned prefixes are
        an error.

        Args:
            weights: A model, its nnx.State, tensors by checkpoint name (a mapping or pairs), a folder, or a
                hub id. Names, shapes and dtypes must match the served model. JAX arrays are shared with the
                caller and must not be donated to other programs.
            running: What happens to running requests. "error" raises an error if there are any. "recompute"
                recomputes all their tokens, including output tokens. "keep" continues with the keys and
                values of the old weights, which are not shared with other requests. Ignored while the engine
                is asleep: requests that were kept are recomputed at wake-up.
            weight_version: Name of the weights, reported with outputs; None for the number of updates.

        Raises:
            ValueError: If the weights do not fit; nothing has changed then. Also if a pinned prefix can't be
                recomputed.
            RuntimeError: If running requests or pinned prefixes do not allow the update. Nothing has changed
                then.
        """
        core, version = self._core, weight_version
        core.check_alive()
        check_choice("running", running, ("error", "recompute", "keep"))
        ok = version is None or (isinstance(version, str) and version != "")
        check(ok, "weight_version", version, "None or a non-empty string")
        if core.pause_reason is None:
            if not core.wait_if_idle():
                _check_running(core, running)
            core.wait_for_steps()
        core.executor.update_weights(weights)
        core.num_weight_updates += 1
        core.weight_version = str(core.num_weight_updates) if version is None else version
        if core.pause_reason is None:  # a sleeping engine does this at wake-up
            # The new salt separates running requests from requests that compute with the new weights.
            self._forget_prefixes(uuid.uuid4().hex if running == "keep" else None)


def _check_running(core: EngineCore, running: Running) -> None:
    """Raises RuntimeError if running requests or pinned prefixes do not allow a weight update."""
    if running == "error":
        raise RuntimeError(
            "requests are running; let them finish, abort them, or pass running='recompute' or 'keep'"
        )
    if running == "recompute":
        check_can_recompute(core)
    _raise(_pinned_problems(core))


def check_can_recompute(core: EngineCore) -> None:
    """Checks that running requests can drop everything that they have computed, and compute it again.

    Raises:
        RuntimeError: If they can't. The message lists every reason.
    """
    problems = _pinned_problems(core)
    if core.planned is not None:
        problems.append("the plan of schedule() has not run; call run() or step() first")
    dropped = [
        repr(state.group.request_id)
        for state in core.requests.values()
        if any(seq.num_dropped_tokens for seq in state.group.unfinished)
    ]
    if dropped:
        problems.append(
            f"the requests {', '.join(dropped)} have dropped blocks and can't be recomputed; let them finish "
            "or abort them"
        )
    _raise(problems)


def _pinned_problems(core: EngineCore) -> list[str]:
    """Returns an error message about pinned prefixes, as a list; empty if no prefix is pinned."""
    names = ", ".join(map(repr, core.scheduler.block_manager.pinned))
    problem = "are pinned and can't be recomputed while requests are running"
    return [f"the prefixes {names} {problem}; unpin them or let all requests finish"] if names else []


def _raise(problems: list[str]) -> None:
    """Raises RuntimeError with all problems, if there are any."""
    if problems:
        raise RuntimeError("\n".join(problems))
