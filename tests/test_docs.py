"""What the documents say of the files, and what the files must not say."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = [
    ROOT / "serve.py",
    *(
        f
        for folder in ("jax_paged", "models", "pallas_kernels")
        for f in sorted((ROOT / folder).rglob("*.py"))
    ),
]


def test_architecture_names_every_file_and_no_other() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").replace("\\_", "_")
    named = re.findall(r"^\| (\S+\.py) \|", text, re.MULTILINE)
    assert sorted(named) == sorted(f.relative_to(ROOT).as_posix() for f in PRODUCT)


def lines_of_code(text: str) -> int:
    """Counts lines that are not blank, not a comment and not part of a docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate((line.strip() for line in text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and i not in docstrings for i, line in lines)


def test_the_product_stays_small() -> None:
    # pagelet is left out: the text that it learned, and its trainer.
    served = [f for f in PRODUCT if f.parent.name != "pagelet"]
    assert sum(lines_of_code(f.read_text(encoding="utf-8")) for f in served) < 8000


def test_links_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_no_file_names_a_home_folder_or_a_package_host() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    forbidden = re.compile(r"/(home|Users|root|work)/\w|find-links|(extra-)?index-url")
    for name in tracked.splitlines():
        file = ROOT / name
        if file.suffix == ".safetensors" or file == Path(__file__) or not file.is_file():
            continue
        found = forbidden.search(file.read_text(encoding="utf-8", errors="replace"))
        assert found is None, f"{name} holds {found and found.group()!r}"
