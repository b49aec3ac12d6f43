"""A real model on the page, in a real browser: `make test-browser`. The model (100 MB) is downloaded once.

Skipped where playwright, Chromium or all sources of the model are missing.
"""

from collections.abc import Iterator

import pytest
from server.conftest import Served, serving

from jax_paged import AsyncLLMEngine, EngineArgs
from jax_paged.models.checkpoint import resolve_model_dir

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-browser")

from server.test_browser import CHROMIUM, ask, browser, open_page, settings

__all__ = ["browser", "open_page"]  # fixtures
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server with as few steps to compile as possible."""
    try:
        resolve_model_dir("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    args = EngineArgs(
        model="smollm2",
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=512,
        num_gpu_blocks_override=40,
        num_scheduler_steps=1,
    )
    with serving(AsyncLLMEngine(args), "smollm2") as served:
        yield served


def test_a_real_question_has_a_sensible_answer(open_page):
    page = open_page()
    page.set_default_timeout(300_000)  # the first answer may wait for compilation
    settings(page, temperature=0, max_tokens=40)
    page.fill("#message", "What is the capital of France?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send", state="visible")
    assert "Paris" in page.locator(".text").first.inner_text()
    assert "tokens/s" in page.locator(".facts").first.inner_text()
    # The answer ends with the end token of the file, not after max_tokens.
    assert page.locator(".token").count() < 40
    ask(page, "And of Italy?")
    assert "Rome" in page.locator(".text").nth(1).inner_text()
