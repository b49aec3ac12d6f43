"""Main loop of an engine's process: reads scenarios as lines of JSON, writes tokens and their times.

It runs in the environment of each engine (Python 3.11 or newer) and uses the standard library only.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from serving.workloads import Request

# Add submits the request with an index. Step runs a step and returns pairs of index and new tokens.
Add = Callable[[int, Request], None]
Step = Callable[[], Iterable[tuple[int, list[int]]]]

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
POOL_GIB = 1  # the minimum for vLLM and OpenVINO
OUR_POOL_BYTES = 2**29  # enough for every scenario; jax-paged touches all blocks at the start


@dataclass(frozen=True)
class Settings:
    """Settings of an engine.

    Args:
        model: Checkpoint folder.
        dtype: "float32" or "bfloat16".
        arguments: Further arguments of the engine.
    """

    model: str
    dtype: str
    arguments: dict[str, Any]


@dataclass
class Answer:
    """Result of one request.

    Args:
        output: Token ids; or text, if a server returned no token ids.
        num_tokens: Number of output tokens.
        times: Time of each part of the output, counted from the start of the scenario (seconds).
    """

    output: list[int] | str
    num_tokens: int
    times: list[float]


class Engine(ABC):
    """An engine in its process, created from its settings."""

    @abstractmethod
    def __call__(self, requests: list[Request], prefix_caching: bool) -> list[Answer]:
        """Runs requests, which must not use prefixes of an earlier call.

        Args:
            requests: The requests of a scenario.
            prefix_caching: Whether to cache the prefixes that the requests have in common.
        """

    def settle(self) -> None:  # noqa: B027
        """Waits until the engine has its full speed. Most engines have it when they answer."""


def drive(requests: list[Request], add: Add, step: Step) -> list[Answer]:
    """Steps an engine until all requests have finished; each request is added at its arrival time."""
    outputs: list[list[int]] = [[] for _ in requests]
    times: list[list[float]] = [[] for _ in requests]
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].arrival_s)
    num_running = 0
    start = time.perf_counter()
    while waiting or num_running:
        while waiting and requests[waiting[0]].arrival_s <= time.perf_counter() - start:
            add(waiting[0], requests[waiting[0]])
            num_running += 1
            del waiting[0]
        if not num_running:
            time.sleep(max(0.0, requests[waiting[0]].arrival_s - (time.perf_counter() - start)))
            continue
        for i, tokens in step():
            now = time.perf_counter() - start
            outputs[i] += tokens
            times[i] += [now] * len(tokens)
            num_running -= len(outputs[i]) == requests[i].max_tokens
    return [Answer(tokens, len(tokens), at) for tokens, at in zip(outputs, times, strict=True)]


def main(make: Callable[[Settings], Engine], version: str) -> None:
    """Runs scenarios until standard input ends.

    Args:
        make: Returns an engine that can answer.
        version: Version of the engine.
    """
    # The output of the engine goes to standard error, because standard output is only for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = make(Settings(**json.loads(sys.argv[1])))
    engine([Request([300] * 8, 4)], False)
    print(json.dumps({"answers": True}), file=answers, flush=True)
    engine.settle()
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        requests = [Request(**request) for request in message["requests"]]
        found = engine(requests, message["prefix_caching"])
        print(json.dumps([asdict(answer) for answer in found]), file=answers, flush=True)
