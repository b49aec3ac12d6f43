"""The numbers of tokens that the progress bar of a list of requests adds up."""

import pytest

from jax_paged import LLM, SamplingParams
from jax_paged.engine.list_runner import _steps_of

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_the_progress_bar_counts_all_tokens(num_scheduler_steps: int) -> None:
    params = SamplingParams(n=3, max_tokens=10, ignore_eos=True, seed=1)
    with LLM(
        num_scheduler_steps=num_scheduler_steps, max_num_seqs=8, max_model_len=64, max_compile_s=0
    ) as llm:
        engine = llm.llm_engine
        requests = {str(i): engine.check_request("def f(", params) for i in range(2)}
        steps = list(_steps_of(engine, requests, lambda: False))
        assert sum(num_tokens for num_tokens, _ in steps) == engine.num_generated_tokens == 2 * 3 * 10
        assert sorted(request_id for _, ended in steps for request_id in ended) == ["0", "1"]
