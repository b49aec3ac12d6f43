"""What the documents say of the files, and what the files must not say."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# jax_paged/models and jax_paged/pallas_kernels are links to the folders at the top: every file counts once.
PRODUCT = sorted(
    {
        f.resolve()
        for folder in ("jax_paged", "models", "pallas_kernels")
        for f in (ROOT / folder).rglob("*.py")
    }
    | {ROOT / "serve.py"}
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_the_links_are_links() -> None:
    for name in ("models", "pallas_kernels"):
        assert (ROOT / "jax_paged" / name).is_symlink()
        assert (ROOT / "jax_paged" / name).resolve() == ROOT / name


def test_architecture_names_every_file_and_no_other() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").replace("\\_", "_")
    named = re.findall(r"^\| (\S+(?<!__init__)\.py) \|", text, re.MULTILINE)
    files = [f for f in PRODUCT if f.name != "__init__.py"]
    assert sorted(named) == sorted(f.relative_to(ROOT).as_posix() for f in files)


def test_docstrings_say_something() -> None:
    for file in PRODUCT:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if docstring is not None:
                where = f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
                assert docstring.strip(". ").lower() != "the same", where


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


def test_only_one_file_of_the_emulator_knows_the_product() -> None:
    files = (ROOT / "tests" / "ptx_emulator").glob("*.py")
    assert [f.name for f in files if re.search(r"(import|from) jax_paged", f.read_text("utf-8"))] == [
        "gpu.py"
    ]
