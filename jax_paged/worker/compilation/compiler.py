"""Ahead-of-time compilation of all programs, in parallel; all but the largest steps in the background."""

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

# On a GPU these make a step one CUDA graph: XLA would break it at slices of the packed buffer, and at the
# sampler's loops.
ONE_GRAPH: dict[str, str | bool | int] = {
    "xla_gpu_enable_dynamic_slice_fusion": False,
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE",
}
# In bfloat16 on a CPU: XLA's own choice is 256 bits, even where the processor has 512. (In float32 a single
# reading, which was not interleaved, showed no gain.)
WIDE_VECTORS: dict[str, str | bool | int] = {"xla_cpu_prefer_vector_width": 512}
# XLA compiles one program mostly on one core.
NUM_COMPILE_THREADS = 2
_LOG_INTERVAL_S = 1.0


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """One compiled program and what it cost.

    Args:
        execute: The compiled program: jax.stages.Compiled, or what stands for several of them.
        trace_s: Seconds of tracing and lowering (Python).
        compile_s: Seconds of XLA's compilation, or of reading it from the cache.
        memory: What XLA says of its arguments, results and temporaries; None on devices that do not tell.
    """

    execute: Any
    trace_s: float
    compile_s: float
    memory: Any

    @property
    def temp_bytes(self) -> int:
        """Memory beside arguments and results while it runs."""
        return 0 if self.memory is None else self.memory.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class CompileRecord:
    """What is known of one program.

    Args:
        program: Its name, such as "decode 8".
        state: "compiled"; "waiting" for its turn; "skipped", as max_compile_s was over; or "failed".
        num_tokens: Token rows of a step; 0 for other programs.
        num_seqs: Rows of logits of a step; 0 for other programs.
        trace_s: Seconds of tracing and lowering; 0 until it is compiled, as are the two that follow.
        compile_s: Seconds of XLA's compilation, or of reading it from the cache.
        temp_bytes: Memory beside arguments and results while it runs.
    """

    program: str
    state: Literal["compiled", "waiting", "skipped", "failed"]
    num_tokens: int = 0
    num_seqs: int = 0
    trace_s: float = 0.0
    compile_s: float = 0.0
    temp_bytes: int = 0


def trim_heap() -> None:
    """Returns memory that is free to the operating system, if the C library is glibc.

    XLA frees most of what it needs to compile a program, but glibc keeps it for later allocations.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):  # there is no C library, or no malloc_trim
        ctypes.CDLL(None).malloc_trim(0)


class CompiledPrograms:
    """The compiled step of every planned bucket, and all other programs.

    The constructor returns when the largest bucket of each kind is there: any step fits one of them. The
    others follow in background threads; until one is there, steps use the next larger.

    Args:
        buckets: Whose steps are compiled, each kind in ascending order.
        others: Programs beside the steps.
        lower: Traces and lowers a program, as jax.stages.Lowered has it; called from several threads.
        options: Of the compiler.
        max_compile_s: Seconds after which no other step is begun to be compiled; the largest of each kind
            and the other programs always are.
        is_ready: Whether a step that is compiled here is compiled in all processes; None for one process.

    Attributes:
        buckets: See Args.
        programs: What is compiled: the steps, then the others.
        num_traces: Programs that were traced so far.

    Raises:
        Exception: Whatever the compilation of one of the largest buckets has failed with.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        others: list[Program],
        lower: Callable[[Program], Any],
        options: dict[str, str | bool | int] | None = None,
        max_compile_s: float = math.inf,
        is_ready: Callable[[Program], bool] | None = None,
    ) -> None:
        self._options, self._max_compile_s = options, max_compile_s
        self.buckets = buckets
        self._lower, self._is_ready = lower, is_ready
        self.programs: list[Program] = [*map(StepProgram, buckets), *others]
        self._futures: dict[Program, concurrent.futures.Future[CompiledProgram]] = {
            program: concurrent.futures.Future() for program in self.programs
        }
        # After the largest come the small programs, then the small buckets: they make a lone user's steps
        # quick.
        by_variant = {b.variant: b for b in buckets}
        largest = [StepProgram(by_variant[variant]) for variant in sorted(by_variant)]
        needed = [*largest, *others]
        self._needed = frozenset(needed)
        rest = (p for p in self.programs if p not in self._needed)
        self._queue: collections.deque[Program] = collections.deque([*needed, *rest])
        self._lock = threading.Lock()
        # Tracing is Python: two at a time are no quicker, but leave running steps a third of the time.
        self._tracing = threading.Lock()
        self._stopped = False
        self._skipped: set[Program] = set()
        self._usable: set[Bucket] = set()  # those whose steps may run
        self.num_traces = 0
        self._num_compiled = 0
        self._start = self._logged = time.monotonic()
        self._threads = [
            threading.Thread(target=_compile, args=([self],)) for _ in range(NUM_COMPILE_THREADS)
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
        _LOGGER.info("compiled what every step can use in %.1f s; steps may run from now on", seconds)

    @property
    def progress(self) -> tuple[int, int]:
        """How many programs are compiled, and how many will be."""
        return self._num_compiled, len(self.programs) - len(self._skipped)

    def smallest_ready(
        self, variant: StepVariant, *, num_tokens: int, num_seqs: int, num_logits: int
    ) -> Bucket:
        """Returns the smallest compiled bucket of a variant that a step fits in.

        Args:
            variant: Variant of the step.
            num_tokens: Tokens of all rows together.
            num_seqs: Rows.
            num_logits: Logits rows.
        """
        for bucket in self.buckets:
            fits = bucket.variant == variant and bucket.num_tokens >= num_tokens
            fits = fits and bucket.num_seqs >= num_seqs and bucket.num_logits >= num_logits
            if fits and self._may_run(bucket):
                return bucket
        raise AssertionError(f"no bucket for {num_tokens} tokens of {num_seqs} sequences")

    def add(self, program: Program) -> None:
        """Compiles a program that hardly anybody needs, if it is not there."""
        if program not in self._futures:
            self.num_traces += 1
            future: concurrent.futures.Future[CompiledProgram] = concurrent.futures.Future()
            future.set_result(self._compile(program))
            self._futures[program] = future
            self.programs.append(program)
            self._note_compiled(program)

    def __getitem__(self, program: Program) -> CompiledProgram:
        """Returns a program, when it is compiled."""
        return self._futures[program].result()

    def run(self, program: Program, *args: Any) -> Any:
        """Runs a program, when it is compiled, and returns its results."""
        return self._futures[program].result().execute(*args)

    def wait(self) -> None:
        """Returns when everything is compiled; raises what has failed, CancelledError after `stop`."""
        for program, future in self._futures.items():
            try:
                future.result()
            except concurrent.futures.CancelledError:
                if program not in self._skipped:  # perhaps only since it was waited for
                    raise

    def when_compiled(self, note: Callable[[Program], None]) -> None:
        """Calls a function for each program once it is compiled, in the thread that has compiled it."""

        def note_done(program: Program) -> Callable[[concurrent.futures.Future[CompiledProgram]], None]:
            return lambda _: note(program) if self._is_compiled(program) else None

        for program, future in self._futures.items():
            future.add_done_callback(note_done(program))

    def stop(self) -> None:
        """Ends the background threads; a compilation under way is waited for."""
        self._stopped = True
        for thread in self._threads:
            thread.join()
        for program in self._queue:
            self._futures[program].cancel()

    def abandon(self) -> None:
        """Ends the background threads after the programs that they compile now, without waiting for them.

        For an engine that nothing refers to any more. Garbage collection may call it in any thread, also one
        that holds a lock of this object, so that it takes none. What programs are traced for, such as the
        weights, is let go of at once.
        """
        self._stopped = True
        self._lower = _lower_nothing

    def report(self) -> list[CompileRecord]:
        """Returns what is compiled, and what it cost."""
        return [self._record(program) for program in self.programs]

    def plan(self) -> str:
        """Returns the report as a table."""
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
        # Not daemons: a thread inside XLA when the interpreter ends would crash it. So they look up whether
        # the program is still there.
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
                self._note_compiled(program)
                self._futures[program].set_result(compiled)
            except BaseException as error:
                if self._stopped:  # what it is traced for may be gone
                    self._futures[program].cancel()
                    return
                _LOGGER.error("%s was not compiled (of a step, a larger one is used): %r", program, error)
                self._futures[program].set_exception(error)

    def _note_compiled(self, program: Program) -> None:
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
        # The threads that compile do not inherit the settings of the thread that has started them.
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


def _compile(programs: list[CompiledPrograms]) -> None:
    """Compiles programs in a background thread, then tidies up.

    Args:
        programs: What is compiled; it is taken out of the list, so that the thread does not keep it any
            longer than it works on it.
    """
    programs.pop()._work()
    bound_persistent_cache()
    trim_heap()


def _lower_nothing(_: Program) -> NoReturn:
    raise RuntimeError("the engine is gone")
