"""Ahead-of-time compilation of all programs, in parallel; all but the largest buckets in the background."""

import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jax_paged.config import compilation_cache_dir
from jax_paged.worker.batch import Bucket

_LOGGER = logging.getLogger(__name__)

# On a GPU these make a step one CUDA graph: XLA would break it at slices of the packed buffer, and at the
# sampler's loops.
ONE_GRAPH: dict[str, str | bool] = {
    "xla_gpu_enable_dynamic_slice_fusion": False,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
}
# XLA compiles one program mostly on one core.
NUM_COMPILE_THREADS = 2


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """One compiled bucket and what it cost.

    Args:
        execute: The compiled program.
        trace_s: Seconds of tracing and lowering (Python).
        compile_s: Seconds of XLA's compilation, or of reading it from the cache.
        temp_bytes: Memory beside arguments and results while it runs.
    """

    execute: jax.stages.Compiled
    trace_s: float
    compile_s: float
    temp_bytes: int


def use_persistent_cache() -> None:
    """Turns JAX's compilation cache on, for programs of any size, unless the user has set it up.

    Raises:
        ValueError: If its folder can't be made.
    """
    if jax.config.jax_compilation_cache_dir is None:
        folder = Path(compilation_cache_dir())
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"the cache of compiled steps can't be kept in {folder}: {error}; set XDG_CACHE_HOME, or "
                "JAX_COMPILATION_CACHE_DIR, to a folder that can be written to"
            ) from error
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompiledBuckets:
    """The compiled step of every planned bucket, and the small programs beside them.

    The constructor returns when the largest bucket of each kind is there: any step fits one of them. The
    others follow in background threads; until one is there, steps use the next larger.

    Args:
        buckets: What to compile, each kind in ascending order.
        programs: Names of the others.
        lower: Traces and lowers the step of one bucket, or another program; called from several threads.
        options: Of the compiler.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        programs: list[str],
        lower: Callable[[Bucket | str], jax.stages.Lowered],
        options: dict[str, str | bool] | None = None,
    ) -> None:
        self._options = options
        self.buckets = buckets
        self._programs = programs
        self._lower = lower
        self._futures: dict[Bucket | str, concurrent.futures.Future[CompiledStep]] = {
            key: concurrent.futures.Future() for key in (*buckets, *programs)
        }
        # After the largest come the small ones: they make a lone user's steps quick.
        kinds = ([b for b in buckets if b.is_decode is kind] for kind in (False, True))
        largest = [max(kind) for kind in kinds if kind]
        rest = (b for b in buckets if b not in largest)
        self._queue: collections.deque[Bucket | str] = collections.deque([*largest, *programs, *rest])
        self._lock = threading.Lock()
        self._stopped = False
        self._threads = [threading.Thread(target=self._work) for _ in range(NUM_COMPILE_THREADS)]
        for thread in self._threads:
            thread.start()
        try:
            for bucket in largest:
                self._futures[bucket].result()
        except BaseException:
            self.stop()
            raise

    def smallest_ready(self, *, is_decode: bool, num_tokens: int, num_seqs: int) -> Bucket:
        """Returns the smallest compiled bucket that a step fits in."""
        for bucket in self.buckets:
            fits = bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_seqs
            if bucket.is_decode is is_decode and fits and self._is_compiled(bucket):
                return bucket
        raise AssertionError(f"no bucket for {num_tokens} tokens of {num_seqs} sequences")

    def __getitem__(self, key: Bucket | str) -> CompiledStep:
        return self._futures[key].result()

    def wait(self) -> None:
        """Returns when all buckets are compiled; raises what has failed one, CancelledError after `stop`."""
        for future in self._futures.values():
            future.result()

    def stop(self) -> None:
        """Ends the background threads; a compilation under way is waited for."""
        self._stopped = True
        for thread in self._threads:
            thread.join()
        for bucket in self._queue:
            self._futures[bucket].cancel()

    def plan(self) -> str:
        """Returns a table of the buckets: what is compiled, and what it cost."""
        lines = [f"{'bucket':<16}{'trace s':>9}{'compile s':>11}{'temp MiB':>10}"]
        for bucket in (*self.buckets, *self._programs):
            if self._is_compiled(bucket):
                step = self[bucket]
                mib = step.temp_bytes / 2**20
                lines.append(f"{bucket!s:<16}{step.trace_s:>9.2f}{step.compile_s:>11.2f}{mib:>10.1f}")
            else:
                state = "failed" if self._futures[bucket].done() else "to be compiled"
                lines.append(f"{bucket!s:<16}{state:>30}")
        return "\n".join(lines)

    def _is_compiled(self, bucket: Bucket | str) -> bool:
        future = self._futures[bucket]
        return future.done() and not future.cancelled() and future.exception() is None

    def _work(self) -> None:
        # Not daemons: a thread inside XLA when the interpreter ends would crash it. So they look up whether
        # the program is still there.
        while not self._stopped and threading.main_thread().is_alive():
            with self._lock:
                if not self._queue:
                    return
                bucket = self._queue.popleft()
            try:
                self._futures[bucket].set_result(self._compile(bucket))
            except BaseException as error:
                _LOGGER.error("%s was not compiled (of a bucket, steps use a larger one): %r", bucket, error)
                self._futures[bucket].set_exception(error)

    def _compile(self, bucket: Bucket | str) -> CompiledStep:
        start = time.perf_counter()
        lowered = self._lower(bucket)
        traced = time.perf_counter()
        compiled = lowered.compile(compiler_options=self._options)
        memory = compiled.memory_analysis()
        temp_bytes = 0 if memory is None else memory.temp_size_in_bytes
        return CompiledStep(compiled, traced - start, time.perf_counter() - traced, temp_bytes)
