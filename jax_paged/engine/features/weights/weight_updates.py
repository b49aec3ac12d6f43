"""Other weights for a running engine, and what becomes of all that the old ones have computed."""

import uuid
from typing import TYPE_CHECKING, Any, Literal

from jax_paged.engine.features import pinned_prefixes
from jax_paged.errors import check, check_choice

if TYPE_CHECKING:
    from jax_paged.engine.engine_core import StepLoop
    from jax_paged.engine.llm_engine import LLMEngine

Running = Literal["error", "recompute", "keep"]


def update(
    engine: "LLMEngine", loop: "StepLoop", weights: Any, running: Running, version: str | None
) -> None:
    """Exchanges the weights between two steps; see LLMEngine.update_weights."""
    check_choice("running", running, ("error", "recompute", "keep"))
    ok = version is None or (isinstance(version, str) and version != "")
    check(ok, "weight_version", version, "None or a non-empty string")
    if not engine.is_sleeping():
        if not engine.drain():
            _check_running(loop, running)
        engine.settle()
    engine.executor.update_weights(weights)
    loop.num_weight_updates += 1
    loop.weight_version = str(loop.num_weight_updates) if version is None else version
    if not engine.is_sleeping():  # one that sleeps does so when it wakes up
        forget(engine, loop, uuid.uuid4().hex if running == "keep" else None)


def forget(engine: "LLMEngine", loop: "StepLoop", kept_salt: str | None) -> None:
    """Shares nothing computed so far from now on, and computes pinned prefixes again.

    Args:
        engine: Its running requests can be computed again, or are kept; no step is in flight.
        loop: Its own.
        kept_salt: As Scheduler.forget_prefixes takes it.

    Raises:
        ValueError: If pinned prefixes can't be computed again; these are not pinned any more.
    """
    manager, problems, changed = engine.scheduler.block_manager, [], loop.take_changed()
    pinned = dict(manager.pinned)
    for name in pinned:
        manager.unpin(name)
    engine.scheduler.forget_prefixes(kept_salt)
    for name, prefix in pinned.items():
        try:
            pinned_prefixes.pin(engine, name, prefix.token_ids, prefix.salt)
        except ValueError as error:
            problems.append(f"{name} is pinned no more: {error}")
    loop.changed |= dict.fromkeys(changed)
    if problems:
        raise ValueError("\n".join(problems))


def check_can_recompute(loop: "StepLoop") -> None:
    """Checks that running requests can lose all that they have computed, and compute it again.

    Raises:
        RuntimeError: If they can't; the message says all that is in the way.
    """
    problems = _pinned(loop)
    if loop.is_planned:
        problems.append("a plan of schedule() has not run: run it, or step()")
    dropped = [
        repr(state.group.request_id)
        for state in loop.requests.values()
        if any(seq.num_dropped_tokens for seq in state.group.unfinished)
    ]
    if dropped:
        problems.append(
            f"the requests {', '.join(dropped)} have dropped blocks, and can't be computed again: let them "
            "finish, or abort them"
        )
    _raise(problems)


def _check_running(loop: "StepLoop", running: Running) -> None:
    if running == "error":
        raise RuntimeError(
            "requests are running; finish or abort them, or pass running='recompute' or 'keep'"
        )
    if running == "recompute":
        check_can_recompute(loop)
    _raise(_pinned(loop))


def _pinned(loop: "StepLoop") -> list[str]:
    names = ", ".join(map(repr, loop.scheduler.block_manager.pinned))
    what = "unpin them, or let all requests finish, so that they can be computed again"
    return [f"the prefixes {names} are pinned: {what}"] if names else []


def _raise(problems: list[str]) -> None:
    if problems:
        raise RuntimeError("\n".join(problems))
