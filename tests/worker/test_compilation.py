"""What is compiled: every step fits a bucket, and the next larger one serves until the right one is there."""

import concurrent.futures
import dataclasses
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_paged.worker.buckets import Bucket, plan_buckets
from jax_paged.worker.compilation import CompiledPrograms, use_persistent_cache
from jax_paged.worker.programs import Program
from jax_paged.worker.step import StepProgram


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 16, 64, 100, 256])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 5, 16, 64, 500, 512, 2048])
@pytest.mark.parametrize("kind", [{}, {"is_fine": True}, {"is_fine": True, "min_rows": 2}])
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
    buckets = plan_buckets(64, 512, is_fine=True)
    decode, mixed = ([b.num_tokens for b in buckets if b.is_decode is kind] for kind in (True, False))
    assert decode == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert mixed == [32, 64, 128, 256, 384, 512]
    many = [b.num_tokens for b in plan_buckets(256, 2048, is_fine=True) if b.is_decode]
    assert many == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 64])
@pytest.mark.parametrize("max_num_batched_tokens", [2, 5, 512])
@pytest.mark.parametrize("is_fine", [False, True])
def test_no_step_has_fewer_rows_than_wanted(max_num_seqs, max_num_batched_tokens, is_fine):
    """Neither of tokens nor of logits, even if a single sequence may run."""
    for bucket in plan_buckets(max_num_seqs, max_num_batched_tokens, is_fine=is_fine, min_rows=2):
        assert min(bucket.num_tokens, bucket.num_seqs) >= 2
    assert plan_buckets(max_num_seqs, 1, is_fine=is_fine, min_rows=2) == [Bucket(True, 1, 1)]


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
    assert compiled.smallest_ready(is_decode=True, num_tokens=1, num_seqs=1, num_logits=1) == BUCKETS[2]
    assert "to be compiled" in compiled.plan()
    gate.set()
    compiled.wait()
    assert compiled.smallest_ready(is_decode=True, num_tokens=1, num_seqs=1, num_logits=1) == BUCKETS[0]
    assert compiled.smallest_ready(is_decode=True, num_tokens=3, num_seqs=3, num_logits=3) == BUCKETS[2]
    assert compiled.smallest_ready(is_decode=False, num_tokens=3, num_seqs=1, num_logits=1) == BUCKETS[3]
    assert "to be compiled" not in compiled.plan()
    compiled.stop()


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
    assert compiled.smallest_ready(is_decode=True, num_tokens=2, num_seqs=2, num_logits=2) == BUCKETS[2]
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


def test_a_cache_folder_that_cannot_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
            use_persistent_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
