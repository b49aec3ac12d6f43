"""What the documents say of the files, and what the files must not say."""

import ast
import re
import subprocess
from collections import defaultdict
from functools import cache
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


def test_every_package_has_a_docstring() -> None:
    for folder in {file.parent for file in PRODUCT} - {ROOT}:
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        docstring = ast.get_docstring(ast.parse(text)) or ""
        assert len(docstring) >= 40, f"{folder.relative_to(ROOT)}/__init__.py needs a docstring"


@cache
def members() -> dict[str, set[str]]:
    """Returns the names that each class defines or inherits, by class; under "", those of all modules."""
    own: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for file in PRODUCT:
        own[""] |= {file.stem, file.parent.name}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef():
                    bases[node.name] |= {ast.unparse(base).split(".")[-1] for base in node.bases}
                    own[node.name] |= {name for part in ast.walk(node) for name in names_in(part)}
            own[""] |= set(names_in(node))
    for _ in range(5):  # the deepest hierarchy has fewer levels
        for name, inherited in bases.items():
            own[name] |= set().union(*(own[base] for base in inherited if base in own))
    return own


def names_in(node: ast.AST) -> list[str]:
    """Returns the names that a node defines: a class, a function, its parameters, or assigned targets."""
    match node:
        case ast.ClassDef(name=name):
            return [name]
        case ast.FunctionDef(name=name, args=args) | ast.AsyncFunctionDef(name=name, args=args):
            return [name, *(arg.arg for arg in [*args.args, *args.kwonlyargs])]
        case ast.Assign(targets=targets):
            names = [part for target in targets for part in ast.walk(target)]
        case ast.AnnAssign(target=target):
            names = [target]
        case _:
            return []
    return [n.id if isinstance(n, ast.Name) else n.attr for n in names if isinstance(n, ast.Name | ast.Attribute)]


@pytest.mark.parametrize("document", ["architecture.md", "internals.md"])
def test_files_and_names_in_documents_exist(document: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    diagrams = "\n".join(re.findall(r"^```mermaid\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for path in (span for span in spans if re.fullmatch(r"[\w.]+(/[\w.]+)*(/|\.\w+)", span) and "/" in span):
        found = [root / path for root in (ROOT, ROOT / "jax_paged") if (root / path).exists()]
        assert found, f"{document} names {path}"
    named = [re.sub(r"(\(.*\)|=.*)$", "", span) for span in spans]
    for name in [*named, *re.findall(r"\b[A-Z]\w+\.\w+", diagrams)]:
        owner, _, member = name.rpartition(".")
        if not re.fullmatch(r"(\w+\.)?[A-Za-z_]\w+", name) or owner in ("jax", "model", "state_moves"):
            continue
        assert member in members().get(owner, ()), f"{document} names {name}"


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
