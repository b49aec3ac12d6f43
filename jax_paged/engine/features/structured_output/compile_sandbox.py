"""Forms compiled on trial in a process of its own: what overflows the stack or never ends, ends it alone.

llguidance recurses natively along references, and its limits do not bound how long it asks whether a pattern
can be met: either would take the whole server with it.
"""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Of a stack on trial; the threads that compile a form after that have four times as much, or more.
_STACK_BYTES = 2**21
# Of the process's addresses. A tokenizer takes some hundred megabytes.
_MEMORY_BYTES = 2**33
# Per mask: parser items (20 per ms) and steps of the lexer (14 per ms), so that no form holds up a step.
_STEP_ITEMS = 4_000
_STEP_FUEL = 40_000
_CLOSED = "the engine is closed"


class CompileSandbox:
    """Tells whether forms can be compiled; may be called from any thread.

    Args:
        settings: Returns the arguments of LLTokenizer.
    """

    def __init__(self, settings: Callable[[], dict[str, Any]]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def try_compile(self, source: str, seconds: float) -> None:
        """Compiles a form and makes its first mask.

        Args:
            source: In llguidance's terms.
            seconds: Of a processor's time that it may take.

        Raises:
            ValueError: If it can't be compiled.
        """
        with self._lock:
            process = self._started()
            answer = _answer(process, {"form": source, "seconds": seconds})
            if not answer:
                self._process = None
                raise ValueError(self._why_ended(process.wait(), seconds))
        error = json.loads(answer)
        if error is not None:
            raise ValueError(error)

    def close(self) -> None:
        """Ends the process, and what it compiles."""
        self._is_closed = True
        process = self._process
        if process is not None:
            _end(process)

    def _started(self) -> "subprocess.Popen[str]":
        if self._is_closed:
            raise ValueError(_CLOSED)
        if self._process is None:
            settings, pipe = self._settings(), subprocess.PIPE
            # Not as a part of the package, and without its folder, whose modules' names are others' too.
            command = [sys.executable, "-P", __file__]
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
            if not _answer(process, settings):
                raise RuntimeError(f"the process that tries forms ends with {process.wait()}")
            self._process = process
            weakref.finalize(self, _end, process).atexit = False
        return self._process

    def _why_ended(self, code: int, seconds: float) -> str:
        if self._is_closed:
            return _CLOSED
        if code == -signal.SIGPROF:
            return f"it takes more than {seconds:g} s to compile; allowed: less"
        return "its references or rules are nested too deeply, or it is too large"


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def _answer(process: "subprocess.Popen[str]", question: dict[str, Any]) -> str:
    """Returns what the process of a trial answers; "" if it has ended."""
    assert process.stdin is not None, "it is a pipe"
    assert process.stdout is not None, "it is a pipe"
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def compiled(tokenizer: "LLTokenizer", source: str) -> "LLMatcher":
    """Returns what follows outputs of a form, from the first token on.

    Args:
        tokenizer: Of the model.
        source: The form in llguidance's terms.

    Raises:
        ValueError: If it is not valid or can't be met.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, step_max_items=_STEP_ITEMS, step_lexer_fuel=_STEP_FUEL)
    root = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not root.is_error():
        root.compute_bitmask()  # what copies then know already; and what can't be met is found
    if root.is_error():
        problem = " ".join(root.get_error().removesuffix("<non-verbose/>").split())
        raise ValueError("nothing meets it" if problem == "NoExtensionBias" else problem)
    return root


def _serve() -> None:
    """Answers questions, one per line, until there are no more."""
    import resource  # which only Unix has

    from llguidance import LLTokenizer

    tokenizer = LLTokenizer(**json.loads(sys.stdin.readline()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print("null", flush=True)
    for line in sys.stdin:
        question, error = json.loads(line), None
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])  # unhandled, its signal ends the process
        try:
            compiled(tokenizer, question["form"])
        except ValueError as problem:
            error = str(problem)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server's processes all
    threading.stack_size(_STACK_BYTES)
    server = threading.Thread(target=_serve)
    server.start()
    server.join()
