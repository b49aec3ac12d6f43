"""A scheduler, an attention and a sampler of the user's own, through public names."""

import pytest

from jax_paged import LLM, SamplingParams
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import SequenceGroup

PROMPTS = ["a", "The cat sat on the mat and looked at", "one two three four five six seven eight"]


def finished_in_order(llm: LLM, lengths: list[int]) -> list[int]:
    """Returns the requests, by their place in `lengths`, in the order in which they end."""
    engine = llm.llm_engine
    for i, length in enumerate(lengths):
        engine.add_request(str(i), "once", SamplingParams(max_tokens=length, ignore_eos=True, temperature=0))
    ended = []
    while engine.has_unfinished_requests():
        ended += [int(output.request_id) for output in engine.step() if output.finished]
    return ended


def test_the_shortest_job_first() -> None:
    def shortest_first(request: SequenceGroup) -> int:
        return request.sampling_params.max_tokens or 0

    with LLM(scheduler=shortest_first, max_num_seqs=1) as llm:
        assert finished_in_order(llm, [9, 3, 6]) == [1, 2, 0]
    with LLM(max_num_seqs=1) as llm:
        assert finished_in_order(llm, [9, 3, 6]) == [0, 1, 2]


def test_a_scheduler_class() -> None:
    class Counting(Scheduler):
        num_rows = 0

        def schedule(self, now: float) -> SchedulerOutput:
            output = super().schedule(now)
            self.num_rows += len(output.scheduled)
            return output

    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(scheduler=Counting, num_scheduler_steps=1) as llm, LLM(num_scheduler_steps=1) as plain:
        ours = [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        assert ours == [output.outputs[0].text for output in plain.generate(PROMPTS, params, use_tqdm=False)]
        scheduler = llm.llm_engine.scheduler
        assert isinstance(scheduler, Counting)
        assert scheduler.num_rows == 4 * len(PROMPTS)
        with pytest.raises(ValueError, match=r"scheduler is .*; allowed: the engine's own"):
            llm.llm_engine.record([].append)


def test_a_key_takes_the_place_of_a_policy() -> None:
    with pytest.raises(ValueError, match="scheduling_policy is 'priority'; allowed: 'fcfs' beside a key"):
        LLM(scheduler=lambda request: 0, scheduling_policy="priority")
