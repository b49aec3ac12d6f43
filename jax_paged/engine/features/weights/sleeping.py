"""An engine that sleeps: it gives the memory of weights and pool to others, and takes it again.

    awake --sleep(1)--> weights in host memory, no pool --wake_up--> awake
    awake --sleep(2)--> no weights, no pool --update_weights, wake_up--> awake

What may wake up apart has a tag. Requests run again when nothing sleeps any more.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from jax_paged.arguments.plain_values import plain
from jax_paged.engine.features.weights import weight_updates
from jax_paged.errors import Problems, check, check_choice

if TYPE_CHECKING:
    from jax_paged.engine.engine_core import StepLoop
    from jax_paged.engine.llm_engine import LLMEngine

Mode = Literal["wait", "abort", "keep"]
TAGS = ("weights", "kv_cache")


def check_sleep(engine: "LLMEngine", loop: "StepLoop", level: Any, mode: Any) -> None:
    """Checks that an engine can go to sleep as it is told to.

    Raises:
        ValueError: If it can't; the message says all that is wrong.
        RuntimeError: If requests are to be kept that can't be computed again.
    """
    problems = Problems()
    problems.note(check_choice, "level", level, (1, 2))
    problems.note(check_choice, "mode", mode, ("wait", "abort", "keep"))
    asleep, remedy = list(loop.asleep), ". Call wake_up() first"
    problems.note(check, not asleep, "sleep()", asleep, "called while nothing sleeps", remedy=remedy)
    problems.raise_if_any()
    if mode == "keep" and not engine.drain():
        weight_updates.check_can_recompute(loop)


def sleep(engine: "LLMEngine", loop: "StepLoop", level: int, mode: Mode) -> None:
    """Frees weights and pool; see LLMEngine.sleep."""
    check_sleep(engine, loop, level, mode)
    level = plain(level)
    if mode == "wait":
        loop.finish_all()
    elif mode == "abort":
        engine.abort_request(list(loop.requests))
    engine.drain()
    engine.settle()
    engine.executor.free_memory(keeps_weights=level == 1)
    loop.asleep, loop.sleep_level = TAGS, level


def wake_up(engine: "LLMEngine", loop: "StepLoop", tags: Iterable[str] | None) -> None:
    """Takes the memory again; see LLMEngine.wake_up."""
    waking = _checked_tags(loop, tags)
    left = tuple(tag for tag in loop.asleep if tag not in waking)
    # Weights that were dropped are read as late as can be: update_weights may still bring others.
    if not left or ("weights" in waking and loop.sleep_level == 1):
        engine.executor.restore_weights()
    if not left and loop.scheduler.block_manager.pinned:
        engine.executor.check_weights()  # before the prefixes are computed with them
    if "kv_cache" in waking:
        engine.executor.restore_pool()
    loop.asleep = left
    if not left:
        loop.sleep_level = 0
        weight_updates.forget(engine, loop, None)


def _checked_tags(loop: "StepLoop", tags: Iterable[str] | None) -> tuple[str, ...]:
    if tags is None:
        check(bool(loop.asleep), "wake_up()", [], "called while something sleeps")
        return loop.asleep
    problems, found = Problems(), [tags] if isinstance(tags, str) else list(tags)
    problems.note(check, bool(found), "tags", found, "None or at least one tag")
    for tag in found:
        problems.note(check_choice, "tags", tag, TAGS, aspect="each of")
        if tag in TAGS:
            allowed = f"asleep, which {list(loop.asleep)} are"
            problems.note(check, tag in loop.asleep, "tags", tag, allowed, aspect="each of")
    problems.raise_if_any()
    return tuple(found)
