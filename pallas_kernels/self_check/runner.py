"""Checks kernels on the device of this machine: first the results of every operation, then their speed.

This is the program of a separate process, because a kernel that hangs or crashes takes its process with it.
worker/loading/kernel_check.py starts the process and derives a verdict from the events that it writes to a
file, one JSON object per line:

    {"begin": name}                   the candidate starts to run this case; null: it has returned
    {"row": {"case": name, ...}}      a result, see below
    {"end": outcome, "reason": text}  "done", "unsupported", "crashed" or "not run"

A row has the fields "case", "what", "value" and "limit". If "what" is "error", the value is the error of the
case and the limit is the largest allowed error. If it is "us", the value is the time of the candidate and the
limit is the time of the baseline (microseconds).
"""

import dataclasses
import functools
import importlib
import itertools
import json
import math
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_paged.pallas_kernels import ops, reference
from jax_paged.pallas_kernels.grouped_matmul import grouped_matmul, implementation_of
from jax_paged.pallas_kernels.jax_settings import apply_to_process
from jax_paged.pallas_kernels.quantization import DTYPES, quantize, tiles_of
from jax_paged.pallas_kernels.self_check import expert_check
from jax_paged.pallas_kernels.self_check.expert_check import ExpertShape, Timer

OPS = ("write_kv", "copy_blocks", "paged_decode", "ragged_attention")
# The longest context in a batch of decodes, so that an item of the work list has many blocks, and the longest
# context in a batch with prefill chunks (tokens).
LONGEST, LONGEST_MIXED = 4096, 700
# Sizes of the timed batches: a decode step with contexts of very different lengths, and a prefill chunk
# beside decodes.
TIMED_LEN, TIMED_SEQS, TIMED_CHUNK = 2048, 32, 512
# Layers in a timed program, and measurements of each program, of which the fastest counts.
_NUM_LAYERS, _NUM_ROUNDS = 2, 3
# A page id that is outside of every pool.
_OUT_OF_POOL = 10**6


@dataclasses.dataclass(frozen=True)
class Variant:
    """Attention options of some layers of a model.

    Args:
        heads: Number of query heads.
        scale: Factor of the scores.
        window: Sliding window (tokens); None for none.
        soft_cap: Soft cap of the scores; None for none.
        has_bias: Whether scores have a distance bias.
        has_sinks: Whether every head has a sink.
    """

    heads: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    has_bias: bool = False
    has_sinks: bool = False

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window}"
        soft_cap = "" if self.soft_cap is None else f", soft cap {self.soft_cap:g}"
        by_head = ", distance bias" * self.has_bias + ", sinks" * self.has_sinks
        return f"{self.heads} heads{window}{soft_cap}{by_head}"


@dataclasses.dataclass(frozen=True)
class Suite:
    """The shapes that are checked.

    Args:
        variants: Attention options of the layers.
        kv_heads: Number of kv heads.
        head_dim: Size of a head.
        page_size: Tokens per page.
        dtype: Dtype of queries, keys and values.
        max_len: Length of the longest sequence (tokens). Lengths above LONGEST are replaced by LONGEST.
        kv_cache_dtype: "auto" for a pool in the dtype above, or a key of quantization.DTYPES.
        experts: Shapes of the layers with experts.
        value_dim: Size of the values in a latent pool; None for other pools. Latent pools are not checked.
    """

    variants: tuple[Variant, ...]
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    max_len: int
    kv_cache_dtype: str = "auto"
    experts: tuple[ExpertShape, ...] = ()
    value_dim: int | None = None

    @classmethod
    def of_values(cls, values: dict[str, Any]) -> "Suite":
        """Returns a suite from the output of dataclasses.asdict."""
        kinds = {"variants": Variant, "experts": ExpertShape}
        made: dict[str, Any] = {k: tuple(kind(**v) for v in values[k]) for k, kind in kinds.items()}
        return cls(**values | made)

    def stored(self, numbers: np.ndarray) -> Array:
        """Returns a pool that stores these numbers, quantized if necessary."""
        pool = jnp.asarray(numbers)
        return tiles_of(quantize(pool, DTYPES.get(self.kv_cache_dtype, pool.dtype)))

    @property
    def bound(self) -> float:
        """The largest allowed error of an element, relative to the root mean square of its head.

        Weights and results are rounded to the dtype once, by up to eps / 2 each. Relative to the root mean
        square, rounding the weights adds 2 eps (four standard deviations of the sum of their errors), and
        rounding the result adds 2 eps (for an element of four times the root mean square). Twice the sum, 8
        eps, is allowed. In float32 the error of sums of some thousand products and of exponentials dominates,
        hence the lower limit of 1e-4.
        """
        return max(8 * float(jnp.finfo(self.dtype).eps), 1e-4)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A call of an operation.

    Args:
        name: Name of the case, for messages.
        op: Name of the operation.
        args: Its arrays. The pool is the first array of write_kv and copy_blocks, and the second array, after
            the queries, of the attention operations.
        options: Its other arguments.
        slots: int32, slots of the queries of sequences that have tokens.
    """

    name: str
    op: str
    args: tuple[Array, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    slots: Any = None

    @property
    def moves(self) -> bool:
        """Whether the operation only moves values, so that results must be equal."""
        return self.op in ("write_kv", "copy_blocks")


def kernels_of(name: str) -> Any:
    """Returns the operations of a backend, or the module with this name.

    The module must have functions with the names of the operations.

    Raises:
        ValueError: If the backend cannot be used on this machine.
    """
    if name in get_args(ops.Implementation):
        ops.resolve_backend(name)
        found: dict[str, Any] = {op: getattr(ops, op) for op in OPS} | {"grouped_matmul": grouped_matmul}
        return SimpleNamespace(**{k: functools.partial(op, backend=name) for k, op in found.items()})
    return importlib.import_module(name)


def make_case(
    suite: Suite, variant: Variant, op: str, pairs: Sequence[tuple[int, int]], padding: int
) -> Case:
    """Returns a case of attention whose pages lie in random order in the pool.

    Dead slots, pages that are not used and padding rows contain NaN. Block table entries that must not be
    read are arbitrary, partly outside of the pool.

    Args:
        suite: The shapes.
        variant: The attention options.
        op: "paged_decode" or "ragged_attention".
        pairs: For each sequence, its context length and its number of queries.
        padding: Number of rows after the last query.
    """
    rng, size, window = np.random.default_rng(0), suite.page_size, variant.window
    counts = [-(-n // size) for n, _ in pairs]
    num_pages = sum(counts) + 4
    shape = (num_pages, 2, suite.kv_heads, size, suite.head_dim)
    pool = rng.standard_normal(shape, np.float32).astype(suite.dtype)
    tables = rng.choice([0, _OUT_OF_POOL, *range(num_pages)], (len(pairs), max(counts) + 2))
    pages, slots = iter(1 + rng.permutation(num_pages - 1)), []
    for table, (n, m), count in zip(tables, pairs, counts, strict=True):
        begin = 0 if window is None else max(0, n - m + 1 - window)
        for column in range(begin // size, count):
            page = table[column] = next(pages)
            pool[page, :, :, max(0, n - column * size) :] = np.nan
            pool[page, :, :, : max(0, begin - column * size)] = np.nan
        slots += [table[i // size] * size + i % size for i in range(max(0, n - m), n)]
    pool[[0, *pages]] = np.nan
    start = np.cumsum([0, *(m for _, m in pairs)])
    q = rng.standard_normal((start[-1] + padding, variant.heads, suite.head_dim), np.float32)
    q[start[-1] :] = np.nan
    integers = [tables, np.array([n for n, _ in pairs]), start][: 3 if op == "ragged_attention" else 2]
    args = q.astype(suite.dtype), suite.stored(pool), *(x.astype(np.int32) for x in integers)
    options = {"scale": variant.scale, "window": window, "soft_cap": variant.soft_cap}
    if variant.has_bias:
        options["distance_bias"] = jnp.asarray(rng.standard_normal((variant.heads, 65), np.float32))
    if variant.has_sinks:
        options["sinks"] = jnp.asarray(rng.standard_normal(variant.heads, np.float32))
    return Case(f"{op}, {variant}", op, tuple(jax.device_put(args)), options, np.array(slots, np.int32))


def attention_cases(suite: Suite, *, is_timed: bool) -> Iterator[Case]:
    """Yields batches of decodes, and batches of prefill chunks and decodes, with skewed lengths.

    Args:
        suite: The shapes.
        is_timed: Whether the cases are for timing.
    """
    size, longest = suite.page_size, min(suite.max_len, TIMED_LEN if is_timed else LONGEST)
    if is_timed:
        decodes = [longest, *[max(1, longest // 8)] * 3] * (TIMED_SEQS // 4)
        mixed = [(longest, TIMED_CHUNK), *((n, 1) for n in decodes)]
    else:
        decodes = [longest, 1, size - 1, size, 0, size + 1, 3 * size + 5, longest // 2 + 1, longest - 1]
        # A chunk, a whole prompt, two decodes, an empty sequence, and a small chunk.
        mixed = [(300, 200), (40, 40), (LONGEST_MIXED, 1), (1, 1), (0, 0), (129, 17)]
    for op, pairs in (("paged_decode", [(n, 1) for n in decodes]), ("ragged_attention", mixed)):
        pairs = [(min(n, longest), min(n, m, longest) if op == "ragged_attention" else 1) for n, m in pairs]
        for variant in suite.variants:
            if variant.window is not None and not is_timed:
                # A window that is longer than all contexts would have no effect.
                max_window = max(1, max(n for n, _ in pairs) // 3)
                variant = dataclasses.replace(variant, window=min(variant.window, max_window))
            is_padded = op == "ragged_attention" and not is_timed
            yield make_case(suite, variant, op, pairs, 7 * is_padded)


def move_cases(suite: Suite) -> Iterator[Case]:
    """Yields a case of write_kv and a case of copy_blocks, in which some tokens and pages must be skipped."""
    rng, num_pages = np.random.default_rng(1), 24
    shape = (num_pages, 2, suite.kv_heads, suite.page_size, suite.head_dim)
    pool = rng.standard_normal(shape, np.float32).astype(suite.dtype)
    pool[::5] = np.nan
    num_slots = num_pages * suite.page_size
    slots = rng.permutation(num_slots)[: num_slots // 2].astype(np.int32)
    slots[::7] = num_slots + np.arange(len(slots[::7]))
    k, v = rng.standard_normal((2, len(slots), *shape[2::2]), np.float32).astype(suite.dtype)
    pool = suite.stored(pool)
    yield Case("write_kv", "write_kv", tuple(jax.device_put((pool, k, v, slots))))
    src, dst = rng.permutation(num_pages).reshape(2, -1).astype(np.int32)
    src[3], dst[5] = num_pages, num_pages + 7
    yield Case("copy_blocks", "copy_blocks", tuple(jax.device_put((pool, src, dst))))


def expected(case: Case) -> Array:
    """Returns the result of the backend "reference".

    Attention is computed one head at a time, because the reference needs much memory.
    """
    run, options = getattr(reference, case.op), case.options
    if case.op == "write_kv":
        pool, k, v, slots = case.args
        return jax.jit(run)(pool, quantize(k, pool.dtype), quantize(v, pool.dtype), slots)
    if case.moves or case.op == "grouped_matmul":
        with jax.default_matmul_precision("highest"):  # by default a GPU rounds float32 to 11 bits
            return jax.jit(run)(*case.args)

    def attend(q: Array, pool: Array, *rest: Array) -> Array:
        def one_head(head: Array) -> Array:
            group = q.shape[1] // pool.shape[2]
            by_head = ("distance_bias", "sinks")
            own = {k: x[head][None] if k in by_head else x for k, x in options.items()}
            return run(q[:, head][:, None], pool[:, :, head // group][:, :, None], *rest, **own)[:, 0]

        return lax.map(one_head, jnp.arange(q.shape[1])).swapaxes(0, 1)

    with jax.default_matmul_precision("highest"):
        return jax.jit(attend)(*case.args)


def error_of(got: Array, want: Array, *, is_move: bool) -> float:
    """Returns the error of a result.

    Args:
        got: The result.
        want: The expected result.
        is_move: Whether values are only moved. If so, the error is the share of wrong values. Otherwise it is
            the largest error of an element relative to the root mean square of its head, see Suite.bound.
    """
    ours, theirs = (np.asarray(x).astype(np.float64) for x in (got, want))
    if is_move:
        return float(np.mean((ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))))
    size = np.sqrt(np.mean(theirs**2, axis=-1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(ours == theirs, 0, np.abs(ours - theirs) / size)
    return float(np.max(np.nan_to_num(share, nan=math.inf, posinf=math.inf)))


def timed_layer(kernels: Any, case: Case) -> Timer:
    """Returns a timer for write_kv and attention, alternating several times in one program.

    The program is similar to consecutive layers of a model.

    Args:
        kernels: The operations.
        case: A case of attention with a slot for every query.
    """
    attend = functools.partial(getattr(kernels, case.op), **case.options)

    def layers(pool: Array, q: Array, kv: Array, slots: Array, *rest: Array) -> tuple[Array, Array]:
        for _ in range(_NUM_LAYERS):
            pool = kernels.write_kv(pool, kv, -kv, slots)
            q = attend(q, pool, *rest)
        return pool, q

    q, pool, *rest = case.args
    run, pool = jax.jit(layers, donate_argnums=0), jnp.copy(pool)
    arguments = q, q[:, : pool.shape[2]], jnp.asarray(case.slots), *rest

    def call() -> Array:
        nonlocal pool
        pool, out = run(pool, *arguments)
        return out

    return Timer(call, _NUM_LAYERS)


class _CheckEnded(Exception):
    """Raised to end the check; its arguments are (outcome, reason)."""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def run(suite: Suite, candidate: str, baseline: str, note: Callable[[dict[str, Any]], None]) -> None:
    """Checks the results of the candidate's operations and, if all are correct, compares their speed.

    Args:
        suite: The shapes.
        candidate: Backend to check, or a module with the operations.
        baseline: Backend to compare the speed with.
        note: Receives the events described in the module docstring, except the last.
    """
    baseline_ops = kernels_of(baseline)
    cases = [*move_cases(suite), *attention_cases(suite, is_timed=False)]

    def attempt[T](case: Case, call: Callable[..., T], *args: Any) -> T:
        note({"begin": case.name})
        try:
            result = jax.block_until_ready(call(*args))
        except Exception as error:
            # A lack of memory is not the fault of the kernels: other processes may use it.
            outcome = "not run" if "RESOURCE_EXHAUSTED" in str(error) else "crashed"
            raise _CheckEnded(outcome, f"{case.name}: {_first_line(error)}") from error
        note({"begin": None})
        return result

    try:
        tested_ops = kernels_of(candidate)
        # grouped_matmul is not checked if the backend uses the loop in plain JAX, as the baseline does.
        has_loop = candidate in get_args(ops.Implementation) and implementation_of(candidate) == "loop"
        experts = () if has_loop else suite.experts
        calls = [jax.jit(functools.partial(getattr(tested_ops, case.op), **case.options)) for case in cases]
        for call, case in zip(calls, cases, strict=True):
            # Unsupported shapes raise ValueError during tracing, before anything has run.
            call.eval_shape(*case.args)
        for one in experts:
            jax.eval_shape(tested_ops.grouped_matmul, *one.shapes(1, suite.dtype))
    except ValueError as error:
        raise _CheckEnded("unsupported", str(error)) from error

    def products(*, is_timed: bool) -> Iterator[Case]:
        for name, args in expert_check.batches(experts, suite.dtype, is_timed=is_timed):
            yield Case(name, "grouped_matmul", args)

    def is_right(case: Case, call: Callable[..., Array]) -> bool:
        want: Any = np.asarray(expected(case))
        error = error_of(attempt(case, call, *case.args), want, is_move=case.moves)
        limit = 0.0 if case.moves else suite.bound
        note({"row": {"case": case.name, "what": "error", "value": error, "limit": limit}})
        return error <= limit

    right = [is_right(case, call) for call, case in zip(calls, cases, strict=True)]
    right += [is_right(case, jax.jit(tested_ops.grouped_matmul)) for case in products(is_timed=False)]
    if not all(right):
        return
    for case in itertools.chain(attention_cases(suite, is_timed=True), products(is_timed=True)):
        name, timed = f"write_kv + {case.name}", timed_layer
        if case.op == "grouped_matmul":
            name, timed = case.name, expert_check.timed_products
        baseline_timer, timer = timed(baseline_ops, case), attempt(case, timed, tested_ops, case)
        times = [(attempt(case, timer.seconds), baseline_timer.seconds()) for _ in range(_NUM_ROUNDS)]
        best, baseline_us = (min(column) * 1e6 for column in zip(*times, strict=True))
        note({"row": {"case": name, "what": "us", "value": best, "limit": baseline_us}})


def main(task: dict[str, Any]) -> None:
    """Runs a check in a process that does nothing else, and writes its events to a file.

    Args:
        task: A dict with "suite", "candidate" and "baseline" (the arguments of `run`), "events" (path of the
            file), "platforms" and "device_kind" (the JAX platforms and the kind of the device that are
            expected), and "limit_s" (time after which the parent kills this process, in seconds).
    """
    if hasattr(signal, "alarm"):
        # The alarm ends this process a little later even if its parent no longer exists.
        signal.alarm(math.ceil(task["limit_s"]) + 5)
    # The waiting engine may already use most of the GPU's memory, or need it next.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_platforms", task["platforms"])
    apply_to_process()  # the inherited environment may have other settings
    with Path(task["events"]).open("w", encoding="utf-8") as file:

        def note(event: dict[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        end = "done", ""
        try:
            if (kind := jax.devices()[0].device_kind) != task["device_kind"]:
                raise _CheckEnded("not run", f"the device is {kind} instead of {task['device_kind']}")
            run(Suite.of_values(task["suite"]), task["candidate"], task["baseline"], note)
        except Exception as error:
            end = error.args if isinstance(error, _CheckEnded) else ("not run", _first_line(error))
            traceback.print_exc()
        note({"end": end[0], "reason": end[1]})
