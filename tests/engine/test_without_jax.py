"""An engine whose steps are run elsewhere checks and runs requests without importing JAX."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import jax_paged
from jax_paged import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from helpers.scripted_engine import ScriptedExecutor, run

args = EngineArgs({folder!r})
with LLMEngine(args, ScriptedExecutor(args)) as engine:
    checked = engine.check_request("abc?", SamplingParams(stop="x", logprobs=1))
    engine.add_request("a", checked)
    assert run(engine)["a"].outputs[0].text == "abc"
imported = [name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "flax", "llguidance")]
assert not imported, imported
"""


def test_an_engine_on_another_executor_does_not_import_jax(folder):
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "tests")])
    code = SCRIPT.format(folder=folder)
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": paths})
