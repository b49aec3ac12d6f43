"""Kernel sections of gpu_check: the self-check, the kernel tests, and the speed of the kernels.

Speed is measured with Llama 8B's heads (32 query heads, 8 KV heads, head_dim 128) in bfloat16. For decode it
is the bytes of keys and values per second, and a device copy in the same run is the reference. For prefill it
is FLOP/s; masked scores do not count. Each call is repeated within one program, so the time of the dispatch
is not included.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
# Prefix of the lines on a section's standard output that contain results.
MARK = "RESULT "

Report = dict[str, Any]
# A function of (x, *arrays), and the arrays. As constants, the arrays would be copied into the program.
TimedCall = tuple[Callable[..., Any], tuple[Any, ...]]


def self_check(is_tiny: bool) -> Iterator[Report]:
    """Runs the check that attention_backend="auto" uses on a GPU, without using stored verdicts."""
    import jax

    from jax_paged.pallas_kernels.self_check.runner import LONGEST, Suite, Variant
    from jax_paged.worker.loading.kernel_check import check

    num_heads, kv_heads = heads()
    longest = 64 if is_tiny else LONGEST
    suite = Suite((Variant(num_heads, SCALE),), kv_heads, HEAD_DIM, 16, "bfloat16", longest)
    with tempfile.TemporaryDirectory() as folder:
        candidate = "pallas" if jax.default_backend() == "gpu" else "xla"
        verdict = check(suite, Path(folder), candidate=candidate)
    yield dataclasses.asdict(verdict)
    if verdict.outcome not in ("passed", "slower"):
        raise AssertionError(f"{verdict.outcome}: {verdict.reason}")


def kernel_tests(is_tiny: bool) -> Iterator[Report]:
    """Runs, in this process, the kernel tests with the marker gpu; with toy sizes, a few other tests."""
    if importlib.util.find_spec("pytest") is None:
        raise RuntimeError("pytest is not installed here: pip install pytest pytest-timeout")
    import pytest

    class Counter:
        counts: dict[str, int] = {}  # noqa: RUF012
        failed: list[str] = []  # noqa: RUF012

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.failed:
                self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1
                self.failed += [report.nodeid] * report.failed
                found = self.counts | {"failed_tests": self.failed}
                print(MARK + json.dumps(found), file=sys.__stdout__, flush=True)

    chosen = ["-k", "work_list or tiles_cover"] if is_tiny else ["-m", "gpu"]
    counter = Counter()
    options = ["-v", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", str(ROOT)]
    if importlib.util.find_spec("pytest_timeout") is not None:  # its method "thread" ends kernels that hang
        options += ["--timeout=90", "--timeout-method=thread"]
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main([*options, *chosen, str(ROOT / "tests" / "kernels")], plugins=[counter])
    yield counter.counts | {"failed_tests": counter.failed}
    if code or not counter.counts.get("passed"):
        raise AssertionError(f"the kernel tests ended with {code!r}, {counter.counts}")


def kernel_speed(is_tiny: bool) -> Iterator[Report]:
    """Measures decode, prefill, write_kv and copy_blocks.

    If a case does not fit the memory, or another implementation does not support it, "skipped" has the
    reason. If a case fails, "error" has the reason, and the other cases still run.
    """
    failed = []
    for found in _speeds(is_tiny):
        failed += [name for name, result in found.items() if '"error"' in json.dumps(result)]
        yield found
    if failed:
        raise AssertionError(f"failed: {', '.join(failed)}")


def _attempt(measure: Callable[..., Report], *args: Any, **options: Any) -> Report:
    try:
        return measure(*args, **options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _speeds(is_tiny: bool) -> Iterator[Report]:
    import jax

    on_gpu = jax.default_backend() == "gpu"
    yield {"is_performance": on_gpu and not is_tiny}
    backends = ["pallas" if on_gpu else "pallas_interpret", "xla"]
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**30)
    yield {"copy_gb_per_s": round(copy_speed(is_tiny) / 1e9, 1)}
    page_sizes = [16] if is_tiny else [16, 64]
    contexts, batches = ([40], [2]) if is_tiny else ([512, 2048, 8192, 32768], [1, 8, 32, 128])
    torch_cases: list[Report] = []
    for page_size in page_sizes:
        for context in contexts:
            for batch in batches:
                name = f"decode page {page_size} batch {batch} context {context}"
                need = batch * context * token_bytes()
                if 2.5 * need > limit:
                    yield {
                        name: {
                            "skipped": f"{need / 2**30:.1f} GiB of keys and values, plus JAX's copy of them"
                        }
                    }
                    continue
                lens = [context] * batch
                yield {name: _attempt(decode_speed, lens, page_size, backends, peers=on_gpu)}
                if page_size == page_sizes[0]:
                    torch_cases.append({"name": name, "batch": batch, "context": context, "queries": 1})
    yield {"skewed decode": _attempt(skewed, backends, is_tiny)}
    chunks = [(32, 32)] if is_tiny else [(2048, 2048), (8192, 8192), (16384, 16384), (2048, 32768)]
    for queries, context in chunks:
        name = f"prefill {queries} of {context}"
        # The backend `xla` is too slow for long prompts to be a useful reference.
        chosen_backends = backends if queries * context <= 2**22 else backends[:1]
        yield {name: _attempt(prefill_speed, queries, context, chosen_backends)}
        torch_cases.append({"name": name, "batch": 1, "context": context, "queries": queries})
    yield from cache_op_speed(backends, is_tiny)
    yield {"torch": torch_peers(torch_cases if not is_tiny else [])}


def heads() -> tuple[int, int]:
    """Returns the numbers of query heads and KV heads: 32 and 8, as in Llama 8B, or 2 and 1 without a GPU."""
    import jax

    return (32, 8) if jax.default_backend() == "gpu" else (2, 1)


def token_bytes() -> int:
    """Returns the bytes of one token's keys and values."""
    return 2 * heads()[1] * HEAD_DIM * 2


def seconds(call: TimedCall, x: Any, repeats: int) -> float:
    """Returns the time of one call: the minimum of five rounds, or one round without a GPU.

    Args:
        call: A function and its arguments after the first. Its result has the shape and dtype of its first
            argument.
        x: The first argument of the first call.
        repeats: Number of calls in a round; each receives the result of the previous call.
    """
    import jax
    from jax import lax

    f, args = call
    run = jax.jit(lambda x, args: lax.fori_loop(0, repeats, lambda _, x: f(x, *args), x))
    jax.block_until_ready(run(x, args))
    times = []
    for _ in range(5 if jax.default_backend() == "gpu" else 1):
        start = time.perf_counter()
        jax.block_until_ready(run(x, args))
        times.append(time.perf_counter() - start)
    return min(times) / repeats


def repeats_of(num_bytes: float) -> int:
    """Returns the number of repeats that take about 20 ms at 2 TB/s, between 4 and 400; 1 without a GPU."""
    import jax

    return max(4, min(400, int(4e10 / num_bytes))) if jax.default_backend() == "gpu" else 1


def copy_speed(is_tiny: bool) -> float:
    """Returns the bytes per second that are read and written when a large array is negated."""
    import jax.numpy as jnp

    x = jnp.ones(2**20 if is_tiny else 2**29, jnp.bfloat16)
    return 4 * x.size / seconds((lambda x: -x, ()), x, repeats_of(4 * x.size))


def make_pool(lens: list[int], page_size: int) -> tuple[Any, Any, Any]:
    """Returns a pool, block tables with pages in random order, and context lengths.

    Args:
        lens: Context length of each sequence (tokens).
        page_size: Tokens per page.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    counts = [-(-n // page_size) for n in lens]
    num_pages = sum(counts) + 1
    pages = iter(1 + np.random.default_rng(0).permutation(num_pages - 1))
    tables = np.zeros((len(lens), max(counts)), np.int32)
    for table, count in zip(tables, counts, strict=True):
        table[:count] = [next(pages) for _ in range(count)]
    shape = (num_pages, 2, heads()[1], page_size, HEAD_DIM)
    pool = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    return pool, jnp.asarray(tables), jnp.asarray(lens, jnp.int32)


def decode_speed(lens: list[int], page_size: int, backends: list[str], *, peers: bool) -> Report:
    """Returns GB/s of keys and values and microseconds per call, by implementation.

    Args:
        lens: Context length of each sequence (tokens).
        page_size: Tokens per page.
        backends: Attention backends to measure.
        peers: Whether to measure JAX's own paged_attention too.
    """
    import jax
    import jax.numpy as jnp

    from jax_paged.pallas_kernels import ops

    pool, tables, context_lens = make_pool(lens, page_size)
    q = jax.random.normal(jax.random.key(1), (len(lens), heads()[0], HEAD_DIM), jnp.bfloat16)
    num_bytes = sum(lens) * token_bytes()
    args = pool, tables, context_lens
    calls: dict[str, TimedCall] = {
        backend: (functools.partial(ops.paged_decode, scale=SCALE, backend=backend), args)
        for backend in backends
    }
    if peers:
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        keys, values = (pool[:, i].swapaxes(0, 1) for i in range(2))
        splits = 16 if tables.shape[1] % 16 == 0 else 1
        run = functools.partial(paged_attention, k_splits=splits)  # unscaled scores do not change the time
        calls["jax paged_attention"] = run, (keys, values, tables, context_lens)
    return measured(calls, q, num_bytes, num_bytes / 1e9, "gb_per_s")


def measured(calls: dict[str, TimedCall], x: Any, num_bytes: float, amount: float, unit: str) -> Report:
    """Returns the rate and the microseconds per call of each implementation.

    Args:
        calls: Functions by name of the implementation.
        x: Their first argument.
        num_bytes: Bytes that a call moves; it sets the number of repeats.
        amount: Work of a call, in the unit of the rate without "per second", such as GB.
        unit: Name of the rate.
    """
    found: Report = {}
    for name, call in calls.items():
        try:
            s = seconds(call, x, repeats_of(num_bytes))
            found[name] = {unit: float(f"{amount / s:.4g}"), "us": round(s * 1e6, 1)}
        except Exception as error:  # only an error of the Pallas kernels is a failure of this check
            kind = "error" if name.startswith("pallas") else "skipped"
            found[name] = {kind: f"{type(error).__name__}: {error}"[:500]}
    return found


def skewed(backends: list[str], is_tiny: bool) -> Report:
    """Compares decode of one long and many short sequences with decode of equally long sequences.

    The number of tokens is the same in both cases, except for rounding.
    """
    batch, total = (3, 90) if is_tiny else (32, 32 * 8192)
    long = total // 2
    lens = [long] + [(total - long) // (batch - 1)] * (batch - 1)
    uneven = decode_speed(lens, 16, backends[:1], peers=False)[backends[0]]
    even = decode_speed([total // batch] * batch, 16, backends[:1], peers=False)[backends[0]]
    share = round(even["us"] / uneven["us"], 3)  # nearly the same number of tokens
    return {"uneven": uneven, "even": even, "share_of_even": share}


def prefill_speed(queries: int, context: int, backends: list[str]) -> Report:
    """Returns TFLOP/s and microseconds of causal attention for the last `queries` tokens of one context."""
    import jax
    import jax.numpy as jnp

    from jax_paged.pallas_kernels import ops

    pool, tables, context_lens = make_pool([context], 16)
    q = jax.random.normal(jax.random.key(1), (queries, heads()[0], HEAD_DIM), jnp.bfloat16)
    start = jnp.array([0, queries], jnp.int32)
    flops = 4 * heads()[0] * HEAD_DIM * sum(range(context - queries + 1, context + 1))
    args = pool, tables, context_lens, start
    calls: dict[str, TimedCall] = {
        backend: (functools.partial(ops.ragged_attention, scale=SCALE, backend=backend), args)
        for backend in backends
    }
    if queries == context and jax.default_backend() == "gpu":
        k, v = jax.random.normal(jax.random.key(2), (2, 1, context, heads()[1], HEAD_DIM), jnp.bfloat16)

        def dense(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(
                q[None], k, v, scale=SCALE, is_causal=True, implementation="cudnn"
            )[0]

        calls["jax cudnn, dense"] = dense, (k, v)
    # The number of repeats depends on bytes: 150 FLOP are assumed to take as long as moving one byte.
    return measured(calls, q, flops / 150, flops / 1e12, "tflop_per_s")


def cache_op_speed(backends: list[str], is_tiny: bool) -> Iterator[Report]:
    """Yields the GB/s that write_kv and copy_blocks read and write."""
    import jax
    import jax.numpy as jnp

    from jax_paged.pallas_kernels import ops

    num_rows, num_pages = (4, 8) if is_tiny else (8192, 4096)
    pool = jnp.zeros((num_pages, 2, heads()[1], 16, HEAD_DIM), jnp.bfloat16)
    rows = jnp.ones((num_rows, heads()[1], HEAD_DIM), jnp.bfloat16)
    slots = jax.random.permutation(jax.random.key(0), num_pages * 16)[:num_rows].astype(jnp.int32)
    src, dst = jnp.arange(num_pages, dtype=jnp.int32).reshape(2, -1)
    for op, num_bytes, args in (
        ("write_kv", 2 * num_rows * token_bytes(), (rows, rows, slots)),
        ("copy_blocks", num_pages * 16 * token_bytes(), (src, dst)),
    ):
        calls: dict[str, TimedCall] = {
            backend: (functools.partial(getattr(ops, op), backend=backend), args) for backend in backends
        }
        yield {op: measured(calls, pool, num_bytes, num_bytes / 1e9, "gb_per_s")}


# Script of `torch_peers`: reads cases from standard input and prints the results as JSON.
TORCH = """
import json, sys, time, torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
flex = torch.compile(flex_attention)
def seconds(f):
    for _ in range(3): f()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(20): f()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 20)
    return min(times)
out = {"version": torch.__version__}
for case in json.load(sys.stdin):
    b, c, n = case["batch"], case["context"], case["queries"]
    found = {}
    try:
        q = torch.randn(b, 32, n, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(b, 8, c, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        if n == 1 or n == c:
            found["sdpa"] = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=n > 1, enable_gqa=True))
        mask = create_block_mask(lambda b, h, i, j: j <= i + c - n, None, None, n, c) if n > 1 else None
        found["flex_attention"] = seconds(lambda: flex(q, k, v, block_mask=mask, enable_gqa=True))
    except Exception as error:
        found["skipped"] = f"{type(error).__name__}: {error}"[:200]
    amount = b * c * 4096 / 1e9 if n == 1 else 16384 * (n * c - n * (n - 1) / 2) / 1e12
    unit = "gb_per_s" if n == 1 else "tflop_per_s"
    out[case["name"]] = {k: v if k == "skipped" else {unit: round(amount / v, 1), "us": round(v * 1e6, 1)} for k, v in found.items()}
    del q, k, v
    torch.cuda.empty_cache()
print(json.dumps(out))
"""  # noqa: E501


def torch_peers(cases: list[Report]) -> Report:
    """Measures torch's attention over dense keys and values in a new process."""
    if not cases or importlib.util.find_spec("torch") is None:
        return {"skipped": "no case" if not cases else "torch is not installed here"}
    done = subprocess.run(
        [sys.executable, "-c", TORCH], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"skipped": done.stderr.strip().splitlines()[-1][:300] if done.stderr else "no output"}
    return json.loads(done.stdout.splitlines()[-1])


def table(report: Report) -> list[str]:
    """Returns the sections kernel-tests and kernel-speed of a report as lines of text."""
    tests, speed = report.get("kernel-tests", {}), report.get("kernel-speed", {})
    lines = []
    if tests:
        lines.append(
            f"kernel tests: {tests.get('passed', 0)} passed, {len(tests.get('failed_tests', []))} failed"
        )
    if not speed:
        return lines
    if not speed.get("is_performance"):
        lines.append("Toy sizes or no GPU: the numbers below do not measure performance.")
    lines.append(f"device copy: {speed.get('copy_gb_per_s')} GB/s")
    for name, found in speed.items():
        if not isinstance(found, dict) or name == "torch":
            continue
        cells = (
            found | speed.get("torch", {}).get(name, {}) if isinstance(speed.get("torch"), dict) else found
        )
        for who, x in cells.items():
            if isinstance(x, dict) and "us" in x:
                value, unit = next((v, k) for k, v in x.items() if k != "us")
                lines.append(
                    f"{name:<42}{who:<22}{value:>10.4g} {unit.replace('_per_', '/'):<9}{x['us']:>11.1f} us"
                )
            for kind in ("skipped", "error"):
                if who == kind or (isinstance(x, dict) and kind in x):
                    lines.append(f"{name:<42}{who:<22}{kind}: {x if who == kind else x[kind]}")
    return lines
