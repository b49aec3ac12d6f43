"""The package's names: all there, loaded when they are asked for, and clear about what is not built."""

import subprocess
import sys
from pathlib import Path

import pytest

import jax_paged

ROOT = Path(__file__).parent.parent.parent
LIGHT = """
import sys
import jax_paged
jax_paged.SamplingParams(n=2)
jax_paged.EngineArgs()
jax_paged.TokensPrompt(prompt_token_ids=[1])
jax_paged.RequestOutputKind.DELTA
loaded = {name.partition(".")[0] for name in sys.modules}
heavy = {"jax", "jaxlib", "flax", "numpy", "ml_dtypes", "transformers", "tokenizers", "fastapi", "tqdm"}
assert not loaded & heavy, loaded & heavy
"""


def test_importing_the_package_loads_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, check=True, timeout=60)


def test_every_name_can_be_imported() -> None:
    for name in jax_paged.__all__:
        assert getattr(jax_paged, name) is not None


def test_what_is_not_built_says_so() -> None:
    with pytest.raises(
        ImportError, match="jax_paged has no ModelRegistry: models outside the project are not"
    ):
        from jax_paged import ModelRegistry  # noqa: F401 # pyright: ignore
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        from jax_paged import Nonsense  # noqa: F401 # pyright: ignore
