"""Priorities that users of LLM give; a scripted executor."""

import pytest
from helpers.scripted_engine import no_block_lost

from jax_paged import SamplingParams


def test_generate_serves_lower_priorities_first(make_llm):
    with make_llm(scheduling_policy="priority", max_num_seqs=2) as llm:
        outputs = llm.generate(
            ["abc?"] * 6, SamplingParams(n=2), priority=[3, -1, 2, 5, 0, 2], use_tqdm=False
        )
        firsts = [output.metrics.first_token_time for output in outputs]
        assert sorted(range(6), key=firsts.__getitem__) == [1, 4, 2, 5, 0, 3]
        assert all(sample.text == "abc" for output in outputs for sample in output.outputs)


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([0], r"`priority` must be a list of 2 integers, .*got \[0\]"),
        (1, "`priority` must be a list of 2 integers, .*got 1"),
        ([0, "a"], r"prompts\[1\]: `priority` must be an integer in .*got 'a'"),
        ([0, 1], r"prompts\[1\]: `priority` must be 0 with scheduling_policy='fcfs', got 1"),
    ],
)
def test_bad_priorities_run_nothing(llm, priority, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(["a?", "b?"], priority=priority, use_tqdm=False)
    assert llm.llm_engine.executor.num_steps == 0
    assert no_block_lost(llm.llm_engine)
    assert len(llm.generate(["a?", "b?"], priority=[0, 0], use_tqdm=False)) == 2
