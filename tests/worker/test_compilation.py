"""What is compiled: every step fits a bucket, and the next larger one serves until the right one is there."""

import concurrent.futures
import dataclasses
import math
import os
import threading
import time
import types
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.waiting import wait_until

from jax_paged.config import cache_dir, engine_args
from jax_paged.worker.compilation import compiler, persistent_cache
from jax_paged.worker.compilation.buckets import (
    Bucket,
    StepVariant,
    plan_buckets,
)
from jax_paged.worker.compilation.compiler import CompiledPrograms
from jax_paged.worker.compilation.persistent_cache import use_persistent_cache
from jax_paged.worker.compilation.programs import Program
from jax_paged.worker.traced_step import StepProgram


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 16, 64, 100, 256])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 5, 16, 64, 500, 512, 2048])
@pytest.mark.parametrize(
    "kind", [{}, {"minimizes_padding": True}, {"minimizes_padding": True, "min_rows": 2}]
)
def test_every_step_fits_a_bucket(max_num_seqs, max_num_batched_tokens, kind):
    buckets = plan_buckets(max_num_seqs, max_num_batched_tokens, **kind)
    assert len(buckets) == len(set(buckets)) <= (21 if kind else 16)
    for is_decode in (True, False):
        kind = [b for b in buckets if b.is_decode is is_decode]
        assert kind == sorted(kind)
        most_seqs = min(max_num_seqs, max_num_batched_tokens)
        for num_tokens in range(1, max_num_batched_tokens + 1):
            # A mixed step has a sequence with two tokens or more, so fewer sequences than tokens.
            num_seqs = min(max_num_seqs, num_tokens) if is_decode else min(max_num_seqs, num_tokens - 1)
            if (is_decode and num_tokens > most_seqs) or num_seqs < 1:
                continue
            assert any(b.num_tokens >= num_tokens and b.num_seqs >= num_seqs for b in kind)


def test_fine_buckets_waste_few_rows():
    buckets = plan_buckets(64, 512, minimizes_padding=True)
    decode, mixed = ([b.num_tokens for b in buckets if b.is_decode is kind] for kind in (True, False))
    assert decode == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert mixed == [32, 64, 128, 256, 384, 512]
    many = [b.num_tokens for b in plan_buckets(256, 2048, minimizes_padding=True) if b.is_decode]
    assert many == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 64])
@pytest.mark.parametrize("max_num_batched_tokens", [2, 5, 512])
@pytest.mark.parametrize("minimizes_padding", [False, True])
def test_no_step_has_fewer_rows_than_wanted(max_num_seqs, max_num_batched_tokens, minimizes_padding):
    """Neither of tokens nor of logits, even if a single sequence may run."""
    for bucket in plan_buckets(
        max_num_seqs, max_num_batched_tokens, minimizes_padding=minimizes_padding, min_rows=2
    ):
        assert min(bucket.num_tokens, bucket.num_seqs) >= 2
    assert plan_buckets(max_num_seqs, 1, minimizes_padding=minimizes_padding, min_rows=2) == [
        Bucket(True, 1, 1)
    ]


BUCKETS = [Bucket(True, 1, 1), Bucket(True, 2, 2), Bucket(True, 4, 4), Bucket(False, 8, 4)]


@dataclasses.dataclass(frozen=True)
class Other(Program):
    """A program that is no step."""

    name: str

    def __str__(self):
        return self.name

    def trace(self, context):
        return jax.jit(lambda x: x * 2).trace(jnp.zeros(3))


def lower(program):
    return jax.jit(lambda x: x + 1).lower(jnp.zeros(program.bucket.num_tokens))


@dataclasses.dataclass(frozen=True)
class LateLowered:
    """What is compiled once a gate is open. Tracing must not wait: only one thread at a time traces."""

    lowered: Any
    gate: threading.Event
    started: threading.Event

    def compile(self, **options):
        self.started.set()
        self.gate.wait(60)
        return self.lowered.compile(**options)


def lower_small_ones_late(gate, started):
    return lambda p: lower(p) if p.bucket.num_tokens >= 4 else LateLowered(lower(p), gate, started)


def test_the_next_larger_bucket_serves_until_the_right_one_is_there():
    gate = threading.Event()
    compiled = CompiledPrograms(BUCKETS, [], lower_small_ones_late(gate, threading.Event()))
    assert compiled.smallest_ready(StepVariant(True), num_tokens=1, num_seqs=1, num_logits=1) == BUCKETS[2]
    assert "to be compiled" in compiled.plan()
    gate.set()
    compiled.wait()
    assert compiled.smallest_ready(StepVariant(True), num_tokens=1, num_seqs=1, num_logits=1) == BUCKETS[0]
    assert compiled.smallest_ready(StepVariant(True), num_tokens=3, num_seqs=3, num_logits=3) == BUCKETS[2]
    assert compiled.smallest_ready(StepVariant(False), num_tokens=3, num_seqs=1, num_logits=1) == BUCKETS[3]
    assert "to be compiled" not in compiled.plan()
    compiled.stop()


@pytest.mark.thorough
def test_a_failure_of_the_largest_is_raised_at_once_and_of_another_in_wait():
    def fail_at(num_tokens):
        def lower_or_fail(program):
            if program.bucket.num_tokens == num_tokens:
                raise RuntimeError(f"no {num_tokens}")
            return lower(program)

        return lower_or_fail

    with pytest.raises(RuntimeError, match="no 8"):
        CompiledPrograms(BUCKETS, [], fail_at(8))
    compiled = CompiledPrograms(BUCKETS, [], fail_at(2))
    with pytest.raises(RuntimeError, match="no 2"):
        compiled.wait()
    # It is said (in the log too), and the next larger one goes on serving.
    assert "failed" in compiled.plan()
    assert compiled.smallest_ready(StepVariant(True), num_tokens=2, num_seqs=2, num_logits=2) == BUCKETS[2]
    compiled.stop()


def test_one_kind_alone():
    compiled = CompiledPrograms(BUCKETS[:3], [], lower)
    compiled.wait()
    compiled.stop()


def lower_any(program):
    if program == Other("bad"):
        raise RuntimeError("no bad")
    return lower(program) if isinstance(program, StepProgram) else program.trace(None).lower()


def test_programs_beside_the_steps():
    compiled = CompiledPrograms(BUCKETS, [Other("double"), Other("bad")], lower_any)
    assert compiled.run(Other("double"), jnp.ones(3)).tolist() == [2, 2, 2]  # waits until it is compiled
    with pytest.raises(RuntimeError, match="no bad"):
        compiled[Other("bad")]
    with pytest.raises(RuntimeError, match="no bad"):
        compiled.wait()
    assert "double" in compiled.plan()
    assert compiled.buckets == BUCKETS
    assert compiled.programs == [*map(StepProgram, BUCKETS), Other("double"), Other("bad")]
    assert compiled.num_traces == len(compiled.programs)
    compiled.stop()


def test_the_largest_steps_come_first_then_the_small_programs_then_the_rest():
    order = []

    def note(program):
        order.append(program)
        return lower_any(program)

    buckets = [Bucket(True, n, n) for n in (1, 2, 4)] + [Bucket(False, n, 4) for n in (4, 8)]
    compiled = CompiledPrograms(buckets, [Other("a"), Other("b")], note)
    compiled.wait()
    compiled.stop()
    # Two threads take them from one queue: neighbours may change places.
    assert set(order[:2]) == {StepProgram(buckets[2]), StepProgram(buckets[4])}
    position = {program: i for i, program in enumerate(order)}
    others, rest = [Other("a"), Other("b")], [StepProgram(buckets[i]) for i in (0, 1, 3)]
    assert max(position[p] for p in others) <= min(position[p] for p in rest) + 1
    assert len(order) == 7


def test_one_program_at_a_time_is_traced():
    tracing, most = [], []

    def lower_slowly(program):
        tracing.append(program)
        most.append(len(tracing))
        time.sleep(0.01)
        lowered = lower_any(program)
        tracing.remove(program)
        return lowered

    compiled = CompiledPrograms(BUCKETS, [Other("a"), Other("b")], lower_slowly)
    compiled.wait()
    compiled.stop()
    assert most == [1] * 6


def test_stop_leaves_the_rest_uncompiled():
    started, gate = threading.Event(), threading.Event()
    buckets = [Bucket(True, n, n) for n in (1, 2, 3, 4)] + BUCKETS[3:]
    compiled = CompiledPrograms(buckets, [], lower_small_ones_late(gate, started))
    assert started.wait(60)
    stopper = threading.Thread(target=compiled.stop)
    stopper.start()
    gate.set()
    stopper.join(60)
    assert not stopper.is_alive()
    with pytest.raises(concurrent.futures.CancelledError):
        compiled.wait()


def test_what_is_skipped_is_not_waited_for():
    started, gate = threading.Event(), threading.Event()

    def lower_others_late(program):
        lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
        return LateLowered(lowered, gate, started) if isinstance(program, Other) else lowered

    others = [Other("a"), Other("b")]
    compiled = CompiledPrograms(BUCKETS, others, lower_others_late, max_compile_s=0)
    threading.Timer(0.3, gate.set).start()
    compiled.wait()  # which begins before it is known what is skipped
    assert [r.state for r in compiled.report()] == ["skipped"] * 2 + ["compiled"] * 4
    compiled.stop()


class Gate:
    """What is compiled while a gate is closed, and what it is traced for."""

    def __init__(self):
        self.begun, self.opened = threading.Event(), threading.Event()

    def lowered(self, program, weights):
        lowered = lower(program) if isinstance(program, StepProgram) else jax.jit(lambda x: x).lower(weights)
        return LateLowered(lowered, self.opened, self.begun) if isinstance(program, Other) else lowered


@pytest.mark.parametrize("ends", ["stop_without_waiting", "stop"])
def test_nothing_is_compiled_after_the_program_under_way(ends):
    gate, weights = Gate(), jnp.zeros(3)
    seen = weakref.ref(weights)
    others = [Other(str(i)) for i in range(20)]
    compiled = CompiledPrograms(BUCKETS, others, lambda program, w=weights: gate.lowered(program, w))
    threads = compiled._threads
    del weights
    gate.begun.wait()
    if ends == "stop_without_waiting":
        compiled.stop_without_waiting()
        assert any(thread.is_alive() for thread in threads), "it does not wait"
        wait_until(lambda: seen() is None, "what programs are traced for is gone")
        gate.opened.set()
    else:
        threading.Timer(0.1, gate.opened.set).start()
        compiled.stop()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    num_compiled = sum(record.state == "compiled" for record in compiled.report())
    assert num_compiled <= 4 + 2
    programs = weakref.ref(compiled)
    del compiled
    assert programs() is None


def test_the_heap_is_trimmed_after_compilation_where_the_c_library_can(monkeypatch):
    trimmed = []
    library = types.SimpleNamespace(malloc_trim=trimmed.append)
    monkeypatch.setattr(compiler.ctypes, "CDLL", lambda _: library)
    compiled = CompiledPrograms(BUCKETS, [], lower)
    compiled.wait()
    for thread in compiled._threads:
        thread.join()
    assert trimmed == [0] * (len(BUCKETS) + len(compiled._threads))
    for absent in (AttributeError, TypeError, OSError):  # musl, Windows, a static program

        def fail(_, error=absent):
            raise error("no such library")

        monkeypatch.setattr(compiler.ctypes, "CDLL", fail)
        compiler.trim_heap()


@pytest.fixture
def no_cache_yet(monkeypatch, tmp_path):
    """A process that has not chosen a cache folder; its home is `tmp_path`."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
        "jax_compilation_cache_max_size",
    ]
    kept = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("JAX_PAGED_CACHE_GB", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    persistent_cache._warn_not_writable.cache_clear()
    yield tmp_path
    for name, value in kept.items():
        jax.config.update(name, value)


def unwritable(kind, monkeypatch, tmp_path):
    """Makes the cache folder one that can't be written to, in one of several ways."""
    if kind == "parent is a file":
        (tmp_path / ".cache").write_text("")
    elif kind == "home is missing":
        monkeypatch.setenv("HOME", "/proc/nobody")
    elif kind == "XDG_CACHE_HOME is a device":
        monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    elif kind == "folder can't be made":

        def refuse(*_, **__):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
    else:
        assert kind == "folder is read-only"
        (tmp_path / ".cache" / "jax-paged" / "compiled").mkdir(parents=True)

        def refuse(*_, **__):
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(persistent_cache.tempfile, "TemporaryFile", refuse)


@pytest.mark.parametrize(
    "kind",
    [
        "parent is a file",
        "home is missing",
        "XDG_CACHE_HOME is a device",
        "folder can't be made",
        "folder is read-only",
    ],
)
def test_a_cache_folder_that_cannot_be_written_to_is_one_warning(kind, monkeypatch, no_cache_yet, caplog):
    unwritable(kind, monkeypatch, no_cache_yet)
    for _ in range(3):
        use_persistent_cache()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "XDG_CACHE_HOME" in record.getMessage()
    if kind == "folder is read-only":  # what it holds is still read, and nothing is written
        assert jax.config.jax_compilation_cache_dir == str(no_cache_yet / ".cache/jax-paged/compiled")
        assert jax.config.jax_persistent_cache_min_entry_size_bytes > 2**40
    else:
        assert jax.config.jax_compilation_cache_dir is None


def test_the_cache_is_under_the_home_directory_or_root_without_any(monkeypatch, no_cache_yet):
    assert cache_dir.cache_dir("compiled") == str(no_cache_yet / ".cache/jax-paged/compiled")
    monkeypatch.setattr(cache_dir.os.path, "expanduser", lambda path: path)  # as for a user without an entry
    assert cache_dir.cache_dir("compiled") == "/.cache/jax-paged/compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", "/else")
    assert cache_dir.cache_dir("compiled") == "/else/jax-paged/compiled"


def write_entries(folder, num):
    """Writes files of 1,000 bytes, the first of which was used last."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(num):
        (folder / f"{i}-cache").write_bytes(bytes(1000))
        os.utime(folder / f"{i}-cache", (2000 - i, 1000))  # accessed, modified


@pytest.mark.parametrize("max_bytes", [0, 999, 1000, 4500, 10_000, math.inf])
def test_the_least_recently_used_entries_are_evicted(tmp_path, max_bytes):
    write_entries(tmp_path, 10)
    persistent_cache.evict(tmp_path, max_bytes)
    kept = min(10, max_bytes // 1000)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{i}-cache" for i in range(int(kept))]


def test_others_may_evict_at_the_same_time(tmp_path, monkeypatch):
    write_entries(tmp_path, 10)
    unlink = Path.unlink

    def unlink_twice(file, **how):
        unlink(file)
        unlink(file, **how)

    monkeypatch.setattr(Path, "unlink", unlink_twice)
    persistent_cache.evict(tmp_path, 3000)
    assert len(list(tmp_path.iterdir())) == 3
    persistent_cache.evict(tmp_path / "missing", 0)


def test_the_cache_is_bounded_after_compilation(monkeypatch, no_cache_yet):
    folder = no_cache_yet / ".cache/jax-paged/compiled"
    use_persistent_cache()
    monkeypatch.setenv("JAX_PAGED_CACHE_GB", str(3000 / 2**30))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 2**62)  # only these entries
    write_entries(folder, 10)
    compiled = CompiledPrograms(BUCKETS, [], lower)
    for thread in compiled._threads:
        thread.join()
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("chosen", ["folder", "limit"])
def test_a_cache_that_the_user_has_set_up_is_left_alone(monkeypatch, no_cache_yet, chosen):
    folder = no_cache_yet / ("chosen" if chosen == "folder" else ".cache/jax-paged/compiled")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if chosen == "limit":
        jax.config.update("jax_compilation_cache_max_size", 10**6)
    monkeypatch.setenv("JAX_PAGED_CACHE_GB", "0")
    use_persistent_cache()
    write_entries(folder, 3)
    persistent_cache.bound_persistent_cache()
    assert len(list(folder.iterdir())) == 3


def test_the_limit_of_the_cache(monkeypatch, no_cache_yet):
    assert engine_args.max_cache_bytes() == 2 * 2**30
    for given, expected in (("0", 0), ("0.5", 2**29), ("inf", math.inf)):
        monkeypatch.setenv("JAX_PAGED_CACHE_GB", given)
        assert engine_args.max_cache_bytes() == expected
    for wrong in ("much", "-1", "nan"):
        monkeypatch.setenv("JAX_PAGED_CACHE_GB", wrong)
        with pytest.raises(ValueError, match=f"JAX_PAGED_CACHE_GB.*{wrong}"):
            use_persistent_cache()
