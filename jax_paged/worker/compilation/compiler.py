"""Ahead-of-time compilation of all programs, in parallel, and for most programs in the background."""

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from jax_paged.pallas_kernels.jax_settings import default_settings
from jax_paged.worker.compilation.buckets import Bucket, StepVariant
from jax_paged.worker.compilation.persistent_cache import bound_persistent_cache
from jax_paged.worker.compilation.programs import Program
from jax_paged.worker.traced_step import StepProgram

_LOGGER = logging.getLogger(__name__)

# Options that make a step one CUDA graph. By default, XLA would split the graph at slices of the packed
# buffer and at the loops of the sampler.
ONE_GRAPH: dict[str, str | bool | int] = {
    "xla_gpu_enable_dynamic_slice_fusion": False,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
}
# Options for bfloat16 on a CPU. XLA's default is 256 bits even if the processor has vectors of 512 bits. In
# float32, a single measurement showed no gain.
WIDE_VECTORS: dict[str, str | bool | int] = {"xla_cpu_prefer_vector_width": 512}
# XLA uses mostly one core to compile a program, so several programs are compiled in parallel.
NUM_COMPILE_THREADS = 2
_LOG_INTERVAL_S = 1.0


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program and the cost of its compilation.

    Args:
        execute: The compiled program: a jax.stages.Compiled, or a ProgramChain that calls several of them.
        trace_s: Time for tracing and lowering in Python (seconds).
        compile_s: Time for XLA's compilation, or for reading the program from the cache (seconds).
        memory: XLA's memory analysis; None on devices without one.
    """

    execute: Any
    trace_s: float
    compile_s: float
    memory: Any

    @property
    def temp_bytes(self) -> int:
        """The memory that a run needs in addition to arguments and results (bytes)."""
        return 0 if self.memory is None else self.memory.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class CompileRecord:
    """State and compilation cost of one program.

    Args:
        program: Name of the program, such as "decode 8".
        state: "compiled"; "waiting" for compilation; "skipped" because max_compile_s had passed; or "failed".
        num_tokens: Token rows of a step; 0 for other programs.
        num_seqs: Scheduled sequences of a step; 0 for other programs.
        trace_s: Time for tracing and lowering (seconds); 0 until the program is compiled.
        compile_s: Time for XLA's compilation, or for reading the program from the cache (seconds); 0 until
            the program is compiled.
        temp_bytes: Memory that a run needs in addition to arguments and results (bytes); 0 until the program
            is compiled.
    """

    program: str
    state: Literal["compiled", "waiting", "skipped", "failed"]
    num_tokens: int = 0
    num_seqs: int = 0
    trace_s: float = 0.0
    compile_s: float = 0.0
    temp_bytes: int = 0


def trim_heap() -> None:
    """Returns free heap memory to the operating system, if the C library is glibc.

    XLA frees most of the memory that a compilation needs, but glibc keeps it for later allocations.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):  # no C library or no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


class CompiledPrograms:
    """The compiled steps of all buckets, and all other programs.

    The constructor returns when the largest bucket of each variant is compiled, because every step fits into
    one of these. The other programs are compiled in background threads. Until a bucket is compiled, steps use
    the next larger one.

    Args:
        buckets: The buckets of the steps, for each variant in ascending order.
        other_programs: Programs other than steps.
        lower: Traces and lowers a program; the result has the interface of jax.stages.Lowered. It is called
            from several threads.
        options: Compiler options.
        max_compile_s: Time after which the compilation of further steps is skipped (seconds). The largest
            bucket of each variant and the other programs are always compiled.
        is_ready: Returns whether all processes have compiled a step that is compiled here; None for a single
            process.

    Attributes:
        buckets: See Args.
        programs: All programs: the steps, then the others.
        num_traces: Number of programs traced so far.

    Raises:
        Exception: If one of the largest buckets cannot be compiled; the error of its compilation.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        other_programs: list[Program],
        lower: Callable[[Program], Any],
        options: dict[str, str | bool | int] | None = None,
        max_compile_s: float = math.inf,
        is_ready: Callable[[Program], bool] | None = None,
    ) -> None:
        self._options, self._max_compile_s = options, max_compile_s
        self.buckets = buckets
        self._lower, self._is_ready = lower, is_ready
        self.programs: list[Program] = [*map(StepProgram, buckets), *other_programs]
        self._futures: dict[Program, concurrent.futures.Future[CompiledProgram]] = {
            program: concurrent.futures.Future() for program in self.programs
        }
        # After the largest buckets come the other programs, then the buckets of all variants from small to
        # large. Small buckets make steps with few requests fast.
        by_variant = {b.variant: b for b in buckets}
        largest = [StepProgram(by_variant[variant]) for variant in sorted(by_variant)]
        needed = [*largest, *other_programs]
        self._needed = frozenset(needed)
        by_size = map(StepProgram, sorted(buckets, key=lambda b: b.num_tokens))
        rest = (p for p in by_size if p not in self._needed)
        self._queue: collections.deque[Program] = collections.deque([*needed, *rest])
        self._lock = threading.Lock()
        # Tracing is Python code, so only one thread does it at a time. A second one would not make tracing
        # faster, but running steps would get only a third of the interpreter's time.
        self._tracing = threading.Lock()
        self._stopped = False
        self._skipped: set[Program] = set()
        self._usable: set[Bucket] = set()  # compiled in all processes
        self.num_traces = 0
        self._num_compiled = 0
        self._start = self._logged = time.monotonic()
        self._threads = [
            threading.Thread(target=_run_thread, args=([self],)) for _ in range(NUM_COMPILE_THREADS)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for program in largest:
                self._futures[program].result()
        except BaseException:
            self.stop()
            raise
        seconds = time.monotonic() - self._start
        _LOGGER.info("compiled the largest buckets in %.1f s; steps can run from now on", seconds)

    @property
    def progress(self) -> tuple[int, int]:
        """The number of compiled programs, and the total number of programs without skipped ones."""
        return self._num_compiled, len(self.programs) - len(self._skipped)

    def smallest_ready(
        self, variant: StepVariant, *, num_tokens: int, num_seqs: int, num_logits: int
    ) -> Bucket:
        """Returns the smallest compiled bucket of a variant that a step fits into.

        Args:
            variant: Variant of the step.
            num_tokens: Number of tokens of all sequences.
            num_seqs: Number of scheduled sequences.
            num_logits: Number of logits rows.
        """
        for bucket in self.buckets:
            fits = bucket.variant == variant and bucket.num_tokens >= num_tokens
            fits = fits and bucket.num_seqs >= num_seqs and bucket.num_logits >= num_logits
            if fits and self._may_run(bucket):
                return bucket
        raise AssertionError(f"no compiled bucket fits {num_tokens} tokens of {num_seqs} sequences")

    def add(self, program: Program) -> None:
        """Compiles a rarely used program in this thread, unless it is already compiled."""
        if program not in self._futures:
            self.num_traces += 1
            future: concurrent.futures.Future[CompiledProgram] = concurrent.futures.Future()
            future.set_result(self._compile(program))
            self._futures[program] = future
            self.programs.append(program)
            self._count_compiled(program)

    def __getitem__(self, program: Program) -> CompiledProgram:
        """Waits until a program is compiled, and returns it."""
        return self._futures[program].result()

    def run(self, program: Program, *args: Any) -> Any:
        """Waits until a program is compiled, runs it, and returns its results."""
        return self._futures[program].result().execute(*args)

    def wait(self) -> None:
        """Waits until all programs are compiled.

        Raises:
            Exception: If a compilation has failed; the error of the compilation.
            CancelledError: If `stop` was called.
        """
        for program, future in self._futures.items():
            try:
                future.result()
            except concurrent.futures.CancelledError:
                if program not in self._skipped:  # it may have been skipped during the wait
                    raise

    def on_compiled(self, callback: Callable[[Program], None]) -> None:
        """Registers a callback for compiled programs.

        For programs that are already compiled, it runs at once. For the others, it runs in the thread that
        compiles them, but not for programs that `add` compiles later.
        """

        def call_back(program: Program) -> Callable[[concurrent.futures.Future[CompiledProgram]], None]:
            return lambda _: callback(program) if self._is_compiled(program) else None

        for program, future in self._futures.items():
            future.add_done_callback(call_back(program))

    def stop(self) -> None:
        """Ends the background threads. Waits for compilations that have started."""
        self._stopped = True
        for thread in self._threads:
            thread.join()
        for program in self._queue:
            self._futures[program].cancel()

    def stop_without_waiting(self) -> None:
        """Ends the background threads after their current compilations, without waiting for them.

        It is called when an engine is no longer referenced. The garbage collector may call it in any thread,
        even one that holds a lock of this object, so it takes no lock. It also releases the function that
        refers to the weights and other traced arguments.
        """
        self._stopped = True
        self._lower = _raise_stopped

    def report(self) -> list[CompileRecord]:
        """Returns a record of each program."""
        return [self._record(program) for program in self.programs]

    def plan(self) -> str:
        """Returns the records as a table."""
        records = self.report()
        width = max(16, *(len(record.program) + 1 for record in records))
        lines = [f"{'program':<{width}}{'trace s':>9}{'compile s':>11}{'temp MiB':>10}"]
        for record in records:
            cells = f"{record.trace_s:>9.2f}{record.compile_s:>11.2f}{record.temp_bytes / 2**20:>10.1f}"
            state = "to be compiled" if record.state == "waiting" else record.state
            lines.append(f"{record.program:<{width}}{cells if state == 'compiled' else f'{state:>30}'}")
        return "\n".join(lines)

    def _record(self, program: Program) -> CompileRecord:
        bucket = program.bucket if isinstance(program, StepProgram) else None
        sizes = (0, 0) if bucket is None else (bucket.num_tokens, bucket.num_seqs)
        if self._is_compiled(program):
            done = self[program]
            costs = done.trace_s, done.compile_s, done.temp_bytes
            return CompileRecord(str(program), "compiled", *sizes, *costs)
        is_done = self._futures[program].done()
        state = "skipped" if program in self._skipped else "failed" if is_done else "waiting"
        return CompileRecord(str(program), state, *sizes)

    def _may_run(self, bucket: Bucket) -> bool:
        if bucket not in self._usable:
            program = StepProgram(bucket)
            if not self._is_compiled(program) or (self._is_ready and not self._is_ready(program)):
                return False
            self._usable.add(bucket)
        return True

    def _is_compiled(self, program: Program) -> bool:
        future = self._futures[program]
        return future.done() and not future.cancelled() and future.exception() is None

    def _work(self) -> None:
        # The threads are not daemons because a thread that runs XLA code while the interpreter exits would
        # crash it. Instead, they end when the main thread has ended.
        while not self._stopped and threading.main_thread().is_alive():
            with self._lock:
                if not self._queue:
                    return
                program = self._queue.popleft()
                seconds = time.monotonic() - self._start
                if program not in self._needed and seconds > self._max_compile_s:
                    self._skipped.add(program)
                    self._futures[program].cancel()
                    continue
                self.num_traces += 1
            try:
                compiled = self._compile(program)
                trim_heap()  # the heap of one compilation can be larger than the weights of a small model
                self._count_compiled(program)
                self._futures[program].set_result(compiled)
            except BaseException as error:
                if self._stopped:  # the traced arguments may have been released
                    self._futures[program].cancel()
                    return
                _LOGGER.error("compiling %s failed; for a step, a larger bucket is used: %r", program, error)
                self._futures[program].set_exception(error)

    def _count_compiled(self, program: Program) -> None:
        with self._lock:
            self._num_compiled += 1
            (done, num_programs), now = self.progress, time.monotonic()
            is_due = done == num_programs or now - self._logged >= _LOG_INTERVAL_S
            if is_due:
                self._logged = now
        seconds = now - self._start
        level = logging.INFO if is_due else logging.DEBUG
        _LOGGER.log(level, "compiled %d of %d programs in %.1f s: %s", done, num_programs, seconds, program)

    def _compile(self, program: Program) -> CompiledProgram:
        # The compiling threads do not inherit JAX settings from the thread that started them.
        with default_settings():
            return self._traced_and_compiled(program)

    def _traced_and_compiled(self, program: Program) -> CompiledProgram:
        with self._tracing:
            start = time.perf_counter()
            lowered = self._lower(program)
            traced = time.perf_counter()
        compiled = lowered.compile(compiler_options=self._options)
        compile_s = time.perf_counter() - traced
        return CompiledProgram(compiled, traced - start, compile_s, compiled.memory_analysis())


def _run_thread(holder: list[CompiledPrograms]) -> None:
    """Compiles programs in a background thread, then limits the size of the cache and trims the heap.

    Args:
        holder: A list that contains the CompiledPrograms object. The object is removed from the list, so that
            the thread refers to it only while it compiles.
    """
    holder.pop()._work()
    bound_persistent_cache()
    trim_heap()


def _raise_stopped(_: Program) -> NoReturn:
    raise RuntimeError("compilation was stopped because the engine is no longer referenced")
