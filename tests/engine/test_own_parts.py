"""A scheduler, an attention and a sampler of the user's own, through public names."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_paged import LLM, SamplingParams
from jax_paged.core.request import SequenceGroup
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.worker.sampling.sampler import SamplingBatch

pytestmark = pytest.mark.thorough

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


@pytest.mark.quick
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
        with pytest.raises(
            ValueError, match=r"`scheduler` must be a Scheduler with a built-in scheduling policy"
        ):
            llm.llm_engine.record([].append)


def test_a_request_of_a_lower_key_takes_the_seat_of_a_running_one() -> None:
    def shortest_first(request: SequenceGroup) -> int:
        return request.sampling_params.max_tokens or 0

    with LLM(scheduler=shortest_first, max_num_seqs=1, num_scheduler_steps=1) as llm:
        engine, ended = llm.llm_engine, []
        for i, length in enumerate((12, 3)):
            params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
            engine.add_request(str(i), "once", params)
            for _ in range(4):
                ended += [output for output in engine.step() if output.finished]
        while engine.has_unfinished_requests():
            ended += [output for output in engine.step() if output.finished]
    assert [output.request_id for output in ended] == ["1", "0"]
    assert ended[1].metrics.num_preemptions == 1
    assert len(ended[1].outputs[0].token_ids) == 12


def test_a_key_takes_the_place_of_a_policy() -> None:
    with pytest.raises(
        ValueError,
        match=r"`scheduling_policy` must be 'fcfs' because `scheduler` sets the order.*got 'priority'",
    ):
        LLM(scheduler=lambda request: 0, scheduling_policy="priority")


def reference_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    **options: Any,
) -> jax.Array:
    """Attention as a formula: the keys of each row's sequence, gathered and masked."""
    (t, h, d), (_, _, k, size, _) = q.shape, kv_pages.shape
    row = jnp.arange(t)
    seq = jnp.minimum(jnp.sum(row[:, None] >= query_start_loc[1:], axis=1), len(context_lens) - 1)
    position = context_lens[seq] - query_start_loc[seq + 1] + row
    keys, values = (
        kv_pages[block_tables[seq], i].transpose(0, 2, 1, 3, 4).reshape(t, k, -1, d) for i in (0, 1)
    )
    scores = jnp.einsum("tkgd,tknd->tkgn", q.reshape(t, k, h // k, d), keys) * scale
    is_seen = jnp.arange(block_tables.shape[1] * size) <= position[:, None]
    weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], scores, -1e30))
    return jnp.einsum("tkgn,tknd->tkgd", weights, values).reshape(q.shape)


def test_attention_of_ones_own() -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    settings = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    with LLM(attend=reference_attention, **settings) as ours, LLM(**settings) as theirs:
        for a, b in zip(
            *(llm.generate(PROMPTS, params, use_tqdm=False) for llm in (ours, theirs)), strict=True
        ):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
            assert a.outputs[0].cumulative_logprob == pytest.approx(b.outputs[0].cumulative_logprob, abs=1e-3)
        ours.llm_engine.add_request("a", "x", params)
        ours.llm_engine.step()
        ours.llm_engine.inspect("a")
        with pytest.raises(ValueError, match=r"`layers` must be empty with a custom `attend`"):
            ours.llm_engine.inspect("a", layers=[0])


def test_attention_that_sees_only_the_last_token() -> None:
    def shortsighted(q: jax.Array, kv_pages: jax.Array, *args: jax.Array, **options: Any) -> jax.Array:
        return jnp.zeros_like(q)

    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(attend=shortsighted, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64) as llm:
        a, b = llm.generate(["one two three four", "nine three four"], params, use_tqdm=False)
    assert a.outputs[0].token_ids == b.outputs[0].token_ids, "the last token is all that counts"


@pytest.mark.quick
def test_a_sampler_of_ones_own() -> None:
    def second_best(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
        return jax.lax.top_k(logits, 2)[1][:, 1]

    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
    with LLM(sampler=second_best, max_num_seqs=4) as llm:
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            (completion,) = output.outputs
            pairs = zip(completion.token_ids, completion.logprobs or (), strict=True)
            assert [entry[token].rank for token, entry in pairs] == [2] * 6


def test_a_sampler_that_chooses_what_is_no_token() -> None:
    def beyond(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
        return jnp.full(logits.shape[0], logits.shape[1])

    with LLM(sampler=beyond, max_num_seqs=4) as llm:
        (output,) = llm.generate("a", SamplingParams(max_tokens=6), use_tqdm=False)
    assert output.outputs[0].finish_reason == "abort"


def test_what_is_compiled_as_records() -> None:
    with LLM(max_num_seqs=8, max_num_batched_tokens=64, max_compile_s=0.0) as llm:
        engine = llm.llm_engine
        engine.executor.wait_until_compiled()
        records = engine.compile_report()
        assert {record.state for record in records} == {"compiled", "skipped"}
        steps = [record for record in records if record.num_tokens]
        largest = max(record.num_tokens for record in steps)
        assert [r.num_tokens for r in steps if r.state == "compiled" and r.program.startswith("mixed")] == [
            largest
        ]
        assert all(r.compile_s > 0 and r.trace_s > 0 for r in records if r.state == "compiled")
        done, num = engine.executor.compile_progress
        assert done == num == sum(record.state == "compiled" for record in records)
        assert "skipped" in llm.compile_plan()
        (output,) = llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 2
