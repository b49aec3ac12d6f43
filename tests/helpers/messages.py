"""Lists the texts that users of the product read: errors, log lines and the help of options.

    PYTHONPATH=tests python -m helpers.messages [PATH ...]

prints one per line, with its file and line; by default those of the whole product.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("jax_paged", "models", "pallas_kernels")


@dataclass(frozen=True)
class Message:
    """A text in the source.

    Args:
        file: The source file.
        line: Its line number.
        text: The text; the expressions of an f-string are in braces.
    """

    file: Path
    line: int
    text: str


def messages_in(file: Path) -> Iterator[Message]:
    """Returns the strings of a file that have at least two words, except docstrings and format names."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    ignored = {id(part) for node in ast.walk(tree) for part in _not_messages(node)}
    for node in ast.walk(tree):
        if id(node) in ignored or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        text = _text(node)
        if re.search(r"[a-z]{2,} [a-z{`%]", text):
            yield Message(file, node.lineno, " ".join(text.split()))


def _not_messages(node: ast.AST) -> Iterator[ast.AST]:
    """Returns docstrings, type annotations, and the parts of f-strings, which are listed as wholes."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in ast.walk(node) if part is not node)
    if isinstance(node, ast.Subscript):
        yield from ast.walk(node.slice)
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield from ast.walk(node.annotation)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    parts = (
        part.value if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
        for part in node.values
        if isinstance(part, ast.Constant | ast.FormattedValue)
    )
    return "".join(map(str, parts))


def main() -> None:
    """Prints the texts of the files or folders that the command line names."""
    for name in sys.argv[1:] or PRODUCT:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            for message in sorted(messages_in(file), key=lambda m: m.line):
                print(f"{file.relative_to(ROOT)}:{message.line}: {message.text}")


if __name__ == "__main__":
    main()
