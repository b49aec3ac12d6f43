"""An engine that sleeps: it frees the memory of weights and pool for others, and takes it again.

    awake --sleep(1)--> weights in host memory, no pool --wake_up--> awake
    awake --sleep(2)--> no weights, no pool --update_weights, wake_up--> awake

Each part that can wake up separately has a tag. Requests run again when nothing sleeps any more.
"""

from collections.abc import Iterable
from typing import Any, Literal

from jax_paged.arguments.plain_values import plain
from jax_paged.engine.feature import EngineFeature
from jax_paged.engine.features.weights.weight_updates import check_can_recompute
from jax_paged.engine.serialized import any_thread
from jax_paged.errors import Problems, check, check_choice

Mode = Literal["wait", "abort", "keep"]
TAGS = ("weights", "kv_cache")


class Sleeping(EngineFeature):
    """Methods of LLMEngine that free the memory of weights and pool, and take it again.

    Attributes:
        sleep_level: 1 or 2 while the engine sleeps, 0 while it is awake.
    """

    sleep_level: int = 0
    _asleep: tuple[str, ...] = ()  # tags of the memory that is freed

    @any_thread
    def is_sleeping(self) -> bool:
        """Whether anything sleeps, so that no request runs; the name is vLLM's."""
        return bool(self._asleep)

    def check_sleep(self, level: Any, mode: Any) -> None:
        """Checks that the engine can go to sleep in this way; changes nothing.

        Raises:
            ValueError: If it can't; the message lists everything that is wrong.
            RuntimeError: If requests are to be kept that can't be computed again.
        """
        problems = Problems()
        problems.note(check_choice, "level", level, (1, 2))
        problems.note(check_choice, "mode", mode, ("wait", "abort", "keep"))
        asleep, remedy = list(self._asleep), ". Call wake_up() first"
        problems.note(check, not asleep, "sleep()", asleep, "called while nothing sleeps", remedy=remedy)
        problems.raise_if_any()
        if mode == "keep" and not self._core.drain():
            check_can_recompute(self._core)

    def sleep(self, level: int = 1, mode: Mode = "wait") -> None:
        """Gives the memory of weights and pool to whatever else this process does, until `wake_up`.

        Arrays that a model in memory shares stay its own. While it sleeps the engine takes no requests
        (EngineAsleepError), and cached prefixes are forgotten; pinned ones are computed again at the end.

        Args:
            level: 1 keeps the weights in host memory. 2 drops them: update_weights may bring others before
                the engine is awake; else they are read again from the folder that they came from.
            mode: What becomes of running requests. "wait" runs them to their ends first (`step` returns what
                they bring); "abort" ends them with what they have; "keep" computes all their tokens again
                after waking.

        Raises:
            ValueError: If an argument is wrong, or the engine sleeps already; nothing has changed.
            RuntimeError: If requests are to be kept that can't be computed again; nothing has changed.
        """
        core = self._core
        core.check_alive()
        self.check_sleep(level, mode)
        level = plain(level)
        if mode == "wait":
            core.finish_all()
        elif mode == "abort":
            for request_id in list(core.requests):
                core.abort(request_id)
        core.drain()
        core.settle()
        core.executor.free_memory(keeps_weights=level == 1)
        self.sleep_level = level
        self._set_asleep(TAGS)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes memory again; compiles nothing. When nothing sleeps any more, requests run.

        Args:
            tags: Of what wakes up: "weights", "kv_cache"; None for all that sleeps. Other weights can be
                brought in between, before the pool takes its memory.

        Raises:
            ValueError: If a tag is wrong or awake, or there are no weights to wake up with, and nothing has
                changed then; or if pinned prefixes can't be computed again.
            RuntimeError: If prefixes are pinned, and a model in memory has got other weights meanwhile;
                update_weights takes them.
        """
        core = self._core
        core.check_alive()
        waking = _checked_tags(tags, self._asleep)
        left = tuple(tag for tag in self._asleep if tag not in waking)
        # Dropped weights are read as late as possible: update_weights may still bring others.
        if not left or ("weights" in waking and self.sleep_level == 1):
            core.executor.restore_weights()
        if not left and core.scheduler.block_manager.pinned:
            core.executor.check_weights()  # before the prefixes are computed with them
        if "kv_cache" in waking:
            core.executor.restore_pool()
        self._set_asleep(left)
        if not left:
            self.sleep_level = 0
            self._forget_prefixes(None)

    def _set_asleep(self, tags: tuple[str, ...]) -> None:
        self._asleep = tags
        reason = f"the engine sleeps ({', '.join(tags)}); wake_up() wakes it"
        self._core.pause_reason = reason if tags else None


def _checked_tags(tags: Iterable[str] | None, asleep: tuple[str, ...]) -> tuple[str, ...]:
    if tags is None:
        check(bool(asleep), "wake_up()", [], "called while something sleeps")
        return asleep
    problems, found = Problems(), [tags] if isinstance(tags, str) else list(tags)
    problems.note(check, bool(found), "tags", found, "None or at least one tag")
    for tag in found:
        problems.note(check_choice, "tags", tag, TAGS, aspect="each of")
        if tag in TAGS:
            allowed = f"asleep, which {list(asleep)} are"
            problems.note(check, tag in asleep, "tags", tag, allowed, aspect="each of")
    problems.raise_if_any()
    return tuple(found)
