"""Sleep mode: an engine frees the device memory of its weights and KV cache, and allocates it again later.

    awake --sleep(1)--> weights in host memory, no KV cache --wake_up--> awake
    awake --sleep(2)--> no weights, no KV cache --update_weights, wake_up--> awake

The parts that can wake up separately are named by tags, "weights" and "kv_cache". Requests run again when
both are awake.
"""

from collections.abc import Iterable
from typing import Any, Literal

from jax_paged.arguments.plain_values import plain
from jax_paged.arguments.shown_values import Text
from jax_paged.engine.feature import EngineFeature
from jax_paged.engine.features.weights.weight_updates import check_can_recompute
from jax_paged.engine.synchronized import unsynchronized
from jax_paged.errors import Problems, check, check_choice

Mode = Literal["wait", "abort", "keep"]
TAGS = ("weights", "kv_cache")


class Sleeping(EngineFeature):
    """Methods of LLMEngine that free the memory of weights and KV cache, and allocate it again.

    Attributes:
        sleep_level: 1 or 2 while the engine is asleep, 0 while it is awake.
    """

    sleep_level: int = 0
    _asleep: tuple[str, ...] = ()  # tags of the parts that are asleep

    @unsynchronized
    def is_sleeping(self) -> bool:
        """Returns whether any part of the engine is asleep, so that no request runs. The name is vLLM's."""
        return bool(self._asleep)

    def check_sleep(self, level: Any, mode: Any) -> None:
        """Checks that `sleep` can be called with these arguments; changes nothing.

        Raises:
            ValueError: If it can't. The message lists every problem.
            RuntimeError: If `mode` is "keep" and a running request can't be recomputed.
        """
        problems = Problems()
        problems.note(check_choice, "level", level, (1, 2))
        problems.note(check_choice, "mode", mode, ("wait", "abort", "keep"))
        asleep = Text(f"an engine that is asleep ({', '.join(self._asleep)})")
        allowed, remedy = "called while the engine is awake", ". Call wake_up() first"
        problems.note(check, not self._asleep, "sleep()", asleep, allowed, remedy=remedy)
        problems.raise_if_any()
        if mode == "keep" and not self._core.wait_if_idle():
            check_can_recompute(self._core)

    def sleep(self, level: int = 1, mode: Mode = "wait") -> None:
        """Frees the memory of weights and KV cache until `wake_up`, for other work of this process.

        A sleeping engine rejects requests (EngineAsleepError). Cached prefixes are dropped, and pinned
        prefixes are recomputed after waking. Arrays that the engine shares with the caller's model are not
        freed.

        Args:
            level: 1 keeps the weights in host memory. 2 drops them: unless update_weights provides new ones,
                they are read again from their folder at wake-up.
            mode: What happens to running requests. "wait" runs them to completion first (the next `step`
                returns their outputs). "abort" ends them with the output generated so far. "keep" recomputes
                all their tokens after waking.

        Raises:
            ValueError: If an argument is wrong, or the engine is already asleep. Nothing has changed then.
            RuntimeError: If `mode` is "keep" and a running request can't be recomputed. Nothing has changed
                then.
        """
        core = self._core
        core.check_alive()
        self.check_sleep(level, mode)
        level = plain(level)
        if mode == "wait":
            core.run_all_to_end()
        elif mode == "abort":
            for request_id in list(core.requests):
                core.abort(request_id)
        core.wait_if_idle()  # also runs a planned step, if no request is unfinished
        core.wait_for_steps()
        core.executor.free_memory(keeps_weights=level == 1)
        self.sleep_level = level
        self._set_asleep(TAGS)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Allocates freed memory again. Nothing is compiled. Requests run when all parts are awake.

        Args:
            tags: Parts to wake up: "weights", "kv_cache", or None for all parts that are asleep. To save
                memory, weights may be updated before the KV cache is allocated.

        Raises:
            ValueError: If a tag is wrong or already awake, or if no weights are available; nothing has
                changed then. Also if a pinned prefix can't be recomputed.
            RuntimeError: If prefixes are pinned, and the caller has replaced the weights of a model in memory
                while the engine was asleep. Call update_weights first.
        """
        core = self._core
        core.check_alive()
        waking = _checked_tags(tags, self._asleep)
        left = tuple(tag for tag in self._asleep if tag not in waking)
        # Dropped weights are read as late as possible, because update_weights may provide others before.
        if not left or ("weights" in waking and self.sleep_level == 1):
            core.executor.restore_weights()
        if not left and core.scheduler.block_manager.pinned:
            core.executor.check_weights()  # the pinned prefixes are recomputed with these weights
        if "kv_cache" in waking:
            core.executor.restore_pool()
        self._set_asleep(left)
        if not left:
            self.sleep_level = 0
            self._forget_prefixes(None)

    def _set_asleep(self, tags: tuple[str, ...]) -> None:
        """Sets the parts that are asleep, and pauses or resumes the engine accordingly."""
        self._asleep = tags
        reason = f"the engine is asleep ({', '.join(tags)}); call wake_up() first"
        self._core.pause_reason = reason if tags else None


def _checked_tags(tags: Iterable[str] | None, asleep: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the tags to wake up.

    Raises:
        ValueError: If a tag is unknown or already awake, or nothing is asleep.
    """
    if tags is None:
        check(bool(asleep), "wake_up()", Text("an awake engine"), "called while the engine is asleep")
        return asleep
    problems, waking = Problems(), [tags] if isinstance(tags, str) else list(tags)
    problems.note(check, bool(waking), "tags", waking, "None or at least one tag")
    for tag in waking:
        problems.note(check_choice, "tags", tag, TAGS, aspect="each of")
        if tag in TAGS:
            allowed = f"a tag that is asleep, one of {list(asleep)}"
            problems.note(check, tag in asleep, "tags", tag, allowed, aspect="each of")
    problems.raise_if_any()
    return tuple(waking)
