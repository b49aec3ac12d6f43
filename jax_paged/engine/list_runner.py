"""ListRunner: runs lists of requests to their end, on one engine or on several engines in parallel."""

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

# Requests with a common prefix stay on one engine only if no other engine has less work (see Placement). A
# list takes as long as its slowest engine, so equal work matters more than cached prefixes.
_MAX_LAG = 0

# Result of a step: the number of output tokens, and the outputs of ended requests, by id.
_Step = tuple[int, dict[str, RequestOutput]]


class ListRunner:
    """Runner of lists of requests, with a progress bar.

    Args:
        engines: The engines. Each of them runs a share of every list; several engines run in a thread each.
            The caller closes them.
    """

    def __init__(self, engines: Sequence[LLMEngine]) -> None:
        self._engines = engines
        self._placement = Placement(len(engines), engines[0].seeds, _MAX_LAG)
        self._request_ids = itertools.count()

    def run(
        self, requests: Sequence[CheckedRequest], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[RequestOutput]:
        """Runs requests to their end. An error, or Ctrl-C between two steps, aborts all of them.

        Args:
            requests: The requests, checked by any of the engines.
            use_tqdm: Whether to show a progress bar, or a function that makes one and is called like tqdm.

        Returns:
            The outputs, in the order of the requests.
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
            for num_new_tokens, ended in steps:
                outputs |= ended
                num_tokens += num_new_tokens
                rate = num_tokens / (time.monotonic() - start)
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                bar.update(len(ended))
        if interrupted.is_set() and len(outputs) < len(ids):
            raise KeyboardInterrupt  # some handlers of Ctrl-C, such as asyncio's, raise no error
        return [outputs[request_id] for request_id in ids]

    def _steps(self, requests: dict[str, CheckedRequest], interrupted: threading.Event) -> Generator[_Step]:
        if len(self._engines) == 1:
            return _steps_of(self._engines[0], requests, interrupted.is_set)
        # A list usually begins when the engines are idle, with no waiting and no running requests.
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
    """Runs requests on one engine to their end; yields the result of each step.

    No other thread can use the engine meanwhile. None of the requests is left in the engine afterwards.

    Args:
        engine: The engine.
        requests: The requests, by id.
        is_over: Called before each step. If it returns True, the run stops early.
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
                num_before = engine.num_generated_tokens
                changed = engine.advance()
                # The engine may also run requests that the user has added with add_request.
                finished = ((state.group.request_id, state) for state in changed if state.is_finished)
                ended = {i: state.output() for i, state in finished if i in requests}
                left -= len(ended)
                yield engine.num_generated_tokens - num_before, ended
        finally:
            with contextlib.suppress(EngineDeadError):  # a closed engine has no requests
                engine.end_requests(added)


def _side_by_side(runs: Sequence[Generator[_Step]], failed: threading.Event) -> Generator[_Step]:
    """Executes several runs in parallel, each in its own thread; yields the step results of all of them.

    The first error of a run is raised after all runs have ended.

    Args:
        runs: The runs; each of them ends after `failed` is set.
        failed: Set when a run raises an error, or when the caller stops iterating.
    """
    steps: queue.SimpleQueue[_Step | BaseException | None] = queue.SimpleQueue()

    def take(run: Generator[_Step]) -> None:
        try:
            for step in run:
                steps.put(step)
            steps.put(None)
        except BaseException as error:  # a panic in a Rust library is not an Exception
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
