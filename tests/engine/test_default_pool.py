"""The pool of an engine that is given no size for it, and texts that a pool can't hold."""

import dataclasses
import re

import pytest
from helpers.scripted_engine import run

from jax_paged import LLMEngine, SamplingParams
from jax_paged.engine.composition import make_input_processor


def test_a_refusal_names_settings_that_help(scripted) -> None:
    executor = scripted(num_gpu_blocks_override=3, block_size=4)[1]
    config = dataclasses.replace(executor.config, kv_cache_bytes=3000)
    message = r"the KV blocks needed for `prompt` must be at most 2 \(usable blocks\), got 3"
    with pytest.raises(ValueError, match=message) as error:
        make_input_processor(config, None).check([5] * 9, None)
    sizes = re.search(r"kv_cache_memory_bytes=(\d+) or num_gpu_blocks_override=(\d+)", str(error.value))
    assert sizes is not None
    assert sizes.groups() == ("4000", "4")
    larger = dataclasses.replace(config, num_blocks=4, kv_cache_bytes=4000)
    assert make_input_processor(larger, None).check([5] * 9, None).prompt_token_ids == [5] * 9


def test_the_blocks_of_the_longest_text_are_enough_to_end_it(scripted) -> None:
    """What resolve_config takes for enough is enough for the scheduler."""
    with LLMEngine(*scripted(num_gpu_blocks_override=1 + 10, block_size=4, max_model_len=40)) as engine:
        for i, num_tokens in enumerate((1, 39)):
            engine.add_request(f"{i}", [5] * num_tokens, SamplingParams(max_tokens=None, ignore_eos=True))
            assert run(engine)[f"{i}"].outputs[0].finish_reason == "length"
