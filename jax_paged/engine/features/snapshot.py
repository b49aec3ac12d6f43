"""Engine snapshots: a restored engine continues its requests with bitwise identical output."""

import dataclasses
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any, Self

# Importing ml_dtypes registers bfloat16 with NumPy.
import ml_dtypes  # noqa: F401
import numpy as np
from safetensors.numpy import load_file, save_file

from jax_paged.core.codec import FORMAT, check_format
from jax_paged.core.features.snapshot import (
    group_to_json,
    kept_blocks,
    restore_group,
    restore_scheduler,
    scheduler_to_json,
)
from jax_paged.core.scheduler import Scheduler
from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.feature import EngineFeature
from jax_paged.engine.features.recording import check_not_recorded
from jax_paged.engine.output_processor import RequestState
from jax_paged.errors import ArgumentError, check

_FILE = "state.json"
# Settings that must be equal in two engines if one is to continue the requests of the other.
_SETTINGS = (
    *("architecture", "dtype", "vocab_size", "max_model_len", "block_size", "num_blocks", "num_swap_blocks"),
    *("cache_groups", "max_num_seqs", "max_num_batched_tokens", "max_logprobs", "eos_token_ids"),
    *("decoder_start_token_id", "enable_prefix_caching", "scheduling_policy"),
    *("matmul_backend", "kv_cache_dtype"),
)


@dataclasses.dataclass(frozen=True)
class EngineState:
    """State of an engine between two steps.

    Args:
        values: JSON values: engine arguments, requests, block tables, queues, texts, seeds.
        arrays: Contents of the blocks that are still in use, and the weights if the state includes them.
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
        """Writes the state to a folder, as state.json and a safetensors file.

        An older state in the folder stays valid until the new one is complete, and is then removed.
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
        """Returns `state` itself, or the state that is saved in the given folder."""
        return state if isinstance(state, EngineState) else cls.load(state)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a state that `save` has written.

        Raises:
            ValueError: If the folder contains no state, or a state of another format version.
        """
        file = Path(path) / _FILE
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            check_format("path", values.get("format"))
            return cls(values, load_file(file.parent / values.pop("arrays")))
        except (OSError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"{file} is not a valid engine state: {error!r}") from error


class Snapshots(EngineFeature):
    """Methods of LLMEngine that save and load the engine's state."""

    def state(self, *, weights: bool = False) -> EngineState:
        """Returns the state of the engine. `LLM.restore` and `load_state` continue from it.

        Args:
            weights: Whether the state includes the weights. Without them it contains only their fingerprint,
                and the engine that loads the state must serve the same weights.

        Raises:
            ValueError: If a request or the model uses a feature that a state can't hold.
            RuntimeError: If a planned step has not run.
        """
        core, config = self._core, self._core.config
        core.check_can_run()
        core.wait_for_steps()
        if core.planned is not None:
            raise RuntimeError("the plan of schedule() has not run; call run() or step() before state()")
        scheduler = core.scheduler
        states = list(dict.fromkeys([*core.requests.values(), *core.changed]))
        _check_fits(core, states)
        requests = [group_to_json(scheduler, s.group) | {"text": s.values()} for s in states]
        fingerprint, packing = core.executor.fingerprint()
        values = {
            "format": FORMAT,
            "args": dataclasses.asdict(self.args) | {"num_gpu_blocks_override": config.num_blocks},
            "settings": _settings(core, core.make_scheduler()),
            "weights": {"fingerprint": fingerprint, "packing": packing, "by_value": weights},
            "time": time.monotonic(),
            "seeds": core.seeds.getstate(),
            "num_names": core.num_names,
            "weight_version": [core.weight_version, core.num_weight_updates],
            "scheduler": scheduler_to_json(scheduler),
            "requests": requests,
            "changed": [i for i, state in enumerate(states) if state in core.changed],
        }
        arrays = core.executor.read_memory(*kept_blocks(scheduler), with_weights=weights)
        return EngineState(json.loads(json.dumps(values)), arrays)

    def load_state(self, state: EngineState | str | os.PathLike[str]) -> None:
        """Continues from a state, or from the folder of a saved state, with bitwise identical tokens.

        With async scheduling, the steps in flight end before a state is taken. This may change which requests
        are preempted later. Tokens then stay the same, but log-probabilities may differ in their last digits.

        Raises:
            ValueError: If the state belongs to another model, other weights, an engine with other limits or
                another scheduling policy, or another format version.
            RuntimeError: If requests are running, prefixes are pinned, or the engine is being recorded.
        """
        core = self._core
        core.check_can_run()
        state = EngineState.of(state)
        values = state.values
        check_format("state", values.get("format"))
        check_not_recorded(core)
        if core.has_work or core.scheduler.block_manager.pinned:
            raise RuntimeError("requests are running or prefixes are pinned; end and unpin all of them first")
        scheduler = core.make_scheduler()
        ours = _settings(core, scheduler)
        for name, value in values["settings"].items():
            if value != ours[name]:
                allowed = f"{ours[name]!r} as in this engine"
                raise ArgumentError("state", value, allowed, aspect=f"{name} in")
        _check_weights(values["weights"], *core.executor.fingerprint())
        # Copied because restored values are modified, and the state may be loaded again.
        values = json.loads(json.dumps(values))
        shift_s = time.monotonic() - values["time"]
        groups = [restore_group(scheduler, entry, shift_s) for entry in values["requests"]]
        try:
            restore_scheduler(scheduler, values["scheduler"])
        except AssertionError as error:
            raise ValueError(f"the state is inconsistent: {error}") from error
        blocks = kept_blocks(scheduler)
        core.executor.write_memory(*blocks, state.arrays, with_weights=values["weights"]["by_value"])
        texts = zip(groups, values["requests"], strict=True)
        grammar_of = self.input_processor.grammar_of
        states = [
            RequestState.from_values(group, entry["text"], core.tokenizer, grammar_of(group.sampling_params))
            for group, entry in texts
        ]
        version, internal, gauss = values["seeds"]
        core.seeds.setstate((version, tuple(internal), gauss))
        core.num_names = values["num_names"]
        core.weight_version, core.num_weight_updates = values.get("weight_version", ("0", 0))
        core.scheduler = scheduler
        core.requests.update({s.group.request_id: s for s in states if not s.is_finished})
        core.changed |= dict.fromkeys(states[i] for i in values["changed"])


def _check_fits(core: EngineCore, states: list[RequestState]) -> None:
    """Raises ValueError if a request or the model uses a feature that a state can't hold."""
    config = core.config
    names = [name for state in states for name in state.group.sampling_params.hook_args or ()]
    found = sorted(config.capturing_hooks & set(names))
    allowed = "none because an engine state does not include them"
    check(not found, "hook_args", found, allowed, aspect="the capturing hooks in")
    names = [name for state in states for name in state.group.sampling_params.extra_args or ()]
    found = sorted(config.stateful_processors & set(names))
    check(not found, "extra_args", found, allowed, aspect="the stateful logits processors in")
    found = [s.group.request_id for s in states if s.group.adapter or s.group.request.prompt_embeds]
    aspect = "the running requests with"
    check(not found, "lora_request", found, allowed, aspect=f"{aspect} `prompt_embeds` or")
    why = "an engine state does not include recurrent states"
    core.check_not_recurrent("state()", why)
    found = [s.group.request_id for s in states if s.group.request.placeholder_data]
    check(not found, "multi_modal_data", found, allowed, aspect=aspect)


def _settings(core: EngineCore, scheduler: Scheduler) -> dict[str, Any]:
    """Returns, as JSON values, the settings that must be equal in the engine that loads the state."""
    values = dataclasses.asdict(core.config)
    policy = scheduler.scheduling_policy
    special = {
        "eos_token_ids": sorted(values["eos_token_ids"]),
        "scheduler": [type(scheduler).__name__, getattr(policy, "__name__", policy)],
    }
    return json.loads(json.dumps({name: values[name] for name in _SETTINGS} | special))


def _check_weights(kept: dict[str, Any], fingerprint: str, packing: str) -> None:
    """Checks that this engine serves the weights of a state, or can load them.

    Args:
        kept: The entry "weights" of the state.
        fingerprint: Hash of the weights that this engine serves.
        packing: Identifier of the memory format of these weights; see Executor.fingerprint.

    Raises:
        ValueError: If the engine serves other weights and can't load the state's.
    """
    if kept["packing"] != packing and (kept["by_value"] or kept["fingerprint"] != fingerprint):
        raise ValueError(
            "the weights in `state` are packed for another processor. Take the state on this machine, or "
            'from an engine with matmul_backend="xla", which does not pack weights'
        )
    if not kept["by_value"] and kept["fingerprint"] != fingerprint:
        remedy = ". Load the state into an engine with the same weights, or take it with weights=True"
        found, allowed = kept["fingerprint"][:16], f"{fingerprint[:16]} as in this engine"
        raise ArgumentError(
            "state", found, allowed, aspect="the fingerprint of the weights in", remedy=remedy
        )
