"""What a request may ask for fits the row of biases that the device gets."""

import dataclasses

import pytest
from helpers.scripted_engine import ScriptedExecutor
from helpers.steps import new_sequence

from jax_paged import EngineArgs, SamplingParams
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.sampling_params import MAX_BAD_WORDS, MAX_BIAS_IDS, MAX_LOGIT_BIAS_ENTRIES
from jax_paged.worker.token_bias import TokenBias

EOS = frozenset({1998, 1999})


@pytest.fixture
def processor() -> InputProcessor:
    config = ScriptedExecutor(EngineArgs()).config
    return InputProcessor(dataclasses.replace(config, vocab_size=2000, eos_token_ids=EOS), None)


@pytest.mark.parametrize("min_tokens", [0, 4])
def test_the_largest_biases_that_pass_the_checks_fit(processor: InputProcessor, min_tokens: int) -> None:
    """All of these tokens differ, and every bad word would be complete at once."""
    num_stop = MAX_BIAS_IDS - MAX_LOGIT_BIAS_ENTRIES - MAX_BAD_WORDS - len(EOS)
    settings = {
        "logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES), 1.0),
        "bad_words_token_ids": [[500 + i] for i in range(MAX_BAD_WORDS)],
        "min_tokens": min_tokens,
        "stop_token_ids": list(range(1000, 1000 + num_stop)),
    }
    params = processor.check([1, 2], SamplingParams(**settings)).params
    end_token_ids = EOS | set(params.stop_token_ids or ())
    biases = TokenBias(new_sequence(0, [1, 2], tables=[[1]], end_token_ids=end_token_ids, **settings))
    lengths = [len(biases.at(position)) for position in (2, 5, 6)]
    without_ends = MAX_LOGIT_BIAS_ENTRIES + MAX_BAD_WORDS
    assert lengths == [MAX_BIAS_IDS if min_tokens else without_ends] * 2 + [without_ends]
    if min_tokens:
        one_more = {**settings, "stop_token_ids": list(range(1000, 1001 + num_stop))}
        with pytest.raises(ValueError, match=rf"length of stop_token_ids is {num_stop + 1}; allowed"):
            processor.check([1, 2], SamplingParams(**one_more))
