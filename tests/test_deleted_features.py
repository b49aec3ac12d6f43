"""A feature can be deleted: from every layer, with the lines that name it in the composition modules.

What is left gives the golden tokens, and the tests of the layers that do not use the feature pass.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.deleted_feature import copy_without, importers_of

# Words by which a test uses a feature.
FEATURES = {
    "beam_search": r"beam",
    "lora": r"lora|adapter",
    "multimodal": r"image|multi_?modal|mrope|vision|vl\b|siglip|patch_size",
    "pooling": r"pool(?:ing|er|ed)|embed|\bscore\(|classif|encoder",
    "speculation": r"specul|draft|eagle|ngram",
    "structured_output": r"structured|grammar|guided|schema|\bforms?\b",
}
# Composition modules; in the worker there are four, by when they import what.
COMPOSITION = {"composition", "feature_set", "step_features", "traced_features"}
TESTS = Path(__file__).parent


@pytest.mark.parametrize("feature", FEATURES)
def test_only_composition_modules_import_it(feature):
    assert {Path(module).stem for module in importers_of(feature)} <= COMPOSITION


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_the_rest_works_without_it(feature, tmp_path):
    copy = tmp_path / "copy"
    layers = copy_without(feature, copy)
    run(copy, "-m", "golden.generate", "--check", "plain")
    files = [path.relative_to(TESTS.parent) for layer in layers for path in unrelated_tests(layer, feature)]
    assert files, f"all tests of {layers} use {feature}"
    run(copy, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-q", *map(str, files))


def unrelated_tests(layer, feature):
    """Returns the files of tests of a layer that neither use a feature nor import a helper that does."""
    words, module = FEATURES[feature], rf"features\.{feature}\b|features import .*\b{feature}\b"
    return [
        path
        for path in sorted((TESTS / layer).glob("test_*.py"))
        if not re.search(words, path.read_text(), re.IGNORECASE)
        and not any(re.search(module, helper.read_text()) for helper in imported_helpers(path))
    ]


def imported_helpers(path):
    """Returns the helpers that a file of tests imports, and those that they import."""
    names = re.findall(r"^from helpers\.(\w+) import", path.read_text(), re.MULTILINE)
    paths = [TESTS / "helpers" / f"{name}.py" for name in names]
    return {path for path in paths if path.exists()}.union(*map(imported_helpers, filter(Path.exists, paths)))


def run(copy, *command):
    """Runs Python in the copy; its errors are this test's."""
    environment = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}"}
    result = subprocess.run(
        [sys.executable, *command], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
