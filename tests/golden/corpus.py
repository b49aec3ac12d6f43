"""Runs requests through the public API, and notes their outputs and the engine's decisions as JSON.

It imports nothing that belongs to one feature, so that `golden.plain` works in a tree without the others.
"""

import dataclasses
import hashlib
import importlib
import itertools
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_paged import EngineArgs, LLMEngine

BASELINE = Path(__file__).parent / "baseline.json"
# With these, decisions do not depend on time: one step is in flight, in the largest shape of its kind.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "xla",
    "matmul_backend": "xla",
    "max_compile_s": 0,
    "async_scheduling": False,
    "num_scheduler_steps": 1,
    "block_size": 4,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 300,
    "swap_space": 0.01,
}
NUM_DEVICES = 4
# Instructions that change the sums of the programs that XLA compiles.
_INSTRUCTIONS = re.compile(r"\b(avx\w*|fma|f16c|amx\w*|asimd\w*|sve\w*|bf16|i8mm)\b")
_FLOAT = re.compile(r"-?(0x[01]\.[0-9a-f]+p[+-]\d+|inf)|nan")
_TOLERANCE = 1e-3
_MAX_NUMBERS = 64


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, its parameters, and keyword arguments of LLMEngine.add_request."""

    prompt: Any
    params: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Golden:
    """The results of one scenario.

    Args:
        outputs: The output of each request, by its name.
        steps: Digests of the events of each recording, separated by spaces.
    """

    outputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: dict[str, str] = dataclasses.field(default_factory=dict)

    def note(self, name: str, values: Any) -> None:
        """Notes the output of a request, whose name must be new."""
        assert name not in self.outputs, name
        self.outputs[name] = values

    def note_steps(self, name: str, lines: Iterable[str]) -> None:
        """Notes the decisions of a recording."""
        self.steps[name] = " ".join(digest for line in lines if (digest := event_digest(line)))


Scenario = Callable[[Golden], None]


def load_scenarios(names: list[str] | None = None) -> dict[str, Scenario]:
    """Returns the scenarios of these names, in order, or all of them; imports only the modules they need."""
    found = {"plain": importlib.import_module("golden.plain").plain}
    if names != ["plain"]:
        found |= importlib.import_module("golden.features").SCENARIOS
    return {name: found[name] for name in names or found}


def run_scenario(scenario: Scenario) -> dict[str, Any]:
    """Runs a scenario; returns its results as JSON holds them."""
    golden = Golden()
    scenario(golden)
    return json.loads(json.dumps(dataclasses.asdict(golden)))


def make_engine(model: str | Path, **settings: Any) -> LLMEngine:
    """Returns an engine with SETTINGS, changed by `settings`."""
    return LLMEngine(EngineArgs(model=str(model), **(SETTINGS | settings)))


def add(engine: LLMEngine, requests: dict[str, Request]) -> None:
    """Puts requests in the queue."""
    for name, request in requests.items():
        engine.add_request(name, request.prompt, request.params, **request.options)


def finish(engine: LLMEngine) -> dict[str, Any]:
    """Steps an engine until all requests have ended; returns their last outputs by id."""
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return outputs


def run(golden: Golden, engine: LLMEngine, requests: dict[str, Request]) -> None:
    """Runs requests together and notes their outputs."""
    add(engine, requests)
    outputs = finish(engine)
    for name in requests:
        golden.note(name, values_of(outputs.pop(name)))
    for name, output in outputs.items():
        golden.note(name, values_of(output))


def values_of(output: Any) -> dict[str, Any]:
    """Returns what a RequestOutput holds, except times."""
    values: dict[str, Any] = {"prompt": list(output.prompt_token_ids), "cached": output.num_cached_tokens}
    if output.prompt_logprobs is not None:
        values["prompt_logprobs"] = [_logprobs(entry) for entry in output.prompt_logprobs]
    if output.encoder_prompt_token_ids is not None:
        values["encoder_prompt"] = list(output.encoder_prompt_token_ids)
    values["outputs"] = [_completion(completion) for completion in output.outputs]
    return values


def _completion(output: Any) -> dict[str, Any]:
    values = {"tokens": list(output.token_ids), "text": output.text, "finish": output.finish_reason}
    values |= {"stop": output.stop_reason, "cumulative": float(output.cumulative_logprob).hex()}
    if output.logprobs is not None:
        values["logprobs"] = [_logprobs(entry) for entry in output.logprobs]
    if output.captured:
        values["captured"] = {name: array_values(x) for name, x in sorted(output.captured.items())}
    return values


def _logprobs(entry: dict[int, Any] | None) -> Any:
    return entry and [[token, x.rank, float(x.logprob).hex()] for token, x in entry.items()]


def array_values(array: Any) -> dict[str, Any]:
    """Returns an array's shape, some of its numbers, and a digest of all of them if there are more."""
    array = np.asarray(array, np.float32)
    step = math.ceil(array.size / _MAX_NUMBERS)
    values = {"shape": list(array.shape), "numbers": [float(x).hex() for x in array.ravel()[:: max(1, step)]]}
    return values if step <= 1 else values | {"bits": hashlib.sha256(array.tobytes()).hexdigest()[:16]}


def event_digest(line: str) -> str:
    """Returns a digest of one event of a recording; "" for its start.

    Only values count, as the names and the nesting of fields may change. Numbers with a fraction are times
    and log-probabilities, and fields that hold only zeros are those of features that are not in use.
    """
    event = json.loads(line)
    kind = event.pop("event")
    if kind == "start":
        return ""
    values = [event["request_id"]] if kind == "add" else list(event.values())
    fields = [list(_leaves(value)) for value in values]
    text = json.dumps(sorted(json.dumps(field) for field in fields if any(field)))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return itertools.chain.from_iterable(map(_leaves, items))
    return [] if value is None or isinstance(value, float) else [value]


def key() -> dict[str, Any]:
    """Returns what the bits of float32 sums depend on: processor, cores, and versions of JAX."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return {
        "machine": platform.machine(),
        "instructions": sorted({match[0] for match in _INSTRUCTIONS.finditer(flags.lower())}),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": len(jax.devices()),
        "jax": jax.__version__,
        "jaxlib": importlib.import_module("jaxlib").__version__,
    }


def differences(want: Any, got: Any, *, exact: bool, path: str = "") -> list[str]:
    """Returns where two results differ: floats to the bit if `exact`, else by a relative 1e-3."""
    if isinstance(want, dict) and isinstance(got, dict):
        names = [*want, *(name for name in got if name not in want)]
        pairs = [(f"{path}.{name}", want.get(name), got.get(name)) for name in names]
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(want, got, strict=True))]
    else:
        same = want == got or (not exact and (path.endswith(".bits") or _are_close(want, got)))
        return [] if same else [f"{path}: {_shown(want, got)}"]
    return [found for name, a, b in pairs for found in differences(a, b, exact=exact, path=name)]


def _are_close(want: Any, got: Any) -> bool:
    if not (
        isinstance(want, str) and isinstance(got, str) and _FLOAT.fullmatch(want) and _FLOAT.fullmatch(got)
    ):
        return False
    return math.isclose(float.fromhex(want), float.fromhex(got), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _shown(want: Any, got: Any) -> str:
    return f"{str(got)[:300]!r}; in the baseline: {str(want)[:300]!r}"
