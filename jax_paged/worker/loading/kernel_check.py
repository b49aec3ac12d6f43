"""The choice of the attention backend.

With attention_backend="auto" on a GPU, the Pallas kernels are used if they pass a check on this machine.

The check (pallas_kernels/self_check/runner.py) runs in a subprocess, which is killed after a time limit. It
compares the kernels' results with a reference, and their speed with XLA. The verdict is stored in a file. It
is valid until something that it depends on changes: the GPU, its driver, the compilers, the kernels or the
shapes of the model.
"""

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array

from jax_paged.config.cache_dir import cache_dir
from jax_paged.config.engine_args import EngineArgs
from jax_paged.models.attention import CustomAttention, StateSpec, value_dim_of, window_of
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.forward_context import ForwardContext
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid, repeated
from jax_paged.models.recurrent.recurrence import recur_dense
from jax_paged.models.weights import LoadedModel, outline
from jax_paged.pallas_kernels import native, ops
from jax_paged.pallas_kernels.ops import resolve_backend
from jax_paged.pallas_kernels.self_check import runner
from jax_paged.pallas_kernels.self_check.expert_check import ExpertShape
from jax_paged.pallas_kernels.self_check.runner import Suite, Variant
from jax_paged.worker.loading.weights import check_divided, flatten

_LOGGER = logging.getLogger(__name__)

# Time limit of the check (seconds). Most of the time is the compilation of about twenty programs.
LIMIT_S = 240.0
# The subprocess gets the module search path of this process.
_SUBPROCESS_CODE = """
import json, sys
task = json.loads(sys.argv[1])
sys.path[:] = task["path"]
from jax_paged.pallas_kernels.self_check import runner
runner.main(task)
"""
_COMPILERS = "jax jaxlib jax-cuda12-plugin jax-cuda13-plugin nvidia-cuda-nvcc-cu12 nvidia-cuda-nvcc"
_OUTPUT_CHARACTERS = 2000
# Factor by which times on a GPU vary if other programs use it too.
_NOISE = 1.03

Outcome = Literal["passed", "slower", "wrong", "crashed", "hung", "unsupported", "not run"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Args:
        outcome: "passed", "slower", "wrong", "crashed" or "hung"; "unsupported" if the kernels do not support
            these shapes or this device; "not run" if something other than the kernels failed, for example
            because memory was not free.
        reason: The reason, in one line.
        seconds: Duration of the check.
        rows: Rows of the result table, see pallas_kernels/self_check/runner.py.
        output: The end of the subprocess's output, if the kernels have not passed.
    """

    outcome: Outcome
    reason: str
    seconds: float
    rows: tuple[dict[str, Any], ...] = ()
    output: str = ""

    def table(self) -> str:
        """Returns the verdict as a table for people to read."""
        lines = [f"{'case':<64}{'':>6}{'value':>10}{'limit':>10}"]
        for row in self.rows:
            mark = " TOO LARGE" if _is_over(row) else ""
            lines.append(f"{row['case']:<64}{row['what']:>6}{row['value']:>10.3g}{row['limit']:>10.3g}{mark}")
        return "\n".join([*lines, f"{self.outcome}: {self.reason} ({self.seconds:.0f} s)", self.output])


def choose_backend(
    args: EngineArgs, loaded: LoadedModel | LanguageModel | None, attend: CustomAttention | None
) -> tuple[ops.Implementation, str]:
    """Returns the attention backend and the reason for the choice.

    With "auto" on a GPU, it runs the check if there is no stored verdict.

    Args:
        args: Arguments of the engine, which contain the backend and the model.
        loaded: A model in memory that replaces args.model; None for none.
        attend: Attention function that replaces the kernels; None for none. With it, no kernels are checked.

    Raises:
        ValueError: If the backend cannot be used on this machine, or the model does not exist.
    """
    backend = resolve_backend(args.attention_backend, name="attention_backend")
    if args.attention_backend != "auto":
        return backend, "requested"
    device = jax.devices()[0]
    if device.platform == "cpu":
        if backend == "xla":
            _LOGGER.warning("attention runs in XLA; the native backend is faster, but %s", native.problem())
        return backend, "auto, on a CPU"
    if device.platform != "gpu" or attend is not None:
        return backend, f"auto, {'with a custom attend function' if attend else 'without an NVIDIA GPU'}"
    if args.speculative is not None and args.speculative.model is not None:
        reason = (
            "the Pallas kernels are not checked for draft models; pass attention_backend='pallas' to use "
            "them without a check"
        )
        _LOGGER.warning("attention runs in XLA: %s", reason)
        return backend, f"auto; {reason}"
    verdict = check_all(suites_of(args, loaded))
    if verdict.outcome == "passed":
        _LOGGER.info("attention runs in the Pallas kernels: %s", verdict.reason)
        return "pallas", f"auto: {verdict.reason}"
    command = _command(args)
    advice = f". Please open an issue with the output of `{command}`"
    if verdict.outcome in ("unsupported", "not run"):
        advice = f". Run `{command}` for details"
    reason = f"pallas {verdict.outcome}: {verdict.reason}"
    _LOGGER.warning("attention runs in XLA, not in the Pallas kernels; %s%s", reason, advice)
    return backend, f"auto; {reason}"


def _command(args: EngineArgs) -> str:
    """Returns the shell command that checks the same kernels."""
    options = [f"--model {args.model}"]
    for name in ("dtype", "block_size", "max_model_len", "kv_cache_dtype"):
        if (value := getattr(args, name)) != getattr(EngineArgs, name):
            options.append(f"--{name.replace('_', '-')} {value}")
    return f"jax-paged check-kernels {' '.join(options)}"


def suites_of(args: EngineArgs, loaded: LoadedModel | LanguageModel | None = None) -> list[Suite]:
    """Returns the shapes with which each device calls the kernels. The weights need not be loaded.

    The model is traced on shapes alone, with attention functions that record their arguments. Layers that
    differ in the number or size of kv heads get separate suites.

    Args:
        args: Arguments of the engine.
        loaded: A model in memory that replaces args.model; None for none.

    Raises:
        ValueError: If the model cannot be divided among tensor_parallel_size devices.
    """
    if loaded is None:
        model = outline(
            resolve_model_dir(args.model), args.dtype, args.max_model_len, args.hf_overrides or {}
        )
    else:
        model = loaded.model if isinstance(loaded, LoadedModel) else loaded
    specs, found = model.kv_cache_specs(), dict[tuple[int, int, int | None], dict[Any, Variant]]()
    flat, weights, splits = flatten(model)
    size = args.tensor_parallel_size
    grid = DeviceGrid(AbstractMesh((size,), (TENSOR,)), args.enable_expert_parallel)
    check_divided(model, grid)

    def attend(
        layer: int,
        q: Array,
        k: Array | None,
        v: Array | None,
        *,
        scale: float,
        soft_cap: float | None = None,
        **options: Any,
    ) -> Array:
        spec = specs[layer]
        assert not isinstance(spec, StateSpec), "a layer with recurrent state has called attend"
        by_head = (options.get(name) is not None for name in ("distance_bias", "sinks"))
        properties = window_of(spec), soft_cap, *by_head
        variants = found.setdefault((spec.num_kv_heads, spec.head_dim, value_dim_of(spec)), {})
        # The scale is not part of the key, because layers that differ only in it run the same kernels.
        variants.setdefault(properties, Variant(q.shape[-2] // size, float(scale), *properties))
        return q[..., : value_dim_of(spec)]

    def cross_attend(layer: int, q: Array, *, scale: float) -> Array:
        return attend(layer, q, q, q, scale=scale)

    products = dict[ExpertShape, None]()

    def multiply(x: Array, kernels: Array, group_sizes: Array) -> Array:
        products[ExpertShape(x.shape[0], *kernels.shape)] = None  # the shapes for one token
        return jnp.zeros((x.shape[0], kernels.shape[2]), x.dtype)

    def run(weights: list[Array]) -> Array:
        model, token = flat.merge(weights), jnp.zeros(1, jnp.int32)
        recur = functools.partial(recur_dense, specs, token.shape)
        context = ForwardContext(model, token, attend, cross_attend, multiply, recur=recur)
        return model.hidden(token, dataclasses.replace(context, grid=grid if size > 1 else None))

    shapes = [grid.shape(x.shape, split) for x, split in zip(weights, splits, strict=True)]
    hidden = jax.eval_shape(
        run, [jax.ShapeDtypeStruct(*x) for x in zip(shapes, (x.dtype for x in weights), strict=True)]
    )
    max_len = args.max_model_len or model.config.max_position_embeddings
    return [
        Suite(
            variants=tuple(variants.values()),
            kv_heads=repeated(num_kv_heads, 1)[0].per_device(size),
            head_dim=head_dim,
            page_size=args.block_size,
            dtype=str(hidden.dtype),
            max_len=min(max_len, runner.LONGEST),
            kv_cache_dtype=args.kv_cache_dtype,
            experts=tuple(products),
            value_dim=value_dim,
        )
        for (num_kv_heads, head_dim, value_dim), variants in found.items()
    ]


def check_all(suites: list[Suite], **options: Any) -> Verdict:
    """Returns the verdict on the first suite that does not pass, or on the last suite if all pass."""
    verdict = check(suites[0], **options)
    for suite in suites[1:]:
        if verdict.outcome == "passed":
            verdict = check(suite, **options)
    return verdict


def check(
    suite: Suite,
    folder: Path | None = None,
    *,
    candidate: str = "pallas",
    baseline: str = "xla",
    limit_s: float = LIMIT_S,
    ignores_stored: bool = False,
) -> Verdict:
    """Returns the stored verdict on kernels, or the verdict of a new check if none is stored.

    Only one check runs at a time on this machine.

    Args:
        suite: The shapes to check.
        folder: Folder of stored verdicts; None for the default in `cache_dir`.
        candidate: The backend to check, or the name of a module that defines the operations.
        baseline: The backend that the candidate must not be slower than.
        limit_s: Time after which the check is killed (seconds).
        ignores_stored: Whether to ignore a stored verdict.
    """
    if suite.value_dim is not None:
        return Verdict("unsupported", "the kernels do not support a cache of latents", 0.0)
    task = {"candidate": candidate, "baseline": baseline, "suite": dataclasses.asdict(suite)}
    key = json.loads(json.dumps(task | _machine()))  # the same types as after reading a file
    folder = folder or Path(cache_dir("kernel-checks"))
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    file = folder / f"{digest[:32]}.json"
    if not ignores_stored and (verdict := _read_verdict(file, key)) is not None:
        return verdict
    with _check_lock(folder):
        # Another process may have finished the same check while this one waited.
        if not ignores_stored and (verdict := _read_verdict(file, key)) is not None:
            return verdict
        verdict = _run(task | {"device_kind": key["device"]}, limit_s)
        if verdict.outcome != "not run":
            with contextlib.suppress(OSError):  # _check_lock has logged a warning
                _write_verdict(file, key, verdict)
        return verdict


def _machine() -> dict[str, Any]:
    """Returns the values that a verdict depends on in addition to the shapes."""
    device, sources = jax.devices()[0], hashlib.sha256()
    for source in sorted(Path(ops.__file__).parent.rglob("*.py")):
        sources.update(source.name.encode() + source.read_bytes())
    versions = {}
    for name in _COMPILERS.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "device": device.device_kind,
        "driver": _driver(),
        "runtime": device.client.platform_version,
        "versions": versions,
        "kernels": sources.hexdigest(),
    }


def _driver() -> str | None:
    """Returns the version of the NVIDIA driver; None without one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return None
    nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    return text.value.decode()


def _read_verdict(file: Path, key: dict[str, Any]) -> Verdict | None:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["key"] != key:
            return None
        return Verdict(**values["verdict"] | {"rows": tuple(values["verdict"]["rows"])})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        _LOGGER.warning("%s contains no valid verdict (%r); the kernels are checked again", file, error)
        return None


def _write_verdict(file: Path, key: dict[str, Any], verdict: Verdict) -> None:
    """Writes a verdict to a file. Other processes see either the complete file or none."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps({"key": key, "verdict": dataclasses.asdict(verdict)}, indent=1), "utf-8")
    part.replace(file)


def _check_lock(folder: Path) -> contextlib.AbstractContextManager[Any]:
    """Returns a lock that only one process can hold while it checks kernels; waits for it if necessary.

    Two checks at the same time would distort each other's times. The lock is released at the end of the
    `with` block, or when its process ends.
    """
    import fcntl  # available on all systems on which JAX supports NVIDIA GPUs

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOGGER.info("waiting for another process that is checking kernels")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        _warn_not_stored(folder, str(error))
        return contextlib.nullcontext()
    return lock


@functools.cache
def _warn_not_stored(folder: Path, reason: str) -> None:
    """Logs a warning, once per process for the same folder and reason."""
    _LOGGER.warning("can't store kernel checks in %s, so every start repeats them: %s", folder, reason)


def _run(task: dict[str, Any], limit_s: float) -> Verdict:
    """Runs a check in a subprocess."""
    text = "checking the kernels of backend %s on %s, once for this model; this takes at most %.0f s"
    _LOGGER.info(text, task["candidate"], task["device_kind"], limit_s)
    start, platforms = time.monotonic(), jax.config.jax_platforms
    with tempfile.TemporaryDirectory() as scratch:
        events, printed = Path(scratch) / "events", Path(scratch) / "printed"
        task |= {"path": sys.path, "events": str(events), "limit_s": limit_s, "platforms": platforms}
        command = [sys.executable, "-c", _SUBPROCESS_CODE, json.dumps(task)]
        with printed.open("wb") as out:
            pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            try:
                process = subprocess.Popen(command, start_new_session=True, **pipes)
            except OSError as error:
                return Verdict("not run", f"the subprocess can't be started: {error}", 0.0)
        ending = f"not done after {limit_s:.0f} s"
        try:
            code = process.wait(limit_s)
            ending = f"the process ended with {code if code >= 0 else signal.Signals(-code).name}"
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
        found = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
        outcome, reason, rows = _judge(found, "hung" if code is None else "crashed", ending)
        output = printed.read_text(encoding="utf-8", errors="replace")[-_OUTPUT_CHARACTERS:]
    return Verdict(outcome, reason, time.monotonic() - start, rows, "" if outcome == "passed" else output)


def _kill(process: subprocess.Popen[Any]) -> None:
    """Kills a process and all of its children.

    A process that has not ended after ten seconds, because the driver blocks it, is left behind.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            _LOGGER.warning("process %d of the kernel check is still running after SIGKILL", process.pid)


def _is_over(row: dict[str, Any]) -> bool:
    return row["value"] > row["limit"] * (_NOISE if row["what"] == "us" else 1)


def _judge(lines: list[str], end: Outcome, ending: str) -> tuple[Outcome, str, tuple[dict[str, Any], ...]]:
    """Returns outcome, reason and rows of a check.

    Args:
        lines: The events that the subprocess has written, one JSON object per line.
        end: The outcome if the subprocess ended in the middle of a case.
        ending: A description of how the subprocess ended, for the reason.
    """
    events: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line may be incomplete
            events.append(json.loads(line))
    rows = tuple(event["row"] for event in events if "row" in event)
    if not events or "end" not in events[-1]:
        case = next((event["begin"] for event in reversed(events) if "begin" in event), None)
        return ("not run", ending, rows) if case is None else (end, f"{case}: {ending}", rows)
    if events[-1]["end"] != "done":
        return events[-1]["end"], events[-1]["reason"], rows
    over = [row for row in rows if _is_over(row)]
    over = [row for row in over if row["what"] == "error"] or over
    if over:
        texts = [f"{r['case']} ({r['what']} {r['value']:.3g}, at most {r['limit']:.3g})" for r in over]
        return "wrong" if over[0]["what"] == "error" else "slower", "; ".join(texts), rows
    gains = [row["limit"] / row["value"] for row in rows if row["what"] == "us"]
    mean = math.prod(gains) ** (1 / len(gains))
    return "passed", f"correct on this device and {mean:.1f} times as fast as XLA", rows
