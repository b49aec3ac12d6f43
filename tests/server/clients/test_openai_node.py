"""openai-node: the program beside this file, run by node."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

FOLDER = Path(sys.prefix) / "node"  # where make test-server installs the package
QUESTION = [{"role": "user", "content": "What is a block table?"}]


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node on this machine")
@pytest.mark.skipif(
    not (FOLDER / "node_modules" / "openai").is_dir(), reason=f"npm has not installed openai in {FOLDER}"
)
def test_openai_node(url, greedy):
    script = Path(__file__).with_name("openai_node.mjs")
    run = subprocess.run(
        ["node", str(script), str(FOLDER), url], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.rstrip("\n") == greedy(QUESTION, max_tokens=None).rstrip("\n")
