"""Notebooks run from top to bottom, and each is the same as the script beside it."""

import ast
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

pytestmark = pytest.mark.thorough

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


# The others take longer, or run what other tests do.
SHORT = ("01", "02", "03", "10")
RUNS = [
    pytest.param(path, marks=() if path.name.startswith(SHORT) else pytest.mark.slow) for path in NOTEBOOKS
]


@pytest.mark.parametrize("notebook", RUNS, ids=lambda path: path.name)
def test_notebook_runs(notebook):
    # In a process of its own: nbmake collects notebooks as tests of their own.
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=300", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(notebook)], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_and_script_are_a_pair(notebook):
    def cells(path):
        return [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]

    assert cells(notebook) == cells(notebook.with_suffix(".py"))
    assert str(Path.home()) not in notebook.read_text()


def private_names(source):
    """Returns the names with a leading underscore that a script reaches for or imports."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names += [
                part for name in (module, *(alias.name for alias in node.names)) for part in name.split(".")
            ]
    return [
        name
        for name in names
        if name.startswith("_") and name != "_" and not (name.startswith("__") and name.endswith("__"))
    ]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_uses_no_private_names(notebook):
    assert private_names(notebook.with_suffix(".py").read_text()) == []


def test_private_names_are_found():
    source = "import a._b\nfrom _c.d import _e, f\n_ = f.g._h.__doc__\nx = f._()"
    assert sorted(private_names(source)) == ["_b", "_c", "_e", "_h"]
