"""The server as its users start it, for clients that are installed in an environment of their own."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jax_paged import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[3]

# make test-server installs them; elsewhere there is nothing to run here.
if importlib.util.find_spec("openai") is None:
    collect_ignore_glob = ["test_*.py"]

# Clients must not look anything up: litellm asks for prices, lm-eval for metrics and data sets.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., str]]:
    """Starts a server with further options; returns its URL."""
    running = []

    def start(*options: str) -> str:
        command = [sys.executable, str(ROOT / "serve.py"), "--port=0", "--dtype=float32", *options]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://[\d.:]+", line):
                return found.group()
        raise AssertionError(f"the server ended with status {process.wait()}")

    yield start
    for process in running:
        process.terminate()
    for process in running:
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.fixture(scope="session")
def url(start: Callable[..., str]) -> str:
    """Of a server of the model that is built in."""
    return start("--max-num-seqs=16", "--max-model-len=512")


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same model without a server."""
    with LLM(dtype="float32", max_num_seqs=16, max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="session")
def greedy(llm: LLM) -> Callable[..., str]:
    """Continues a prompt, or answers a question, with the likeliest tokens."""

    def greedy(prompt: Any, **settings: Any) -> str:
        params = SamplingParams(**{"temperature": 0, "max_tokens": 16, **settings})
        run = llm.generate if isinstance(prompt, str) else llm.chat
        return run(prompt, params, use_tqdm=False)[0].outputs[0].text

    return greedy
