"""Recording and replay of the scheduler's decisions."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.codec import check_format
from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.feature import EngineFeature
from jax_paged.errors import check, check_int

if TYPE_CHECKING:
    from jax_paged.lab.what_if import Replay


class Recordings(EngineFeature):
    """Methods of LLMEngine that record the scheduler's decisions and replay recordings."""

    def record(self, sink: Callable[[str], object] | None) -> None:
        """Starts or ends a recording: every scheduling decision is written as a line of JSON.

        The engine continues with a new scheduler and an empty KV cache, without cached prefixes.
        `jax_paged.lab.recording.replay` checks a recording without a device.

        Args:
            sink: Called with each line, such as the `write` method of an open file or the `append` method of
                a list. None ends a recording.

        Raises:
            ValueError: If the engine has a custom scheduler, whose decisions can't be replayed.
            RuntimeError: If requests are running or prefixes are pinned.
        """
        self._core.check_can_run()
        _check_idle(self._core)
        from jax_paged.lab.recording import RecordedScheduler

        core = self._core
        core.scheduler = core.make_scheduler() if sink is None else RecordedScheduler(core.scheduler, sink)

    def replay(self, lines: Iterable[str]) -> "Replay":
        """Runs the steps of a recording on the device again, and checks that they yield the same tokens.

        Afterwards the engine has a new scheduler and an empty KV cache, without cached prefixes.

        Args:
            lines: The lines of a recording, such as an open file or a list. No limit of the recorded engine
                may be larger than the limit of this engine.

        Returns:
            The steps and requests. `max_logprob_difference` is 0.0 if the same programs ran.

        Raises:
            ValueError: If a decision or a token differs, or the recording does not fit this engine.
            RuntimeError: If requests are running, prefixes are pinned, or the engine is being recorded.
        """
        core = self._core
        core.check_can_run()
        _check_idle(core)
        check_not_recorded(core)
        from jax_paged.lab.recording import replay_events

        lines = list(lines)
        for event in map(json.loads, lines):
            if event["event"] == "start":
                check_format("lines", event.get("format", 1))
                _check_fits(event, core.config)
            elif event["event"] == "add":
                _check_replayable(event)
        try:
            return replay_events(lines, core.executor).replay()
        finally:
            core.scheduler = core.make_scheduler()  # the KV cache contains blocks of the replay


def _check_idle(core: EngineCore) -> None:
    """Raises RuntimeError if requests are running or prefixes are pinned."""
    if not core.wait_if_idle() or core.scheduler.block_manager.pinned:
        raise RuntimeError("requests are running or prefixes are pinned; end and unpin all of them first")


def _check_replayable(request: dict) -> None:
    """Raises ValueError if a recorded request used a LoRA adapter or structured output."""
    features, grammar = request["features"], request["sampling_params"]["structured_outputs"]
    adapter = features and features["adapter"]
    allowed = "None because recordings do not contain adapters"
    check(not adapter, "lines", adapter, allowed, aspect="each adapter in")
    allowed = "None because recordings do not contain token masks"
    check(grammar is None, "lines", grammar, allowed, aspect="structured_outputs of each request in")


def check_not_recorded(core: EngineCore) -> None:
    """Checks that the engine is not being recorded. Replacing its scheduler would end the recording.

    Raises:
        RuntimeError: If the engine is being recorded.
    """
    from jax_paged.lab.recording import RecordedScheduler

    if isinstance(core.scheduler, RecordedScheduler):
        raise RuntimeError(
            "this engine is being recorded, and the call would replace its scheduler; call record(None) first"
        )


def _check_fits(start: dict, config: EngineConfig) -> None:
    """Checks that this engine can run the steps of the recorded scheduler.

    Args:
        start: The first event of a recording, with the scheduler's settings.
        config: Configuration of this engine.

    Raises:
        ValueError: If a setting differs or exceeds a limit.
    """
    manager, scheduler = start["block_manager"], start["scheduler"]
    groups = [{"window": group.window, "is_cross": group.is_cross} for group in config.cache_groups]
    for name, value, ours in (
        ("block_size", manager["block_size"], config.block_size),
        ("groups", manager["groups"], groups),
    ):
        check(value == ours, "lines", value, f"{ours} as in this engine", aspect=f"{name} in")
    drafts, own = scheduler.get("speculation"), config.speculation
    is_same = drafts is None or (own is not None and drafts == dataclasses.asdict(own))
    check(is_same, "lines", drafts, f"None or {own} as in this engine", aspect="speculation in")
    for name, value, most in (
        ("num_blocks", manager["num_blocks"], config.num_blocks),
        ("num_swap_blocks", manager["num_swap_blocks"], config.num_swap_blocks),
        ("num_state_slots", manager.get("num_state_slots", 0), config.num_state_slots),
        ("num_swap_state_slots", manager.get("num_swap_state_slots", 0), config.num_swap_state_slots),
        ("max_num_seqs", scheduler["max_num_seqs"], config.max_num_seqs),
        ("max_num_batched_tokens", scheduler["max_num_batched_tokens"], config.max_num_batched_tokens),
        ("max_model_len", scheduler["max_model_len"], config.max_model_len),
        ("num_scheduler_steps", scheduler["num_scheduler_steps"], config.num_scheduler_steps),
    ):
        check_int("lines", value, 0, most, aspect=f"{name} in")
