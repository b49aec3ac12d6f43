"""benchmarks/perplexity.py counts the tokens that llama-perplexity counts."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import perplexity
import pytest

LOSS = 0.001


class OutputsOfKnownLoss:
    """A replacement of `LLM`: the token at position i of a prompt has the log-probability -LOSS * i."""

    def __init__(self, model: str, **arguments: Any) -> None: ...

    def __enter__(self) -> "OutputsOfKnownLoss":
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(
        self, prompts: Sequence[dict[str, list[int]]], params: Any, use_tqdm: bool
    ) -> list[SimpleNamespace]:
        assert params.prompt_logprobs == 0
        found = []
        for prompt in prompts:
            tokens = prompt["prompt_token_ids"]
            entries = [{token: SimpleNamespace(logprob=-LOSS * i)} for i, token in enumerate(tokens)]
            found.append(SimpleNamespace(prompt_logprobs=[None, *entries[1:]]))
        return found


def test_the_second_half_of_every_whole_chunk_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "LLM", OutputsOfKnownLoss)
    tokens = list(range(3 * 512 - 1))  # two whole chunks
    value = perplexity.perplexity(Path("model"), tokens, perplexity.CASES[0])
    # llama-perplexity: 255 tokens, those that the positions 256 to 510 predict.
    assert value == pytest.approx(math.exp(LOSS * sum(range(257, 512)) / 255))
