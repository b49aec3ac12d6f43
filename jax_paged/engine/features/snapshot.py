"""The state of an engine, saved and restored: resumed output is what it would have been, bit for bit."""

import dataclasses
import json
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

# It tells NumPy what bfloat16 is.
import ml_dtypes  # noqa: F401
import numpy as np
from safetensors.numpy import load_file, save_file

from jax_paged.core.features.snapshot import (
    kept_blocks,
    restore_group,
    restore_scheduler,
    values_of_group,
    values_of_scheduler,
)
from jax_paged.engine.features.interactive.request_edits import check_keeps_no_state
from jax_paged.engine.features.recording import check_not_recorded
from jax_paged.engine.output_processor import RequestState
from jax_paged.errors import ArgumentError, check

if TYPE_CHECKING:
    from jax_paged.core.scheduler import Scheduler
    from jax_paged.engine.engine_core import StepLoop
    from jax_paged.engine.llm_engine import LLMEngine

_FORMAT, _FILE = 1, "state.json"
# Settings that blocks and requests of one engine need in another.
_SETTINGS = (
    *("architecture", "dtype", "vocab_size", "max_model_len", "block_size", "num_blocks", "num_swap_blocks"),
    *("cache_groups", "max_num_seqs", "max_num_batched_tokens", "max_logprobs", "eos_token_ids"),
    *("decoder_start_token_id", "enable_prefix_caching", "scheduling_policy"),
    *("matmul_backend", "kv_cache_dtype"),
)


@dataclasses.dataclass(frozen=True)
class EngineState:
    """An engine between two steps.

    Args:
        values: What JSON can hold: arguments, requests, block tables, queues, texts, seeds.
        arrays: What the blocks hold that somebody may still read, and the weights if they are kept by value.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def __repr__(self) -> str:
        size = sum(array.nbytes for array in self.arrays.values()) / 2**20
        requests = self.values["requests"]
        return (
            f"<state of {self.values['args']['model']}: {len(requests)} requests, arrays of {size:.1f} MiB>"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a folder with state.json and a safetensors file; of a state there before, nothing is left.

        The old state is whole until the new one is.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"arrays-{uuid.uuid4().hex}.safetensors"
        save_file({key: np.ascontiguousarray(array) for key, array in self.arrays.items()}, folder / name)
        partial = folder / f"{_FILE}.partial"
        partial.write_text(json.dumps({**self.values, "arrays": name}), encoding="utf-8")
        partial.replace(folder / _FILE)
        for file in folder.glob("arrays-*.safetensors"):
            if file.name != name:
                file.unlink()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` has written.

        Raises:
            ValueError: If there is no state, or one of another version.
        """
        file = Path(path) / _FILE
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            _check_format(values)
            return cls(values, load_file(file.parent / values.pop("arrays")))
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} is not the state of an engine: {error!r}") from error


def take(engine: "LLMEngine", loop: "StepLoop", *, with_weights: bool) -> EngineState:
    """Returns the state of an engine; see LLMEngine.state."""
    loop.settle()
    if loop.is_planned:
        raise RuntimeError("a plan of schedule() has not run; run it, or step(), before state()")
    scheduler = loop.scheduler
    states = list(dict.fromkeys([*loop.requests.values(), *loop.changed]))
    asked = [name for state in states for name in state.group.sampling_params.hook_args or ()]
    captured = sorted(engine.config.capturing & set(asked))
    aspect, allowed = "the running requests with", "none because an engine state does not hold them"
    check(not captured, "hook_args", captured, allowed, aspect="the capturing hooks in")
    asked = [name for state in states for name in state.group.sampling_params.extra_args or ()]
    stateful = sorted(engine.config.stateful & set(asked))
    check(not stateful, "extra_args", stateful, allowed, aspect="the stateful logits processors in")
    adapted = [s.group.request_id for s in states if s.group.adapter or s.group.prompt_embeds]
    check(not adapted, "lora_request", adapted, allowed, aspect=f"{aspect} `prompt_embeds` or")
    check_keeps_no_state(loop, "state()", engine.config.architecture, "an engine state does not hold them")
    pictured = [s.group.request_id for s in states if s.group.sequences[0].stand_ins]
    check(not pictured, "multi_modal_data", pictured, allowed, aspect=aspect)
    requests = [values_of_group(scheduler, s.group) | {"text": s.values()} for s in states]
    weights, packing = engine.executor.fingerprint()
    values = {
        "format": _FORMAT,
        "args": dataclasses.asdict(engine.args) | {"num_gpu_blocks_override": engine.config.num_blocks},
        "settings": _settings(engine, loop.make_scheduler()),
        "weights": {"fingerprint": weights, "packing": packing, "by_value": with_weights},
        "time": time.monotonic(),
        "seeds": engine.seeds.getstate(),
        "num_names": engine.num_names,
        "weight_version": [loop.weight_version, loop.num_weight_updates],
        "scheduler": values_of_scheduler(scheduler),
        "requests": requests,
        "changed": [i for i, state in enumerate(states) if state in loop.changed],
    }
    arrays = engine.executor.read_memory(*kept_blocks(scheduler), with_weights=with_weights)
    return EngineState(json.loads(json.dumps(values)), arrays)


def load(engine: "LLMEngine", loop: "StepLoop", state: EngineState) -> None:
    """Gives an idle engine the state of another; see LLMEngine.load_state."""
    values = state.values
    _check_format(values)
    check_not_recorded(loop)
    if loop.has_unfinished or loop.scheduler.block_manager.pinned:
        raise RuntimeError("requests are running or prefixes pinned; load a state before them")
    scheduler = loop.make_scheduler()
    ours = _settings(engine, scheduler)
    for name, value in values["settings"].items():
        if value != ours[name]:
            raise ArgumentError("state", value, f"that of the engine, {ours[name]!r}", aspect=f"{name} in")
    _check_weights(values["weights"], *engine.executor.fingerprint())
    values = json.loads(json.dumps(values))  # what is restored grows, and the state may be loaded again
    shift_s = time.monotonic() - values["time"]
    groups = [restore_group(scheduler, entry, shift_s) for entry in values["requests"]]
    try:
        restore_scheduler(scheduler, values["scheduler"])
    except AssertionError as error:
        raise ValueError(f"the state contradicts itself: {error}") from error
    blocks = kept_blocks(scheduler)
    engine.executor.write_memory(*blocks, state.arrays, with_weights=values["weights"]["by_value"])
    texts = zip(groups, values["requests"], strict=True)
    grammar_of = engine.input_processor.grammar_of
    states = [
        RequestState.of_values(group, entry["text"], engine.tokenizer, grammar_of(group.sampling_params))
        for group, entry in texts
    ]
    version, internal, gauss = values["seeds"]
    engine.seeds.setstate((version, tuple(internal), gauss))
    engine.num_names = values["num_names"]
    loop.weight_version, loop.num_weight_updates = values.get("weight_version", ("0", 0))
    loop.scheduler = scheduler
    loop.requests.update({s.group.request_id: s for s in states if not s.is_finished})
    loop.changed |= dict.fromkeys(states[i] for i in values["changed"])


def _settings(engine: "LLMEngine", scheduler: "Scheduler") -> dict[str, Any]:
    """Returns what has to be the same in an engine that goes on, as JSON holds it."""
    values = dataclasses.asdict(engine.config)
    own = {
        "eos_token_ids": sorted(values["eos_token_ids"]),
        "scheduler": [type(scheduler).__name__, getattr(scheduler.policy, "__name__", scheduler.policy)],
    }
    return json.loads(json.dumps({name: values[name] for name in _SETTINGS} | own))


def _check_format(values: dict[str, Any]) -> None:
    if values.get("format") != _FORMAT:
        raise ArgumentError("state", values.get("format"), repr(_FORMAT), aspect="the format of")


def _check_weights(kept: dict[str, Any], fingerprint: str, packing: str) -> None:
    if kept["packing"] != packing and (kept["by_value"] or kept["fingerprint"] != fingerprint):
        raise ValueError(
            "the weights in `state` are packed for another processor. Take the state on this one, or from an "
            'engine with matmul_backend="xla", which does not pack weights'
        )
    if not kept["by_value"] and kept["fingerprint"] != fingerprint:
        remedy = ". Restore with the model whose state it is, or take the state with weights=True"
        found, allowed = kept["fingerprint"][:16], f"that of the engine, {fingerprint[:16]}"
        raise ArgumentError(
            "state", found, allowed, aspect="the fingerprint of the weights in", remedy=remedy
        )
