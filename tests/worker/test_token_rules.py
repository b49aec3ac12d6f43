"""Masks and biases of single tokens are those of a plain reading of the parameters."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from helpers.scripted_engine import ScriptedExecutor
from helpers.steps import new_sequence

from jax_paged import EngineArgs, SamplingParams
from jax_paged.engine.composition import make_input_processor
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.sampling_params import MAX_BIAS_IDS
from jax_paged.worker.sampling.token_rules import KnownTokens, TokenRules

VOCAB_SIZE = 2003
EOS = frozenset({1998, 1999})


@pytest.fixture
def processor() -> InputProcessor:
    config = ScriptedExecutor(EngineArgs()).config
    return make_input_processor(dataclasses.replace(config, vocab_size=VOCAB_SIZE, eos_token_ids=EOS), None)


def rules_of(
    processor: InputProcessor, prompt: list[int], settings: dict[str, Any]
) -> tuple[TokenRules, KnownTokens]:
    params = processor.check(prompt, SamplingParams(**settings)).params
    end_token_ids = EOS | set(params.stop_token_ids or ())
    new = new_sequence(0, prompt, tables=[[1]], end_token_ids=end_token_ids, **settings)
    assert new.request.sampling_params.has_token_rules
    tokens = KnownTokens(new)
    tokens.record(0, prompt)
    return TokenRules(new, tokens, VOCAB_SIZE), tokens


def allowed(rules: TokenRules, position: int) -> set[int]:
    mask = rules.mask_at(position)
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


@pytest.mark.parametrize("seed", range(8))
def test_masks_are_as_the_parameters_read(processor: InputProcessor, seed: int) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(5) for _ in range(6)]
    words = [[rng.randrange(5) for _ in range(rng.randint(1, 3))] for _ in range(6)]
    stops = rng.sample(range(1000, 1900), 700)  # more than there are biases
    some = sorted(rng.sample(range(VOCAB_SIZE), 1500)) if seed % 2 else None
    settings = {
        "bad_words_token_ids": words,
        "min_tokens": 4,
        "stop_token_ids": stops,
        "allowed_token_ids": some,
    }
    (rules, tokens), text = rules_of(processor, prompt, settings), list(prompt)
    for position in range(len(prompt), 14):
        forbidden = {word[-1] for word in words if text[position - len(word) + 1 : position] == word[:-1]}
        if position < len(prompt) + 4:
            forbidden |= EOS | set(stops)
        wanted = set(range(VOCAB_SIZE) if some is None else some) - forbidden
        mask = rules.mask_at(position)
        assert wanted == (set(range(VOCAB_SIZE)) if mask is None else allowed(rules, position))
        text.append(rng.randrange(5))
        tokens.record(position, text[-1:])


def test_a_long_logit_bias(processor: InputProcessor) -> None:
    added = {token_id: 0.5 + token_id for token_id in range(0, 99)}
    short = added | dict.fromkeys(range(100, MAX_BIAS_IDS), -100.0)
    rules, _ = rules_of(processor, [1], {"logit_bias": short})
    assert (rules.bias, rules.mask_at(1)) == (short, None)
    rules, _ = rules_of(processor, [1], {"logit_bias": short | dict.fromkeys(range(1000, 1900), -100)})
    assert rules.bias == added
    banned = {*range(100, MAX_BIAS_IDS), *range(1000, 1900)}
    assert allowed(rules, 1) == set(range(VOCAB_SIZE)) - banned
