"""Runs lists of requests to their end: on one engine, or on several side by side."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence

from tqdm import tqdm

from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.interrupt import deferred_interrupt
from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.engine.replicas.placement import Placement
from jax_paged.outputs import RequestOutput

# A list is as slow as its slowest engine: a prefix is at home where no other engine has fewer requests.
_MAX_LAG = 0

# What a step has brought: how many requests got tokens, and the outputs of those that have ended.
_Step = tuple[int, dict[str, RequestOutput]]


class ListRunner:
    """Runs requests to their end, and shows how far they are.

    Args:
        engines: Each runs a share of every list, in a thread of its own if there are several. The caller
            closes them.
    """

    def __init__(self, engines: Sequence[LLMEngine]) -> None:
        self._engines = engines
        self._placement = Placement(len(engines), engines[0].seeds, _MAX_LAG)
        self._request_ids = itertools.count()

    def run(
        self, requests: Sequence[CheckedRequest], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[RequestOutput]:
        """Runs requests to their end; Ctrl-C (between two steps) or an error ends all of them.

        Args:
            requests: One engine of several can run them if all can.
            use_tqdm: As LLM.generate takes it.

        Returns:
            Their outputs, in their order.
        """
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        ids = [f"generate-{next(self._request_ids)}" for _ in requests]
        outputs: dict[str, RequestOutput] = {}
        with (
            deferred_interrupt() as interrupted,
            make_bar(total=len(ids), disable=not use_tqdm, unit="request", dynamic_ncols=True) as bar,
            contextlib.closing(self._steps(dict(zip(ids, requests, strict=True)), interrupted)) as steps,
        ):
            num_tokens, start = 0, time.monotonic()
            for num_changed, ended in steps:
                outputs |= ended
                num_tokens += num_changed
                rate = num_tokens / (time.monotonic() - start)
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                bar.update(len(ended))
        if interrupted.is_set() and len(outputs) < len(ids):
            raise KeyboardInterrupt  # the handler of Ctrl-C has returned, as asyncio's does
        return [outputs[request_id] for request_id in ids]

    def _steps(self, requests: dict[str, CheckedRequest], interrupted: threading.Event) -> Generator[_Step]:
        if len(self._engines) == 1:
            return _steps_of(self._engines[0], requests, interrupted.is_set)
        placed = self._placement.place(list(requests.values()), [(0, 0)] * len(self._engines))
        shares: list[dict[str, CheckedRequest]] = [{} for _ in self._engines]
        for request_id, (replica, request) in zip(requests, placed, strict=True):
            shares[replica][request_id] = request
        failed = threading.Event()
        runs = [
            _steps_of(engine, share, lambda: interrupted.is_set() or failed.is_set())
            for engine, share in zip(self._engines, shares, strict=True)
            if share
        ]
        return _side_by_side(runs, failed)


def _steps_of(
    engine: LLMEngine, requests: dict[str, CheckedRequest], is_over: Callable[[], bool]
) -> Generator[_Step]:
    """Runs requests of one engine to their end, or until it is over; yields what each step has brought.

    No other thread uses the engine meanwhile. However it ends, none of the requests is left in the engine.
    """
    left, added = len(requests), list[str]()
    with engine.exclusive(is_over) as is_held:
        if not is_held:
            return
        try:
            for request_id, request in requests.items():
                engine.add_request(request_id, request)
                added.append(request_id)
            while left and not is_over():
                changed = engine.advance()
                # Others may have been added to the engine by hand.
                own = ((state.group.request_id, state) for state in changed if state.is_finished)
                ended = {i: state.output() for i, state in own if i in requests}
                left -= len(ended)
                yield len(changed), ended
        finally:
            with contextlib.suppress(EngineDeadError):  # it was closed, and has no requests any more
                engine.end_requests(added)


def _side_by_side(runs: Sequence[Generator[_Step]], failed: threading.Event) -> Generator[_Step]:
    """Yields what several runs do, each in a thread of its own.

    Args:
        runs: End once `failed` is set.
        failed: Is set when one of them raises an error, or nobody asks for more; then all end, and the first
            error is raised.
    """
    steps: queue.SimpleQueue[_Step | BaseException | None] = queue.SimpleQueue()

    def take(run: Generator[_Step]) -> None:
        try:
            for step in run:
                steps.put(step)
            steps.put(None)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            steps.put(error)

    threads = [threading.Thread(target=take, args=(run,), name=f"replica {i}") for i, run in enumerate(runs)]
    num_left, error, started = len(threads), None, list[threading.Thread]()
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        while num_left:
            step = steps.get()
            if isinstance(step, tuple):
                yield step
                continue
            num_left -= 1
            if step is not None:
                error = error or step
                failed.set()
    finally:
        failed.set()
        for thread in started:
            thread.join()
    if error is not None:
        raise error
