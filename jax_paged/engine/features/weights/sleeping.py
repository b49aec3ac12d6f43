"""An engine that sleeps: it frees the memory of weights and pool for others, and takes it again.

    awake --sleep(1)--> weights in host memory, no pool --wake_up--> awake
    awake --sleep(2)--> no weights, no pool --update_weights, wake_up--> awake

Each part that can wake up separately has a tag. Requests run again when nothing sleeps any more.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

from jax_paged.arguments.plain_values import plain
from jax_paged.checks import Problems, check, check_choice
from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.features.weights.weight_updates import check_can_recompute

Mode = Literal["wait", "abort", "keep"]
TAGS = ("weights", "kv_cache")


class Sleeping:
    """Frees the memory of an engine, and takes it again.

    Args:
        core: Runs with that memory.
        forget_cached: PinnedPrefixes.forget_cached.
    """

    def __init__(self, core: EngineCore, forget_cached: Callable[[str | None], None]) -> None:
        self._core = core
        self._forget_cached = forget_cached

    def check(self, level: Any, mode: Any) -> None:
        """Checks that the engine can go to sleep in this way.

        Raises:
            ValueError: If it can't; the message lists everything that is wrong.
            RuntimeError: If requests are to be kept that can't be computed again.
        """
        problems = Problems()
        problems.note(check_choice, "level", level, (1, 2))
        problems.note(check_choice, "mode", mode, ("wait", "abort", "keep"))
        asleep = ", ".join(self._core.asleep)
        problems.note(check, not asleep, "what sleeps already", asleep, "nothing; wake_up() first")
        problems.raise_if_any()
        if mode == "keep" and not self._core.drain():
            check_can_recompute(self._core)

    def sleep(self, level: int, mode: Mode) -> None:
        """Frees weights and pool; see LLMEngine.sleep."""
        core = self._core
        self.check(level, mode)
        level = plain(level)
        if mode == "wait":
            core.finish_all()
        elif mode == "abort":
            for request_id in list(core.requests):
                core.abort(request_id)
        core.drain()
        core.settle()
        core.executor.free_memory(keeps_weights=level == 1)
        core.asleep, core.sleep_level = TAGS, level

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Takes the memory again; see LLMEngine.wake_up."""
        core = self._core
        waking = self._checked_tags(tags)
        left = tuple(tag for tag in core.asleep if tag not in waking)
        # Dropped weights are read as late as possible: update_weights may still bring others.
        if not left or ("weights" in waking and core.sleep_level == 1):
            core.executor.restore_weights()
        if not left and core.scheduler.block_manager.pinned:
            core.executor.check_weights()  # before the prefixes are computed with them
        if "kv_cache" in waking:
            core.executor.restore_pool()
        core.asleep = left
        if not left:
            core.sleep_level = 0
            self._forget_cached(None)

    def _checked_tags(self, tags: Iterable[str] | None) -> tuple[str, ...]:
        asleep = self._core.asleep
        if tags is None:
            check(bool(asleep), "what sleeps", "nothing", "something to wake up")
            return asleep
        problems, found = Problems(), [tags] if isinstance(tags, str) else list(tags)
        problems.note(check, bool(found), "tags", found, "None, or one tag at least")
        for tag in found:
            problems.note(check_choice, "a tag", tag, TAGS)
            if tag in TAGS:
                problems.note(check, tag in asleep, "a tag", tag, f"what sleeps: {list(asleep)}")
        problems.raise_if_any()
        return tuple(found)
