"""The code blocks of the documents run, or say why they cannot.

A block of Python is executed after those before it in its document. A block that needs a download, a GPU or
other files has a comment in front: `<!-- fragment: why it does not run -->`. Fragments are parsed only.
"""

import ast
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import jax_paged
from jax_paged import LLM
from jax_paged.arguments.command_line import Parser
from jax_paged.config.engine_args import EngineArgs
from jax_paged.server.launch.cli import make_batch_parser, make_parser

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("deploy/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("models/pagelet/*.md"),
    ]
)
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FRAGMENT = re.compile(r"<!-- fragment: (.+) -->\n\Z")
# Few small steps, each compiled when it is first needed, and in most cases found in the cache.
SMALL = {
    "max_compile_s": 0,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 200,
    "num_scheduler_steps": 1,
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    Args:
        document: The file.
        line: The number of its first line of code.
        language: The word behind the fence.
        code: The lines in it.
        is_fragment: Whether a comment says that it cannot run.
    """

    document: Path
    line: int
    language: str
    code: str
    is_fragment: bool


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        indent, language, code = found.groups()
        code = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        line = text.count("\n", 0, found.start()) + 2
        yield Block(document, line, language, code, bool(FRAGMENT.search(text[: found.start()])))


PYTHON = [block for document in DOCUMENTS for block in blocks(document) if block.language == "python"]
EXECUTED = sorted({block.document for block in PYTHON if not block.is_fragment})


def name_of(value: Any) -> str | None:
    if isinstance(value, Block):
        return f"{value.document.relative_to(ROOT)}:{value.line}"
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


class SharedLLM(LLM):
    """LLM that stays open, with small limits in place of the defaults."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(SMALL | kwargs))

    def close(self) -> None:
        """Does nothing: the next block with these arguments goes on with the engine."""


@pytest.fixture(scope="module")
def make_llm() -> Iterator[Callable[..., LLM]]:
    """Makes an LLM, or returns the one that was made with the same arguments."""
    made: dict[str, LLM] = {}

    def make(model: str = "pagelet", **kwargs: Any) -> LLM:
        key = repr((model, kwargs))
        if key not in made:
            made[key] = SharedLLM(model, **kwargs)
        return made[key]

    yield make
    for llm in made.values():
        LLM.close(llm)


@pytest.mark.parametrize("document", EXECUTED, ids=name_of)
def test_blocks_run(document, make_llm, monkeypatch, tmp_path):
    monkeypatch.setattr(jax_paged, "LLM", make_llm)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(document):
        if block.language == "python" and not block.is_fragment:
            # With the lines of the document in tracebacks.
            code = compile("\n" * (block.line - 1) + block.code, str(document), "exec")
            exec(code, namespace)


@pytest.mark.parametrize("block", PYTHON, ids=name_of)
def test_blocks_parse_and_name_arguments_that_there_are(block):
    tree = ast.parse(block.code, name_of(block) or "")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        cls = getattr(jax_paged, getattr(call.func, "id", ""), None)
        if isinstance(cls, type):
            given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
            allowed = EngineArgs if cls is LLM else cls
            own = set(cls.__init__.__annotations__) if cls is LLM else set()
            assert given <= own | set(getattr(allowed, "__dataclass_fields__", given)), name_of(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "jax_paged":
            assert all(hasattr(jax_paged, alias.name) for alias in node.names), name_of(block)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_is_in_blocks_that_say_so(document):
    text = document.read_text(encoding="utf-8")
    outside = BLOCK.sub(lambda found: "" if found[2] else found[3], text)
    found = re.findall(
        r"^(?: {4})?(?:from \w+ import .*|import \w+$|(?:\w+ = )?(?:LLM|llm\.\w+)\(.*)", outside, re.M
    )
    assert not found
    comments = re.findall(r"^ *<!-- fragment.*", text, re.MULTILINE)
    assert len(comments) == sum(block.is_fragment for block in blocks(document))


def commands(document: Path) -> Iterator[list[str]]:
    """Returns the words of each line that runs the command `jax-paged`, without the command."""
    text = document.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("    ") or line.startswith("jax-paged "):
            found = re.search(
                r"(?:^|[\s/])jax-paged ((?:serve |run-batch |check-kernels |health |--).*)", line
            )
            if found:
                command = re.split(r"[|&#'\"]| \.\.\.", found[1])[0]
                yield shlex.split(command)


COMMANDS = [(document, words) for document in DOCUMENTS for words in commands(document)]
PARSERS: dict[str, Callable[[], Parser]] = {"run-batch": make_batch_parser}


@pytest.mark.parametrize(("document", "words"), COMMANDS, ids=lambda v: name_of(v) or " ".join(v))
def test_commands_name_options_that_there_are(document, words):
    if words[0] == "health":
        words = [word for word in words if word not in ("--pid", "--timeout")]
    options = PARSERS.get(words[0], make_parser)()._option_string_actions
    given = [word.split("=")[0] for word in words if word.startswith("-")]
    assert set(given) <= set(options), document


def test_there_are_commands_and_blocks():
    assert len(COMMANDS) > 5
    assert len(EXECUTED) > 3
    assert "torch" not in sys.modules
