"""Limits of the size of functions, values and packages, and of what a plain request enters."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# jax_paged/models and jax_paged/pallas_kernels are links to the folders at the top: every file counts once.
FOLDERS = ("jax_paged", "models", "pallas_kernels")
FILES = sorted(
    {f.resolve() for folder in FOLDERS for f in (ROOT / folder).rglob("*.py")} | {ROOT / "serve.py"}
)
# Without pagelet: the text that it learned, and its trainer.
PRODUCT = {f.relative_to(ROOT).as_posix(): f for f in FILES if f.parent.name != "pagelet"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# Names of variables, attributes and arguments that belong to a feature.
FEATURE_NAMES = re.compile(
    r"lora|adapter|draft|specul|eagle|burst|multi_step|grammar|constraint|structured_output|beam|image|mrope"
    r"|multimodal|pooling|encoder_(token|output|runner)|hook|logits_processor|processor_(state|arg)|state_slot"
    r"|recurrent|prompt_embeds|has_embeds|soft_prompt|snapshot|sleep|cascade|shared_prefix|stand_in|placeholder",
    re.IGNORECASE,
)


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(PRODUCT[name].read_text(encoding="utf-8"))


@cache
def code_lines(name: str) -> frozenset[int]:
    """Returns the lines that are not blank, not a comment and not part of a docstring."""
    docstrings = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, PRODUCT[name].read_text(encoding="utf-8").splitlines()), 1)
    return frozenset(i for i, line in lines if line and not line.startswith("#") and i not in docstrings)


def is_public(name: str) -> bool:
    return (name.count("/") == 1 and name.startswith("jax_paged/")) or name.startswith("jax_paged/config/")


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name in PRODUCT:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def test_functions_are_short() -> None:
    for name, node in functions():
        num_lines = sum(node.lineno <= i <= (node.end_lineno or 0) for i in code_lines(name))
        limit = 100 if name.startswith("pallas_kernels/") else 60
        assert num_lines <= limit, f"{name}: {node.name} has {num_lines} code lines"


def test_functions_have_few_parameters() -> None:
    for name, node in functions():
        if name.startswith("pallas_kernels/") or is_public(name) or node.name == "__init__":
            continue
        listed = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        num_args = sum(arg.arg not in ("self", "cls") for arg in listed)
        assert num_args <= 10, f"{name}: {node.name} has {num_args} parameters"


def test_values_have_few_fields() -> None:
    for name in filter(lambda name: not is_public(name), PRODUCT):
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ClassDef) and any(
                "dataclass" in ast.unparse(d) for d in node.decorator_list
            ):
                num_fields = sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
                is_settings = node.name.endswith(("Config", "Options", "Args"))
                assert is_settings or num_fields <= 20, f"{name}: {node.name} has {num_fields} fields"


def test_packages_have_few_files() -> None:
    files = Counter(Path(name).parent.as_posix() for name in PRODUCT if not name.endswith("__init__.py"))
    del files["models/families"]
    assert {package: num for package, num in files.items() if num > 15} == {}


def test_the_product_stays_small() -> None:
    assert sum(len(code_lines(name)) for name in PRODUCT) <= 37_900


@pytest.fixture(scope="module")
def core_path() -> dict[str, dict[str, list[int]]]:
    """What one plain greedy request enters and executes after warm-up: lines of functions, and lines."""
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "core_path.py")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    noted = json.loads(result.stdout.splitlines()[-1])
    return {name: entered for name, entered in noted.items() if name in PRODUCT}


def test_the_core_path_is_read_in_an_evening(core_path: dict[str, dict[str, list[int]]]) -> None:
    num_lines = sum(len(code_lines(name)) for name in core_path)
    num_executed = sum(len(code_lines(name) & set(entered["lines"])) for name, entered in core_path.items())
    assert len(core_path) <= 45
    assert num_lines <= 6_500
    assert num_executed / num_lines >= 0.25


def test_a_plain_request_enters_no_feature(core_path: dict[str, dict[str, list[int]]]) -> None:
    assert [name for name in core_path if "/features/" in name] == []


def test_what_a_plain_request_enters_hardly_mentions_features(
    core_path: dict[str, dict[str, list[int]]],
) -> None:
    mentions = []
    for name, entered in core_path.items():
        if is_public(name):
            continue
        lines = set()
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                lines |= lines_with_features(node) if first in entered["functions"] else set()
        mentions += [f"{name}:{line}" for line in sorted(lines & code_lines(name))]
    assert len(mentions) <= 60, mentions


def lines_with_features(function: ast.AST) -> set[int]:
    return {
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Name | ast.Attribute | ast.arg) and FEATURE_NAMES.search(name_of(node))
    }


def name_of(node: ast.Name | ast.Attribute | ast.arg) -> str:
    return (
        node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else node.arg
    )
