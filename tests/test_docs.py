"""Documents name files, functions and anchors that exist; files contain no forbidden text."""

import ast
import builtins
import re
import runpy
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from jax_paged.models.registry import IMAGE_MODELS, MODELS, POOLING_MODELS

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
            own[""].update(names_in(node))
    for _ in range(5):  # the deepest hierarchy has fewer levels
        for name, inherited in bases.items():
            own[name] |= set().union(*(own[base] for base in inherited if base in own))
    return own


def names_in(node: ast.AST) -> list[str]:
    """Returns the names that a node defines: a class, a function, a parameter, or an assigned name."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case (
            ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store())
        ):
            return [name]
        case _:
            return []


@pytest.mark.parametrize("document", ["architecture.md", "internals.md"])
def test_files_and_names_in_documents_exist(document: str) -> None:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    diagrams = "\n".join(re.findall(r"^```mermaid\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for span in [*spans, *re.findall(r"\b[A-Z]\w+\.\w+", diagrams)]:
        name = re.sub(r"(\(.*\)|=.*)$", "", span)  # without arguments or a value
        owner, _, member = name.rpartition(".")
        if "/" in name and re.fullmatch(r"[\w./]+", name):
            assert any((root / name).exists() for root in (ROOT, ROOT / "jax_paged")), f"{document}: {name}"
        elif re.fullmatch(r"([A-Z]\w+\.)?[A-Za-z_]\w+", name) and not name.startswith("XLA_"):
            assert member in members().get(owner, ()) or hasattr(builtins, name), f"{document}: {name}"


def test_every_architecture_is_in_the_list_of_models() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in {*MODELS, *POOLING_MODELS, *IMAGE_MODELS}:
        assert f"`{name.replace('ForSequenceClassification', 'Model')}`" in text, name


def test_the_table_of_options_is_up_to_date() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "options.py"))
    written = (ROOT / "docs" / "server-options.md").read_text(encoding="utf-8")
    assert written == script["document"](), "run: make options"


def test_docstrings_say_something() -> None:
    for file in PRODUCT:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if docstring is not None:
                where = f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
                assert docstring.strip(". ").lower() != "the same", where


def anchors(document: Path) -> set[str]:
    """Returns the anchors of the headings of a document, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """Like "Returns"; "See ops.write_kv." is for an implementation, and "GET /path: ..." for a route."""
    first_words = re.compile(r"[A-Z][a-z]+s\b|See [\w.]+\.|See [\w.]+; |(GET|POST) /")
    for file in PRODUCT:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
            docstring = ast.get_docstring(node)
            if docstring and not is_property:
                where = f"{file.relative_to(ROOT)}: {node.name}"
                assert first_words.match(docstring), f"{where}: {docstring.splitlines()[0]}"


def test_links_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    for document in [*documents, *ROOT.glob("benchmarks/results/*.md")]:
        links = re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", document.read_text(encoding="utf-8"))
        for target, anchor in links:
            file = document.parent / target if target else document
            assert file.exists(), f"{document.name} links to {target}"
            assert not anchor or anchor in anchors(file), f"{document.name} links to {target}#{anchor}"


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
