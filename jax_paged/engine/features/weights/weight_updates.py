"""New weights for a running engine, and what becomes of everything that the old weights have computed."""

import uuid
from collections.abc import Callable
from typing import Any, Literal

from jax_paged.checks import check, check_choice
from jax_paged.engine.engine_core import EngineCore

Running = Literal["error", "recompute", "keep"]


class WeightUpdates:
    """Replaces the weights of an engine between two steps.

    Args:
        core: Runs with the weights.
        forget_cached: PinnedPrefixes.forget_cached.
    """

    def __init__(self, core: EngineCore, forget_cached: Callable[[str | None], None]) -> None:
        self._core = core
        self._forget_cached = forget_cached

    def update(self, weights: Any, running: Running, version: str | None) -> None:
        """Replaces the weights; see LLMEngine.update_weights."""
        core = self._core
        check_choice("running", running, ("error", "recompute", "keep"))
        ok = version is None or (isinstance(version, str) and version != "")
        check(ok, "weight_version", version, "None or a text")
        if not core.asleep:
            if not core.drain():
                self._check_running(running)
            core.settle()
        core.executor.update_weights(weights)
        core.num_weight_updates += 1
        core.weight_version = str(core.num_weight_updates) if version is None else version
        if not core.asleep:  # an engine that sleeps does so when it wakes up
            self._forget_cached(uuid.uuid4().hex if running == "keep" else None)

    def _check_running(self, running: Running) -> None:
        if running == "error":
            raise RuntimeError(
                "requests are running; finish or abort them, or pass running='recompute' or 'keep'"
            )
        if running == "recompute":
            check_can_recompute(self._core)
        _raise(_pinned(self._core))


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
