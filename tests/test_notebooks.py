"""Notebooks run from top to bottom, and each is the same as the script beside it."""

import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
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
