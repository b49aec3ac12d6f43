"""The loop of an engine's process: scenarios come in as lines of JSON, tokens and their times go out.

Runs on every engine's own Python (3.11 or newer) and needs nothing but its standard library.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from serving.workloads import Request

# Adds the request of an index; runs a step and returns the indices that got tokens, with the tokens.
Add = Callable[[int, Request], None]
Step = Callable[[], Iterable[tuple[int, list[int]]]]

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
POOL_GIB = 1  # the least that vLLM and OpenVINO can be given
OUR_POOL_BYTES = 2**29  # all blocks are touched at the start; this many hold every scenario


@dataclass(frozen=True)
class Settings:
    """What an engine is made from.

    Args:
        model: The checkpoint's folder.
        dtype: "float32" or "bfloat16".
        arguments: Further arguments of the engine's own.
    """

    model: str
    dtype: str
    arguments: dict[str, Any]


@dataclass
class Answer:
    """What became of one request.

    Args:
        output: Its token ids; text, of an HTTP server that returns no ids.
        num_tokens: How many tokens it got.
        times: When each piece of the output came, in seconds from the start of the scenario.
    """

    output: list[int] | str
    num_tokens: int
    times: list[float]


def drive(requests: list[Request], add: Add, step: Step) -> list[Answer]:
    """Runs requests through an engine that is stepped by hand, each from its arrival on."""
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


def main(make: Callable[[Settings], Callable[[list[Request], bool], list[Answer]]], version: str) -> None:
    """Serves scenarios until the standard input ends.

    Args:
        make: Makes the engine, ready to be measured. It is called with requests, and whether prefixes
            shared among them are to be cached. No call may find the prefixes of an earlier one.
        version: Of the engine.
    """
    # Whatever the engine prints goes to the standard error; the standard output is for answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run = make(Settings(**json.loads(sys.argv[1])))
    run([Request([300] * 8, 4)], False)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        requests = [Request(**request) for request in message["requests"]]
        found = run(requests, message["prefix_caching"])
        print(json.dumps([asdict(answer) for answer in found]), file=answers, flush=True)
