"""Hooks read and change activations of the requests that ask for them, and of no others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.real_model import log_softmax

from jax_paged import LLM, Hook, SamplingParams
from jax_paged.models.features.hooks import dense_logits
from jax_paged.models.weights import load_model

pytestmark = pytest.mark.thorough

# Float32 sums in another order move activations of this model by a few 1e-6 of the largest, about 20.
TOLERANCE = 1e-3
RNG = np.random.default_rng(0)
DIRECTION = RNG.normal(size=64).astype(np.float32)
PROMPTS = [RNG.integers(8, 300, n).tolist() for n in (3, 30, 11, 17)]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 80,
}


def steer(direction: Any, y: Any, args: Any) -> Any:
    return y + args * direction


HOOKS = [
    Hook("layers.0.mlp", steer, DIRECTION, name="steer"),
    Hook("layers.1.self_attn", lambda params, y, args: (y, y), num_args=0, name="read"),
    Hook("layers.0.mlp", lambda params, y, args: (y, jnp.sum(y, axis=1)), num_args=0, name="sum"),
    # Inside an MLP whose halves are one call where kernels are packed.
    Hook(
        "layers.1.mlp.up_proj", lambda params, y, args: y * args[:, :1] + args[:, 1:], num_args=2, name="up"
    ),
]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), hooks=HOOKS, **SETTINGS) as llm:
        llm.llm_engine.executor.wait_until_compiled()
        yield llm


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **SETTINGS) as llm:
        yield llm


def params(**kwargs: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0} | kwargs)


def generate(llm: LLM, prompts: list[list[int]], *each: SamplingParams) -> list[Any]:
    return llm.generate(prompts, list(each) * (len(prompts) // len(each)), use_tqdm=False)


def tokens(output: Any) -> list[list[int]]:
    return [list(o.token_ids) for o in output.outputs]


def text(output: Any, i: int = 0) -> list[int]:
    return output.prompt_token_ids + list(output.outputs[i].token_ids)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.quick
def test_requests_that_ask_for_nothing_get_what_they_get_without_hooks(llm: LLM, plain: LLM) -> None:
    outputs = generate(llm, PROMPTS, params(), params(hook_args={"steer": 3.0}))
    wants = generate(plain, PROMPTS, params())
    for i in (0, 2):
        assert tokens(outputs[i]) == tokens(wants[i])
        assert outputs[i].outputs[0].captured == {}
    assert [tokens(outputs[i]) != tokens(wants[i]) for i in (1, 3)] == [True, True]


@pytest.mark.quick
def test_what_is_generated_and_captured_is_what_the_dense_call_computes(llm: LLM, checkpoint: Path) -> None:
    model = load_model(checkpoint, "float32").model
    args = {"steer": [2.0], "read": [], "up": [0.5, -0.1], "sum": []}
    for output in generate(llm, PROMPTS[1:3], params(hook_args=args)):
        whole = jnp.asarray([text(output)])
        logits, captured = dense_logits(model, whole, HOOKS, args)
        first = len(output.prompt_token_ids) - 1
        assert tokens(output) == [np.argmax(logits[0, first:-1], axis=-1).tolist()]
        got = output.outputs[0].captured
        assert {name: x.shape for name, x in got.items()} == {
            "read": (whole.size - 1, 64),
            "sum": (whole.size - 1,),
        }
        close(got["read"], captured["read"][0, :-1])
        close(got["sum"], captured["sum"][0, :-1])


def test_the_dense_call_computes_each_text_with_its_own_arguments(checkpoint: Path) -> None:
    model = load_model(checkpoint, "float32").model
    batch = jnp.asarray([PROMPTS[0], PROMPTS[0]])
    logits, captured = dense_logits(model, batch, HOOKS, {"steer": [[0.0], [2.0]]})
    assert captured.keys() == {"read", "sum"}
    assert not captured["read"].any()  # it is not on
    np.testing.assert_array_equal(logits[0], dense_logits(model, batch, HOOKS, {})[0][0])
    np.testing.assert_array_equal(logits[1], dense_logits(model, batch, HOOKS, {"steer": 2.0})[0][1])
    with pytest.raises(
        ValueError,
        match=r"each name in `hook_args` must be that of a hook .'steer', 'read', 'sum', 'up'.*"
        r"got 'other'",
    ):
        dense_logits(model, batch, HOOKS, {"other": 1.0})


def test_samples_share_what_was_captured_of_their_prompt(llm: LLM, checkpoint: Path) -> None:
    model = load_model(checkpoint, "float32").model
    given = params(n=3, temperature=1.5, seed=1, hook_args={"read": []})
    (output,) = generate(llm, [PROMPTS[1]], given)
    assert len({tuple(t) for t in tokens(output)}) == 3
    for i, sample in enumerate(output.outputs):
        want = dense_logits(model, jnp.asarray([text(output, i)]), HOOKS, {"read": []})[1]["read"]
        close(sample.captured["read"], want[0, :-1])


def test_samples_that_have_not_begun_share_what_was_captured_of_their_prompt(llm: LLM) -> None:
    """A request that is aborted in its prompt has one sequence, and as many completions as it asked for."""
    engine = llm.llm_engine
    engine.add_request("a", PROMPTS[1], params(n=2, temperature=1.0, seed=1, hook_args={"read": []}))
    engine.step()
    state = engine.abort_request("a")
    assert state is not None
    first, second = state.output().outputs
    assert first.captured["read"].shape == (len(PROMPTS[1]) - 1, 64)
    np.testing.assert_array_equal(first.captured["read"], second.captured["read"])


def test_nothing_changes_where_requests_lose_their_blocks(llm: LLM, checkpoint: Path) -> None:
    given = params(max_tokens=24, hook_args={"steer": 1.0, "read": []})
    wants = generate(llm, PROMPTS, given)
    for mode in ("recompute", "swap"):
        settings = SETTINGS | {"num_gpu_blocks_override": 26, "preemption_mode": mode}
        with LLM(str(checkpoint), hooks=HOOKS, **settings) as small:
            outputs = generate(small, PROMPTS, given)
        assert sum(o.metrics.num_preemptions for o in outputs) > 0
        for output, want in zip(outputs, wants, strict=True):
            assert tokens(output) == tokens(want)
            close(output.outputs[0].captured["read"], want.outputs[0].captured["read"])


@pytest.fixture(scope="module", params=[1, 4], ids=["single steps", "bursts"])
def edited(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    """With fewer programs, and steps of one token or bursts; a pool that holds two long requests or so."""
    settings = SETTINGS | {"max_num_seqs": 8, "num_scheduler_steps": request.param}
    with LLM(str(checkpoint), hooks=HOOKS, **settings) as llm:
        yield llm


def finish(llm: LLM) -> dict[str, Any]:
    engine, outputs = llm.llm_engine, {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return outputs


def step_until(llm: LLM, **least: int) -> None:
    """Runs steps until some requests have at least so many tokens of output."""
    found: dict[str, int] = {}
    while any(found.get(name, 0) < number for name, number in least.items()):
        found |= {o.request_id: len(o.outputs[0].token_ids) for o in llm.llm_engine.step()}


def num_output_tokens(llm: LLM, request_id: str) -> int:
    return len(llm.llm_engine.page_table(request_id).tokens) - len(PROMPTS[1])


ALL_ON = {"steer": [1.5], "read": [], "up": [0.7, 0.1], "sum": []}


def check_hooks(model: Any, output: Any, args: dict[str, Any] = ALL_ON) -> None:
    """Checks what was drawn greedily, and what was captured, against the dense call."""
    whole = text(output)
    logits, captured = dense_logits(model, jnp.asarray([whole]), HOOKS, args)
    if not output.request_id.startswith("drawn"):
        first = len(output.prompt_token_ids) - 1
        assert tokens(output) == [np.argmax(logits[0, first:-1], axis=-1).tolist()], output.request_id
    got = output.outputs[0].captured
    assert set(got) == {"read", "sum"} & set(args)
    for name, rows in got.items():
        assert len(rows) == len(whole) - 1
        close(rows, captured[name][0, :-1])


def test_forks_and_rollbacks_keep_their_hooks(edited: LLM, checkpoint: Path) -> None:
    model, engine = load_model(checkpoint, "float32").model, edited.llm_engine
    drawn = params(temperature=0.9, seed=3, max_tokens=24, hook_args=ALL_ON)
    engine.add_request("alone", PROMPTS[1], drawn)
    alone = finish(edited)["alone"]
    engine.add_request("drawn", PROMPTS[1], drawn)
    engine.add_request("greedy", PROMPTS[1], params(max_tokens=24, hook_args=ALL_ON))
    engine.add_request("none", PROMPTS[1], params(max_tokens=24))
    step_until(edited, drawn=8, greedy=6, none=1)
    engine.fork("drawn", "drawn again", seed=3)
    engine.fork("drawn", "drawn otherwise", seed=4)
    engine.fork("greedy", "greedy again", seed=0)
    engine.fork("none", "none again", seed=0)
    engine.rollback("drawn again", 5)
    engine.rollback("drawn otherwise", 7)  # all but one: its texts part there
    engine.step()
    engine.rollback("drawn", 1)
    engine.rollback("greedy again", num_output_tokens(edited, "greedy again"))
    outputs = finish(edited)
    assert len(outputs) == 7
    for name in ("drawn", "drawn again"):
        assert tokens(outputs[name]) == tokens(alone)
    assert tokens(outputs["drawn otherwise"]) != tokens(alone)
    assert tokens(outputs["none"]) == tokens(outputs["none again"])
    for name, output in outputs.items():
        check_hooks(model, output, {} if name.startswith("none") else ALL_ON)


def test_drafts_are_checked_with_hooks_on(edited: LLM, checkpoint: Path) -> None:
    model, engine = load_model(checkpoint, "float32").model, edited.llm_engine
    greedy = params(max_tokens=24, hook_args=ALL_ON)
    engine.add_request("alone", PROMPTS[1], greedy)
    want = tokens(finish(edited)["alone"])[0]
    for num_right, num_wrong in ((0, 2), (3, 2), (5, 0)):
        engine.add_request("a", PROMPTS[1], greedy)
        step_until(edited, a=1)
        n = num_output_tokens(edited, "a")
        draft = [*want[n : n + num_right], *[(want[n + num_right] + 1) % 300] * num_wrong]
        found = engine.verify("a", draft)
        assert found.token_ids == want[n : n + num_right + 1]
        logits, _ = dense_logits(model, jnp.asarray([PROMPTS[1] + want[:n] + draft]), HOOKS, ALL_ON)
        rows = np.asarray(logits[0, len(PROMPTS[1]) + n - 1 : -1], np.float64)
        close(found.logprobs, log_softmax(rows)[np.arange(len(draft)), draft])
        if num_wrong:  # what was captured of the wrong tokens is not left, even if nothing comes in its place
            engine.rollback("a", 1)
        output = finish(edited)["a"]
        assert tokens(output) == [want]
        check_hooks(model, output)


def test_a_request_that_ends_with_a_draft_has_captured_no_more_than_its_text(
    edited: LLM, checkpoint: Path
) -> None:
    model, engine = load_model(checkpoint, "float32").model, edited.llm_engine
    engine.add_request("alone", PROMPTS[1], params(max_tokens=24, hook_args=ALL_ON))
    want = tokens(finish(edited)["alone"])[0]
    engine.add_request("a", PROMPTS[1], params(max_tokens=7, hook_args=ALL_ON))
    step_until(edited, a=1)
    n = num_output_tokens(edited, "a")
    engine.verify("a", [*want[n : n + 5], 3])
    output = finish(edited)["a"]
    assert tokens(output) == [want[:7]]
    check_hooks(model, output)


def test_a_fork_that_waits_and_one_that_is_preempted_capture_the_same(checkpoint: Path) -> None:
    model = load_model(checkpoint, "float32").model
    for mode in ("recompute", "swap"):
        settings = SETTINGS | {"num_gpu_blocks_override": 26, "preemption_mode": mode}
        with LLM(str(checkpoint), hooks=HOOKS, num_scheduler_steps=1, **settings) as llm:
            engine = llm.llm_engine
            engine.add_request("a", PROMPTS[1], params(max_tokens=24, hook_args=ALL_ON))
            step_until(llm, a=6)
            for i in range(6):  # more than there are seats, and blocks for
                engine.fork("a", str(i), seed=i)
            engine.rollback("5", 3)
            outputs = finish(llm)
            assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0
            for output in outputs.values():
                check_hooks(model, output)


def test_one_token_per_step_captures_what_bursts_do(llm: LLM, checkpoint: Path) -> None:
    given = params(hook_args={"steer": 1.0, "read": []})
    with LLM(str(checkpoint), hooks=HOOKS, num_scheduler_steps=1, **SETTINGS) as single:
        single.llm_engine.executor.wait_until_compiled()
        for prompt in PROMPTS[:2]:
            (output,), (want,) = generate(single, [prompt], given), generate(llm, [prompt], given)
            assert tokens(output) == tokens(want)
            np.testing.assert_array_equal(
                output.outputs[0].captured["read"], want.outputs[0].captured["read"]
            )


@pytest.mark.quick
def test_prefixes_are_shared_only_by_requests_of_equal_arguments(llm: LLM) -> None:
    prompt = RNG.integers(8, 300, 30).tolist()

    def cached(**kwargs: Any) -> int:
        (output,) = generate(llm, [prompt], params(**kwargs))
        return output.num_cached_tokens

    assert cached() == 0
    assert cached() == 28
    assert cached(hook_args={"steer": 1.0}) == 0
    assert cached(hook_args={"steer": [1]}) == 28
    assert cached(hook_args={"steer": 2.0}) == 0
    assert cached(hook_args={"steer": 1.0, "read": []}) == 0
    assert cached(hook_args={"steer": 1.0, "read": []}) == 0  # cached tokens would be captured of nobody
    assert cached() == 28


def test_other_arguments_trace_nothing(llm: LLM) -> None:
    before = llm.llm_engine.executor.runner.compiled.num_traces
    for value in (0.5, -3.0):
        generate(llm, PROMPTS[:2], params(hook_args={"steer": value}), params(hook_args={"up": [1, value]}))
    assert llm.llm_engine.executor.runner.compiled.num_traces == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"other": 1.0},
            r"each name in `hook_args` must be one of the hooks of this engine, \['steer', 'read', ",
        ),
        ({"steer": [1.0, 2.0]}, r"`hook_args\['steer'\]` must be a list of 1 numbers, got \[1.0, 2.0\]"),
        ({"steer": float("nan")}, r"prompts\[0\]: `hook_args\['steer'\]` must be a finite number in"),
        ({"steer": "much"}, r"prompts\[0\]: `hook_args\['steer'\]` must be a finite number in"),
        ([1.0], "`hook_args` must be "),
    ],
)
def test_arguments_that_no_hook_takes(llm: LLM, args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(llm, PROMPTS[:1], params(hook_args=args))


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (Hook("layers.9.mlp", steer, DIRECTION), "`path` must be .*'layers.[01].mlp'.*, got 'layers.9.mlp'"),
        (
            Hook("lm_head", steer, DIRECTION),
            "`path` must be the path of a module whose inputs are token rows.*got 'lm_head'",
        ),
        (
            Hook("norm", lambda p, y, a: y[:, :3]),
            r"the shape of the activation of hook 'norm' must be \(2, 64\), got \(2, 3\)",
        ),
        (
            Hook("norm", lambda p, y, a: (y, y[0])),
            r"the shape of the captured values of hook 'norm' must be \(2,\), got \(64,\)",
        ),
    ],
)
def test_hooks_that_fit_no_module(checkpoint: Path, hook: Hook, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint), hooks=[hook], **SETTINGS)


def test_two_hooks_of_one_name(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="the names of `hooks` must be unique"):
        LLM(str(checkpoint), hooks=[HOOKS[0], HOOKS[0]], **SETTINGS)
    with pytest.raises(ValueError, match=r"`num_args` must be .*got -1"):
        Hook("norm", steer, num_args=-1)
