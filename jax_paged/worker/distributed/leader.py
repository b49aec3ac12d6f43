"""The leader of an engine with several processes: it announces each program to the other processes."""

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_paged.worker.compilation.compiler import CompiledPrograms
from jax_paged.worker.compilation.programs import DeviceInputs, Program, StepState
from jax_paged.worker.distributed.channel import Channel
from jax_paged.worker.distributed.process_group import WEIGHTS, arrays_with_ids
from jax_paged.worker.pipeline.stage_links import RemoteArray, StageLinks


class Followers:
    """Connections from the leader to all followers, shared by the engines of a pipeline.

    Args:
        channels: Channels to the followers, in order of their ranks.
        fail: Called with the reason when a follower is lost; may be called from any thread.
        links: Links to the other pipeline stages; None without pipeline stages.
    """

    def __init__(
        self, channels: list[Channel], fail: Callable[[str], None], links: StageLinks | None = None
    ) -> None:
        self._channels, self._fail, self.links = channels, fail, links
        self._compiled: list[set[str]] = [set() for _ in channels]  # names of compiled programs, per follower
        self._broadcast_lock = threading.Lock()

    def broadcast(self, header: Any, arrays: list[np.ndarray]) -> None:
        """Sends a message to all followers; they receive the messages of all threads in the same order."""
        with self._broadcast_lock:
            for channel in self._channels:
                channel.send(header, arrays)

    def min_over_processes(self, value: int) -> int:
        """Returns the minimum of the values that all processes have passed."""
        for rank, channel in enumerate(self._channels, 1):
            value = min(value, self._receive(rank, channel)[0]["min"])
        self.broadcast(value, [])
        return value

    def have_compiled(self, program: Program) -> bool:
        """Returns True if all followers have compiled a program."""
        return all(str(program) in names for names in self._compiled)

    def wait(self) -> None:
        """Waits until all followers are ready, and then watches them in background threads."""
        for rank, channel in enumerate(self._channels, 1):
            while "ready" not in (message := self._receive(rank, channel)[0]):
                self._compiled[rank - 1].add(message["compiled"])
            threading.Thread(target=self._watch, args=(rank, channel), daemon=True).start()

    def _receive(self, rank: int, channel: Channel) -> tuple[dict[str, Any], list[np.ndarray]]:
        try:
            message, arrays = channel.receive()
        except TimeoutError as error:
            raise RuntimeError(f"worker {rank} has stalled, or its host is gone: {error}") from error
        except OSError as error:
            raise RuntimeError(f"worker {rank} has ended: {error}") from error
        if "error" in message:
            raise ValueError(f"worker {rank}: {message['error']}")
        return message, arrays

    def _watch(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                message, arrays = self._receive(rank, channel)
                if "compiled" in message:
                    self._compiled[rank - 1].add(message["compiled"])
                else:
                    self._forward(message, arrays)
        except (RuntimeError, ValueError) as error:
            self._fail(str(error))

    def _forward(self, message: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Forwards arrays to the pipeline stage they are addressed to."""
        stage, engine = message["stage"], message["engine"]
        if stage == 0:
            assert self.links is not None, (
                "a message for stage 0 arrived in an engine without pipeline stages"
            )
            self.links.deliver(engine, arrays)
        else:
            try:
                self._channels[stage - 1].send(message, arrays)
            except OSError as error:
                raise RuntimeError(f"worker {stage} has ended: {error}") from error


class Leader:
    """The ProcessGroup of the first process: it announces each program to the followers and then runs it.

    A message contains the engine, the name of a program or function, and its arguments. An array on the
    devices is represented by an id, which the leader and the followers assign in the same order: first the
    arrays that exist at the start, then each returned array. Arrays in host memory are sent with the message.

    Args:
        followers: The connections to the other processes.
        engine: Index of the engine in a pipeline.
    """

    def __init__(self, followers: Followers, engine: int = 0) -> None:
        self._followers, self.engine, self.links = followers, engine, followers.links
        self.min_over_processes, self.is_ready = followers.min_over_processes, followers.have_compiled
        self._weights: list[Any] = []
        self._ids: dict[int, tuple[int, Any]] = {}  # Python id -> (id in messages, weak reference)
        self._next = 0
        self._dropped: collections.deque[int] = collections.deque()  # ids in messages of deleted arrays

    def in_all_processes[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Returns a function that runs in every process; see ProcessGroup."""

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            self._announce(name, args)
            return self._assign_ids(function(*args, **kwargs))

        return run

    def begin(
        self, compiled: CompiledPrograms, run: Callable[..., Any], weights: list[Any], persistent_arrays: Any
    ) -> Callable[..., Any]:
        """Waits for all processes, and returns a function that runs programs in all of them."""
        self._weights = weights
        self._assign_ids(persistent_arrays)
        if self.engine == 0:
            self._followers.wait()

        def run_in_all_processes(program: Program, *args: Any) -> Any:
            self._announce(str(program), args)
            return self._assign_ids(run(program, *args))

        return run_in_all_processes

    def _announce(self, name: str, args: tuple[Any, ...]) -> None:
        arrays: list[np.ndarray] = []
        encoded_args = [self._encode(arg, arrays) for arg in args]
        # The length is read first because arrays may be deleted at any time, in any thread.
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._followers.broadcast([self.engine, name, encoded_args, dropped], arrays)

    def _encode(self, arg: Any, arrays: list[np.ndarray]) -> Any:
        """Returns the representation of an argument in a message.

        Args:
            arg: The argument.
            arrays: List to which host arrays are added that are sent with the message.

        Returns:
            WEIGHTS, an id, a list of representations, {"state": ...} for a StepState, {"inputs": ...} for
            DeviceInputs, or None for the next array sent with the message.
        """
        if arg is self._weights:
            return WEIGHTS
        if isinstance(arg, StepState | DeviceInputs):
            values = ((f.name, getattr(arg, f.name)) for f in dataclasses.fields(arg))
            fields = {name: self._encode(x, arrays) for name, x in values if x is not None}
            return {"state" if isinstance(arg, StepState) else "inputs": fields}
        if isinstance(arg, RemoteArray):
            # Without this wait, the followers would have to wait for the array, and messages for other
            # engines would be delayed.
            arg.wait()
        first = arg[0] if isinstance(arg, list) and arg else arg
        if isinstance(first, jax.Array | RemoteArray):
            return self._ids[id(first)][0]
        if isinstance(arg, list):
            return [self._encode(x, arrays) for x in arg]
        arrays.append(np.asarray(arg))
        return None

    def _assign_ids[T](self, result: T) -> T:
        for value in arrays_with_ids(result):
            array = value[0] if isinstance(value, list) else value
            # A stage returns the arrays that only other stages change, such as token counts, as the same
            # objects. The old id of such an array is dropped.
            if id(array) in self._ids:
                self._dropped.append(self._ids[id(array)][0])
            self._ids[id(array)] = self._next, weakref.ref(array, self._forget(id(array)))
            self._next += 1
        return result

    def _forget(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._dropped.append(self._ids.pop(key)[0])
