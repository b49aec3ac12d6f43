"""Animation of the KV cache: drawn live while an engine runs, then with a slider over all steps."""

import contextlib
import dataclasses
import html
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from importlib.resources import files
from typing import Any, Protocol

import numpy as np

from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.lab.pool_map import (
    MAX_DRAWN,
    PITCH,
    SIDE,
    PoolMap,
    cell_position,
    cell_svg,
    owner_name,
    pool_map,
)
from jax_paged.lab.recording import replay_events

_Block = tuple[str, int]  # ("device" or "host", block id)
Observer = Callable[[Scheduler, SchedulerOutput], None]
_GAP = 26  # vertical gap between device and host memory in the drawing
_LIVE_INTERVAL_S = 0.2


class Observed(Protocol):
    """Object that calls observers after each step, such as an LLMEngine.

    Attributes:
        observers: Functions to call with the scheduler and the step.
    """

    observers: list[Observer]


@dataclasses.dataclass(frozen=True)
class Frame:
    """The KV cache after one step.

    Args:
        pool: The map of all blocks.
        output: The step.
        num_running: Number of requests that hold blocks on the device.
        num_waiting: Number of waiting requests.
        num_swapped: Number of requests that are swapped out to host memory.
    """

    pool: PoolMap
    output: SchedulerOutput
    num_running: int
    num_waiting: int
    num_swapped: int

    @property
    def caption(self) -> str:
        """A summary of the step in one line."""
        output = self.output
        words = [
            f"step {output.step_id}: {_count(output.num_batched_tokens, 'token')} of "
            f"{_count(len(output.scheduled), 'sequence')}",
            f"{self.num_running} running, {self.num_waiting} waiting, {self.num_swapped} swapped out",
        ]
        moves = (
            ("copied", output.blocks_to_copy),
            ("swapped out", output.blocks_to_swap_out),
            ("swapped in", output.blocks_to_swap_in),
        )
        words += [f"{_count(len(blocks), 'block')} {name}" for name, blocks in moves if blocks]
        if output.preempted:
            words.append(f"preempted: {', '.join(output.preempted)}")
        return "; ".join(words)


class Movie:
    """A sequence of frames, drawn in a notebook with a slider and a play button.

    Args:
        max_frames: Maximum number of frames. When it is exceeded, every second frame is removed, and from
            then on only half as many steps are recorded.
    """

    def __init__(self, max_frames: int = 400) -> None:
        self.frames: list[Frame] = []
        self._max_frames = max_frames
        self._every = 1
        self._num_steps = 0
        self._num_preemptions = 0

    def __len__(self) -> int:
        return len(self.frames)

    def add(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Adds a frame with the current state of the scheduler's pool; called after each step."""
        if self._num_steps % self._every == 0:
            self.frames.append(frame_of(scheduler, output))
        self._num_steps += 1
        self._num_preemptions += len(output.preempted)
        if len(self.frames) > self._max_frames:
            self.frames, self._every = self.frames[::2], self._every * 2

    def _repr_html_(self) -> str:
        """Returns the drawing with a slider; its script only changes the drawing itself."""
        return self.html(self.frames)

    def html(self, frames: list[Frame]) -> str:
        """Returns the drawing of some of the frames, below a summary of all steps.

        Args:
            frames: The frames to draw.
        """
        return _movie_html(frames, self._num_steps, self._num_preemptions)


@contextlib.contextmanager
def watch(engine: Observed, *, max_frames: int = 400) -> Iterator[Movie]:
    """Records the KV cache of an engine while the `with` block runs; in a notebook, also draws it live.

    Example:
        >>> with watch(llm.llm_engine) as movie:
        ...     outputs = llm.generate(["A block table is", "import os"])

    Args:
        engine: The engine to watch, such as `llm.llm_engine` of an LLM.
        max_frames: Maximum number of frames; see Movie.

    Yields:
        The movie, to which a frame is added after each step.
    """
    movie = Movie(max_frames)
    show = _display()
    shown = 0.0

    def observe(scheduler: Scheduler, output: SchedulerOutput) -> None:
        nonlocal shown
        movie.add(scheduler, output)
        if show is not None and time.monotonic() - shown >= _LIVE_INTERVAL_S:
            show(movie.html(movie.frames[-1:]))
            shown = time.monotonic()

    engine.observers.append(observe)
    try:
        yield movie
    finally:
        engine.observers.remove(observe)
        if show is not None:
            show(movie.html(movie.frames))


def movie_of(lines: Iterable[str], *, max_frames: int = 400) -> Movie:
    """Returns the movie of a recording.

    Args:
        lines: A complete recording, such as an open file or a list.
        max_frames: Maximum number of frames; see Movie.

    Raises:
        ValueError: If the recording is invalid or its decisions can't be reproduced; see `recording.replay`.
    """
    movie = Movie(max_frames)
    replay_events(lines, observe=movie.add)
    return movie


def frame_of(scheduler: Scheduler, output: SchedulerOutput) -> Frame:
    """Returns a frame with the current state of a scheduler's pool, after a step."""
    queues = scheduler.queues
    running, waiting, swapped = queues.running.values(), queues.waiting.values(), queues.swapped.values()
    groups = itertools.chain(running, waiting, swapped)
    sizes = len(running), len(waiting), len(swapped)
    return Frame(pool_map(scheduler.block_manager, groups), output, *sizes)


def _display() -> Callable[[str], None] | None:
    """Returns a function that replaces the HTML of the current notebook cell; None outside of notebooks."""
    try:
        from IPython.core.getipython import get_ipython
        from IPython.display import HTML, display
    except ImportError:
        return None
    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    handle: Any = display(HTML("<p>no steps yet</p>"), display_id=True)

    return lambda text: handle.update(HTML(text))


def _movie_html(frames: list[Frame], num_steps: int, num_preemptions: int) -> str:
    """Returns the template movie.html with the drawing of the last frame and the data of all frames.

    The data contains the distinct drawings of a cell ("boxes") and, for each frame, its caption, the cells
    that differ from the frame before as pairs (cell, box), and the arrows of copied and swapped blocks.
    """
    if not frames:
        return "<p>no steps yet</p>"
    on_device = _drawn(frame.pool.blocks for frame in frames)
    on_host = _drawn(frame.pool.host_blocks for frame in frames)
    positions = {("device", block): cell_position(i) for i, block in enumerate(on_device)}
    height = (max((y for _, y in positions.values()), default=0)) + PITCH
    top = height + _GAP
    positions |= {("host", b): (x, y + top) for i, b in enumerate(on_host) for x, y in [cell_position(i)]}
    indices, boxes, before = {key: i for i, key in enumerate(positions)}, {}, [-1] * len(positions)
    steps = []
    for frame in frames:
        now = [-1] * len(positions)
        for key, drawn in _cells(frame, indices):
            now[indices[key]] = boxes.setdefault(drawn, len(boxes))
        changes = [[i, new] for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
        moves = [(a, b) for a, b in _moves(frame.output) if a in positions and b in positions]
        arrows = [[*positions[a], *positions[b]] for a, b in moves]
        steps.append([frame.caption, changes, arrows])
        before = now
    width = max((x for x, _ in positions.values()), default=0) + PITCH
    total = max((y for _, y in positions.values()), default=0) + PITCH
    # The last frame is static, for notebook viewers that remove scripts.
    last = dict(_cells(frames[-1], indices))
    cells = "".join(
        f'<g transform="translate({x} {y})">{last.get(key, "")}</g>' for key, (x, y) in positions.items()
    )
    label = (
        f'<text x="0" y="{top - 8}" text-anchor="start" font-weight="normal" fill="currentColor">'
        "host memory</text>"
    )
    template = files("jax_paged.lab").joinpath("movie.html").read_text(encoding="utf-8")
    return (
        template.replace("{{id}}", f"pool-movie-{time.monotonic_ns()}")
        .replace("{{last}}", str(len(frames) - 1))
        .replace("{{size}}", f"-1 -1 {width + 2} {total + 2}")
        .replace("{{width}}", str(width + 2))
        .replace("{{cells}}", cells)
        .replace("{{label}}", label if on_host else "")
        .replace("{{note}}", html.escape(_note(frames[0], on_device, num_steps, num_preemptions)))
        .replace(
            "{{data}}", json.dumps({"boxes": list(boxes), "steps": steps, "side": SIDE}).replace("</", "<\\/")
        )
    )


def _drawn(maps: Iterable[np.ndarray]) -> list[int]:
    """Returns the ids of the blocks that any frame uses, in ascending order, at most MAX_DRAWN."""
    ids: set[int] = set()
    for blocks in maps:
        ids.update(blocks["block_id"][blocks["ref_count"] > 0].tolist())
    return sorted(ids)[:MAX_DRAWN]


def _cells(frame: Frame, wanted: Container[_Block]) -> Iterator[tuple[_Block, str]]:
    """Yields the requested blocks of a frame with their SVG."""
    pool = frame.pool
    for memory, blocks, owners in (
        ("device", pool.blocks, pool.owners),
        ("host", pool.host_blocks, pool.host_owners),
    ):
        by_block: dict[int, list[np.void]] = defaultdict(list)
        for owner in owners:
            by_block[int(owner["block_id"])].append(owner)
        for block in blocks:
            key = memory, int(block["block_id"])
            if key in wanted:
                own = by_block[key[1]]
                title = html.escape("; ".join(map(owner_name, own[:4])) + "; and more" * (len(own) > 4))
                yield key, f"<title>{title}</title>{cell_svg(block, own, pool.block_size)}"


def _moves(output: SchedulerOutput) -> Iterator[tuple[_Block, _Block]]:
    """Yields the source and target of each block that the step swaps or copies."""
    for blocks, source, target in (
        (output.blocks_to_swap_out, "device", "host"),
        (output.blocks_to_swap_in, "host", "device"),
        (output.blocks_to_copy, "device", "device"),
    ):
        for a, b in blocks:
            yield (source, a), (target, b)


def _note(frame: Frame, drawn: list[int], num_steps: int, num_preemptions: int) -> str:
    num_blocks = len(frame.pool.blocks) - 1
    preemptions = f"; {_count(num_preemptions, 'preemption')}" * (num_preemptions > 0)
    shown = f"shows the {len(drawn):,} of {num_blocks:,} blocks that were in use"
    return f"{_count(num_steps, 'step')}; {shown}{preemptions}"


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}" + "s" * (number != 1)
