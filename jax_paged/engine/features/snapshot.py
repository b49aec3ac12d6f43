"""The state of an engine, saved and restored: resumed output is what it would have been, bit for bit."""

import dataclasses
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any, Self

# It tells NumPy what bfloat16 is.
import ml_dtypes  # noqa: F401
import numpy as np
from safetensors.numpy import load_file, save_file

from jax_paged.checks import check
from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.features.snapshot import (
    kept_blocks,
    restore_group,
    restore_scheduler,
    values_of_group,
    values_of_scheduler,
)
from jax_paged.core.scheduler import Scheduler
from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.features.recording import check_not_recorded
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.engine.output_processor import RequestState

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
    def of(cls, state: "EngineState | str | os.PathLike[str]") -> "EngineState":
        """Returns a state as it is, or the state saved in a folder."""
        return state if isinstance(state, EngineState) else cls.load(state)

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


class Snapshots:
    """Takes and loads states of an engine.

    Args:
        core: Runs the requests.
        inputs: Compiles the grammars of requests that are loaded.
        args: The arguments that the engine was made from.
    """

    def __init__(self, core: EngineCore, inputs: InputProcessor, args: EngineArgs) -> None:
        self._core = core
        self._inputs = inputs
        self._args = args

    def take(self, *, with_weights: bool) -> EngineState:
        """Returns the state of the engine; see LLMEngine.state."""
        core, config = self._core, self._core.config
        core.settle()
        if core.planned is not None:
            raise RuntimeError("a plan of schedule() has not run; run it, or step(), before state()")
        scheduler = core.scheduler
        states = list(dict.fromkeys([*core.requests.values(), *core.changed]))
        self._check_fits(states)
        requests = [values_of_group(scheduler, s.group) | {"text": s.values()} for s in states]
        weights, packing = core.executor.fingerprint()
        values = {
            "format": _FORMAT,
            "args": dataclasses.asdict(self._args) | {"num_gpu_blocks_override": config.num_blocks},
            "settings": self._settings(core.make_scheduler()),
            "weights": {"fingerprint": weights, "packing": packing, "by_value": with_weights},
            "time": time.monotonic(),
            "seeds": core.seeds.getstate(),
            "num_names": core.num_names,
            "weight_version": [core.weight_version, core.num_weight_updates],
            "scheduler": values_of_scheduler(scheduler),
            "requests": requests,
            "changed": [i for i, state in enumerate(states) if state in core.changed],
        }
        arrays = core.executor.read_memory(*kept_blocks(scheduler), with_weights=with_weights)
        return EngineState(json.loads(json.dumps(values)), arrays)

    def load(self, state: EngineState) -> None:
        """Gives the idle engine the state of another; see LLMEngine.load_state."""
        core, values = self._core, state.values
        _check_format(values)
        check_not_recorded(core)
        if core.has_unfinished or core.scheduler.block_manager.pinned:
            raise RuntimeError("requests are running or prefixes pinned; load a state before them")
        scheduler = core.make_scheduler()
        ours = self._settings(scheduler)
        for name, value in values["settings"].items():
            if value != ours[name]:
                raise ValueError(f"{name} of the state is {value!r}; allowed: the engine's, {ours[name]!r}")
        _check_weights(values["weights"], *core.executor.fingerprint())
        values = json.loads(json.dumps(values))  # what is restored grows, and the state may be loaded again
        shift_s = time.monotonic() - values["time"]
        groups = [restore_group(scheduler, entry, shift_s) for entry in values["requests"]]
        try:
            restore_scheduler(scheduler, values["scheduler"])
        except AssertionError as error:
            raise ValueError(f"the state contradicts itself: {error}") from error
        blocks = kept_blocks(scheduler)
        core.executor.write_memory(*blocks, state.arrays, with_weights=values["weights"]["by_value"])
        texts = zip(groups, values["requests"], strict=True)
        grammar_of = self._inputs.grammar_of
        states = [
            RequestState.of_values(group, entry["text"], core.tokenizer, grammar_of(group.sampling_params))
            for group, entry in texts
        ]
        version, internal, gauss = values["seeds"]
        core.seeds.setstate((version, tuple(internal), gauss))
        core.num_names = values["num_names"]
        core.weight_version, core.num_weight_updates = values.get("weight_version", ("0", 0))
        core.scheduler = scheduler
        core.requests.update({s.group.request_id: s for s in states if not s.is_finished})
        core.changed |= dict.fromkeys(states[i] for i in values["changed"])

    def _check_fits(self, states: list[RequestState]) -> None:
        """Checks that a state can hold the requests and what the model keeps of them."""
        config = self._core.config
        names = [name for state in states for name in state.group.sampling_params.hook_args or ()]
        found, allowed = sorted(config.capturing & set(names)), "none that capture, as a state has no room"
        check(not found, "the hooks of running requests", found, allowed)
        names = [name for state in states for name in state.group.sampling_params.extra_args or ()]
        found, allowed = sorted(config.stateful & set(names)), "none that keep a state of their own"
        check(not found, "the logits processors of running requests", found, allowed)
        found = [s.group.request_id for s in states if s.group.adapter or s.group.prompt_embeds]
        allowed = "none, as a state has no room for adapters and vectors"
        check(not found, "the running requests with adapters or prompt_embeds", found, allowed)
        why = "these have no room in an engine's state"
        self._core.check_not_recurrent("the model", config.architecture, why)
        found = [s.group.request_id for s in states if s.group.sequences[0].stand_ins]
        allowed = "none, as a state has no room for them"
        check(not found, "the running requests with images", found, allowed)

    def _settings(self, scheduler: Scheduler) -> dict[str, Any]:
        """Returns the settings that have to be the same in the engine that goes on, as JSON holds them."""
        values = dataclasses.asdict(self._core.config)
        policy = scheduler.policy
        special = {
            "eos_token_ids": sorted(values["eos_token_ids"]),
            "scheduler": [type(scheduler).__name__, getattr(policy, "__name__", policy)],
        }
        return json.loads(json.dumps({name: values[name] for name in _SETTINGS} | special))


def _check_format(values: dict[str, Any]) -> None:
    if values.get("format") != _FORMAT:
        raise ValueError(f"the state's format is {values.get('format')!r}; allowed: {_FORMAT}")


def _check_weights(kept: dict[str, Any], fingerprint: str, packing: str) -> None:
    if kept["packing"] != packing and (kept["by_value"] or kept["fingerprint"] != fingerprint):
        raise ValueError(
            "the state's weights are packed for another processor; allowed: this one's, or weights that are "
            'not packed, of an engine with matmul_backend="xla"'
        )
    if not kept["by_value"] and kept["fingerprint"] != fingerprint:
        raise ValueError(
            f"the weights' fingerprint is {fingerprint[:16]}; allowed: the state's, "
            f"{kept['fingerprint'][:16]}. Restore with the model whose state it is, or take the state with "
            "weights=True"
        )
