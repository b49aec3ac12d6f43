"""Scheduling by hand: plans are edited and run, and every request gets the tokens it would have had."""

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.real_model import VOCAB_SIZE, Request, add, mixed_requests, reschedule, run

from jax_paged import BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.engine.features.interactive.step_plan import StepPlan
from jax_paged.lab.recording import replay
from jax_paged.outputs import CompletionOutput, RequestOutput

RNG = np.random.default_rng(3)


def prompt(length: int) -> list[int]:
    return RNG.integers(8, VOCAB_SIZE, length).tolist()


def all_kinds() -> list[Request]:
    """Long prompts, samples, beams, penalties, log-probabilities and stop strings."""
    requests = mixed_requests(5, 5, 60, 12)
    requests.append(Request(prompt(70), SamplingParams(n=3, seed=4, max_tokens=9, ignore_eos=True)))
    requests.append(Request(prompt(9), SamplingParams(), BeamSearchParams(beam_width=3, max_tokens=7)))
    requests.append(Request(prompt(20), SamplingParams(n=2, best_of=3, seed=5, max_tokens=8, logprobs=2)))
    requests.append(Request(prompt(33), SamplingParams(temperature=0, max_tokens=14, presence_penalty=1.5)))
    return requests


def values(outputs: list[RequestOutput]) -> list[list[CompletionOutput]]:
    """Everything of outputs but the times."""
    return [[dataclasses.replace(o, token_ids=list(o.token_ids)) for o in out.outputs] for out in outputs]


def run_by_hand(
    engine: LLMEngine, requests: list[Request], edit: Callable[[StepPlan], StepPlan | None]
) -> list[RequestOutput]:
    """Runs requests by plans; where `edit` returns none, step() runs the plan as it stands."""
    add(engine, requests)
    outputs = {}
    while engine.has_unfinished_requests():
        plan = edit(engine.schedule())
        changed = engine.step() if plan is None else engine.run(plan)
        outputs |= {o.request_id: o for o in changed if o.finished}
    return [outputs[str(i)] for i in range(len(requests))]


def random_edits(seed: int) -> Callable[[StepPlan], StepPlan | None]:
    rng = random.Random(seed)

    def edit(plan: StepPlan) -> StepPlan | None:
        kind = rng.choice(["run", "step", "drop", "drop", "order", "nothing"])
        if kind == "step" or not plan.request_ids:
            return None
        if kind == "drop":
            return plan.without(rng.choice(plan.request_ids))
        if kind == "order":
            return plan.only(rng.sample(plan.request_ids, len(plan.request_ids)))
        return plan.only([]) if kind == "nothing" and rng.random() < 0.3 else plan

    return edit


@pytest.mark.parametrize("num_blocks", [400, 36], ids=["room for all", "preemptions and swaps"])
def test_edited_plans_change_no_output(bursting_engine: LLMEngine, num_blocks: int) -> None:
    engine, requests = bursting_engine, all_kinds()
    expected = values(run(engine, requests))
    for seed in range(3):
        reschedule(engine, num_blocks=num_blocks)
        outputs = run_by_hand(engine, requests, random_edits(seed))
        assert values(outputs) == expected
        assert (sum(o.metrics.num_preemptions for o in outputs) > 0) == (num_blocks == 36)
        manager = engine.scheduler.block_manager
        manager.check_integrity()
        assert manager.num_free_blocks == manager.num_usable_blocks
        assert manager.swap_pool.num_free == manager.swap_pool.num_usable


def test_edited_plans_replay(bursting_engine: LLMEngine) -> None:
    engine, requests, lines = bursting_engine, all_kinds(), []
    expected = values(run(engine, requests))
    engine.record(lines.append)
    assert values(run_by_hand(engine, requests, random_edits(1))) == expected
    assert any('"edit_step"' in line for line in lines)
    replay(lines)
    with pytest.raises(
        ValueError,
        match="`lines` must be a recording without manual edits or weight updates, got 'edit_step'",
    ):
        replay(lines, max_num_seqs=8)


def add_two(engine: LLMEngine) -> None:
    for name in ("a", "b"):
        engine.add_request(name, {"prompt_token_ids": prompt(5)}, SamplingParams(temperature=0, max_tokens=4))


def test_without_leaves_a_request_out_of_one_step(engine: LLMEngine) -> None:
    add_two(engine)
    plan = engine.schedule()
    assert plan.request_ids == ["a", "b"]
    assert [o.request_id for o in engine.run(plan.without("a"))] == ["b"]
    assert engine.schedule().request_ids == ["b", "a"]  # decoding goes before prompts
    assert [o.request_id for o in engine.step()] == ["b", "a"]


def test_a_plan_runs_once(engine: LLMEngine) -> None:
    add_two(engine)
    plan = engine.schedule()
    engine.run(plan)
    with pytest.raises(
        ValueError, match=r"`plan` must be .*got a plan of step 0. Call schedule\(\) for a new one"
    ):
        engine.run(plan)
    old = engine.schedule()
    new = engine.schedule()
    with pytest.raises(ValueError, match="not yet run or replaced"):
        engine.run(old)
    engine.step()
    with pytest.raises(ValueError, match="not yet run or replaced"):
        engine.run(new)


def test_a_request_that_ends_after_its_plan_is_skipped(engine: LLMEngine) -> None:
    add_two(engine)
    engine.step()
    plan = engine.schedule()
    engine.abort_request("a")
    add_two_again = {"prompt_token_ids": prompt(5)}
    engine.add_request("a", add_two_again, SamplingParams(temperature=0, max_tokens=4))
    assert [o.request_id for o in engine.run(plan)] == ["b"]
    plan = engine.schedule()
    engine.abort_request("b")
    assert [o.request_id for o in engine.run(plan.without("b"))] == ["a"]
    assert engine.scheduler.block_manager.num_free_blocks < engine.scheduler.block_manager.num_usable_blocks
    engine.schedule()
    engine.abort_request("a")
    assert engine.has_unfinished_requests()  # the plan waits
    assert engine.step() == []
    assert not engine.has_unfinished_requests()
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_usable_blocks


def test_what_was_in_flight_is_not_lost(bursting_engine: LLMEngine) -> None:
    engine = bursting_engine
    add_two(engine)
    tokens: dict[str, Any] = {}
    for i in range(100):
        if not engine.has_unfinished_requests():
            break
        if i % 2:
            engine.schedule()
        tokens |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert {name: len(ids) for name, ids in tokens.items()} == {"a": 4, "b": 4}


def test_mistakes_are_errors(engine: LLMEngine) -> None:
    add_two(engine)
    plan = engine.schedule()
    with pytest.raises(
        ValueError, match=r"`request_id` must be a request in the plan, \['a', 'b'\], got 'c'"
    ):
        plan.without("c")
    with pytest.raises(ValueError, match="distinct requests"):
        plan.only(["a", "a"])
    rows = plan.output.scheduled
    longer = rows[0]._replace(token_ids=[*rows[0].token_ids, 9])
    spoilt = dataclasses.replace(plan.output, scheduled=(longer, rows[1]))
    with pytest.raises(ValueError, match=r"modified only with without\(\) and only\(\)"):
        engine.run(dataclasses.replace(plan, output=spoilt))
    engine.run(plan)


def test_half_of_a_request_cannot_be_dropped(engine: LLMEngine) -> None:
    engine.add_request("a", {"prompt_token_ids": prompt(5)}, SamplingParams(n=2, seed=1, max_tokens=4))
    engine.step()
    plan = engine.schedule()
    output = dataclasses.replace(
        plan.output,
        scheduled=plan.output.scheduled[:1],
        samples=plan.output.samples[:1],
        num_batched_tokens=1,
        num_logits_rows=1,
    )
    with pytest.raises(ValueError, match="`plan` must be"):
        engine.run(dataclasses.replace(plan, output=output, owners=plan.owners[:1]))
    engine.run(plan)


def test_a_plan_is_drawn(engine: LLMEngine) -> None:
    add_two(engine)
    engine.step()
    engine.add_request("<c>", {"prompt_token_ids": prompt(40)}, SamplingParams(temperature=0, max_tokens=4))
    plan = engine.schedule().without("a")
    assert (
        repr(plan) == "<step 1: b: decodes at position 5; <c>: computes its prompt of 40 tokens; removed: a>"
    )
    drawing = plan._repr_html_()
    assert "&lt;c&gt;" in drawing
    assert "removed: a" in drawing
    assert "<c>" not in drawing
    assert not re.search("<script|http|url", drawing)
    engine.run(plan)
