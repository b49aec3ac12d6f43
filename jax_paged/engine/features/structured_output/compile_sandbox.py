"""Trial compilation of grammars in a subprocess, so that a failure can't take down the server.

llguidance recurses along references in native code and may overflow the stack. Its limits also do not bound
the time that it needs to decide whether a pattern can be matched. In both cases only the subprocess ends.
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

# Stack size of the subprocess's compile thread (bytes). Threads of the server, which compile a grammar after
# its trial, have a stack of at least four times this size.
_STACK_BYTES = 2**21
# Address space limit of the subprocess (bytes). A tokenizer takes a few hundred megabytes.
_MEMORY_BYTES = 2**33
# Limits per token mask, so that no grammar delays a step for long. Measured rates: 20 parser items per ms for
# very ambiguous grammars (200 to 4,000 for others), and 9,000 to 38,000 lexer steps per ms. A mask thus takes
# at most about 0.2 s.
_STEP_ITEMS = 4_000
_STEP_FUEL = 40_000
_CLOSED = "the engine is closed"


class CompileSandbox:
    """Subprocess that checks whether grammars can be compiled. Thread-safe.

    Args:
        settings: Returns the arguments of LLTokenizer.
    """

    def __init__(self, settings: Callable[[], dict[str, Any]]) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False

    def try_compile(self, source: str, seconds: float) -> None:
        """Compiles a grammar and computes its first mask, in the subprocess.

        Args:
            source: The grammar in llguidance's format.
            seconds: CPU time limit (seconds).

        Raises:
            ValueError: If the grammar can't be compiled.
        """
        with self._lock:
            process = self._get_process()
            answer = _ask(process, {"grammar": source, "seconds": seconds})
            if not answer:
                self._process = None
                raise ValueError(self._why_ended(process.wait(), seconds))
        error = json.loads(answer)
        if error is not None:
            raise ValueError(error)

    def close(self) -> None:
        """Ends the subprocess, even if it is compiling."""
        self._is_closed = True
        process = self._process
        if process is not None:
            _end(process)

    def _get_process(self) -> "subprocess.Popen[str]":
        """Returns the subprocess; starts it if necessary."""
        if self._is_closed:
            raise ValueError(_CLOSED)
        if self._process is None:
            settings, pipe = self._settings(), subprocess.PIPE
            # The file is run as a script, so that the package is not imported. -P keeps the file's folder out
            # of the module search path, because its modules could shadow others of the same name.
            command = [sys.executable, "-P", __file__]
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8")
            if not _ask(process, settings):
                raise RuntimeError(f"the grammar compiler has ended with exit status {process.wait()}")
            self._process = process
            weakref.finalize(self, _end, process).atexit = False
        return self._process

    def _why_ended(self, code: int, seconds: float) -> str:
        """Returns the reason why the subprocess ended, as text for the user."""
        if self._is_closed:
            return _CLOSED
        if code == -signal.SIGPROF:
            return f"it takes more than {seconds:g} s to compile"
        return "its references or rules are nested too deeply, or it is too large"


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def _ask(process: "subprocess.Popen[str]", question: dict[str, Any]) -> str:
    """Sends a question to the subprocess and returns its answer; "" if the subprocess has ended."""
    assert process.stdin is not None, "stdin of the subprocess is not a pipe"
    assert process.stdout is not None, "stdout of the subprocess is not a pipe"
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def compile_grammar(tokenizer: "LLTokenizer", source: str) -> "LLMatcher":
    """Compiles a grammar, and returns its matcher before the first token.

    Args:
        tokenizer: The model's tokenizer.
        source: The grammar in llguidance's format.

    Raises:
        ValueError: If the grammar is not valid or nothing matches it.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False, step_max_items=_STEP_ITEMS, step_lexer_fuel=_STEP_FUEL)
    root = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not root.is_error():
        # The first mask is cached for copies of the matcher, and its computation detects a grammar that
        # nothing matches.
        root.compute_bitmask()
    if root.is_error():
        problem = " ".join(root.get_error().removesuffix("<non-verbose/>").split())
        raise ValueError("no output can satisfy it" if problem == "NoExtensionBias" else problem)
    return root


def _serve() -> None:
    """Reads questions from stdin and writes answers to stdout, each as a line of JSON.

    The first question contains the arguments of LLTokenizer; its answer is null. Each other question contains
    a grammar and a time limit. Its answer is null if the grammar can be compiled, else the error message.
    """
    import resource  # only available on Unix

    from llguidance import LLTokenizer

    tokenizer = LLTokenizer(**json.loads(sys.stdin.readline()))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print("null", flush=True)
    for line in sys.stdin:
        question, error = json.loads(line), None
        # The timer counts CPU time. Its signal is not handled and ends the process.
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
        try:
            compile_grammar(tokenizer, question["grammar"])
        except ValueError as problem:
            error = str(problem)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    # On Ctrl-C, a terminal sends SIGINT to all processes of the server. The server itself ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(_STACK_BYTES)
    server = threading.Thread(target=_serve)
    server.start()
    server.join()
