"""A user's logits processors: outputs are what NumPy makes of the model's logits; neighbours stay."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.real_model import VOCAB_SIZE, DenseModel, finished_outputs, reschedule, reset

from jax_paged import LLM, ExtraArgs, LogitsProcessor, SamplingParams

pytestmark = pytest.mark.thorough

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(8, 300, n).tolist() for n in (3, 30, 11, 17, 5, 9)]
BANNED = np.flatnonzero(RNG.random(VOCAB_SIZE) < 0.5)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "xla",
    "matmul_backend": "xla",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 120,
}


def tempered(logits: Any, state: Any, extra: ExtraArgs) -> tuple[Any, Any]:
    return logits / extra.values[0], state


def without_banned(logits: Any, state: Any, extra: ExtraArgs) -> tuple[Any, Any]:
    return logits.at[BANNED].set(-jnp.inf), state


def guided(logits: Any, state: Any, extra: ExtraArgs) -> tuple[Any, Any]:
    """Away from the mean of all logits before, by a scale; and never the token that stands at the end."""
    mean, count = state
    pushed = jnp.where(count > 0, logits + extra.values[0] * (logits - mean), logits)
    pushed = pushed.at[extra.token_id].add(extra.values[1])
    return pushed, ((mean * count + logits) / (count + 1), count + 1)


PROCESSORS = [
    LogitsProcessor("tempered", tempered),
    LogitsProcessor("without", without_banned, num_args=0),
    LogitsProcessor("guided", guided, num_args=2, state=(np.zeros(VOCAB_SIZE, np.float32), np.float32(0))),
]
EXTRA: dict[str, dict[str, Any]] = {
    "tempered": {"tempered": 0.5},
    "without": {"without": []},
    "guided": {"guided": [1.5, -50.0]},
    "all": {"guided": [0.5, -3.0], "without": [], "tempered": 2.0},
}


def rerun(name: str, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
    """The float32 logits that the processors make of the model's, for each token of an output."""
    extra, out = EXTRA[name], []
    mean, count = np.zeros(VOCAB_SIZE, np.float32), np.float32(0)
    for row, last in zip(logits, tokens, strict=True):
        x = row.copy()
        if "tempered" in extra:
            x = x / np.float32(extra["tempered"])
        if "without" in extra:
            x[BANNED] = -np.inf
        if "guided" in extra:
            scale, bias = map(np.float32, extra["guided"])
            seen = x
            x = x + scale * (x - mean) if count else x.copy()
            x[last] += bias
            mean, count = (mean * count + seen) / (count + 1), count + 1
        out.append(x)
    return np.stack(out)


@pytest.fixture(scope="module")
def session_llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), logits_processors=PROCESSORS, **SETTINGS) as llm:
        llm.llm_engine.executor.wait_until_compiled()
        yield llm


@pytest.fixture
def llm(session_llm: LLM) -> LLM:
    reset(session_llm.llm_engine)
    return session_llm


def params(name: str | None, **kwargs: Any) -> SamplingParams:
    settings = {"temperature": 0, "max_tokens": 14, "ignore_eos": True} | kwargs
    return SamplingParams(extra_args=EXTRA[name] if name else None, **settings)


def generate(llm: LLM, prompts: list[list[int]], each: list[SamplingParams]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], each, use_tqdm=False)


def tokens(output: Any) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


def check(outputs: list[Any], names: list[str | None], dense: DenseModel) -> None:
    """Checks that each token is the best one after the processors, by NumPy and dense logits."""
    for output, name, logits in zip(outputs, names, dense.output_logits(outputs), strict=True):
        if name is None:
            continue
        (drawn,) = tokens(output)
        x = rerun(name, logits, [output.prompt_token_ids[-1], *drawn[:-1]])
        assert (x.max(axis=1) - x[np.arange(len(drawn)), drawn] < 1e-3).all(), name


@pytest.mark.parametrize("level", [1, 2])
def test_states_outlive_a_sleep(llm: LLM, level: int) -> None:
    engine = llm.llm_engine
    names = ["guided", None, "all"]
    alone = [generate(llm, [p], [params(name)])[0] for p, name in zip(PROMPTS, names, strict=False)]
    for i, name in enumerate(names):
        engine.add_request(str(i), {"prompt_token_ids": PROMPTS[i]}, params(name))
    states = [engine._core.requests[str(i)] for i in range(3)]
    while not all(state.group.sequences[0].output_token_ids for state in states):
        engine.step()
    assert not any(state.is_finished for state in states)
    engine.sleep(level, "keep")
    engine.wake_up()
    outputs = finished_outputs(engine)
    assert [tokens(outputs[str(i)]) for i in range(3)] == list(map(tokens, alone))


@pytest.mark.parametrize("num_blocks", [120, 20])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_as_a_rerun_in_numpy(llm: LLM, dense: DenseModel, num_blocks: int, mode: Any) -> None:
    """In mixed batches and bursts; with few blocks, requests are preempted and come back with their state."""
    engine = llm.llm_engine
    num_traces = engine.executor.runner.compiled.num_traces  # pyright: ignore
    names: list[str | None] = ["tempered", None, "guided", "without", "all", "guided"]
    alone = [generate(llm, [p], [params(name)])[0] for p, name in zip(PROMPTS, names, strict=True)]
    check(alone, names, dense)
    reschedule(engine, num_blocks=num_blocks, preemption_mode=mode)
    together = generate(llm, PROMPTS, [params(name) for name in names])
    assert list(map(tokens, together)) == list(map(tokens, alone))
    assert (sum(o.metrics.num_preemptions for o in together) > 0) == (num_blocks == 20)
    assert engine.executor.runner.compiled.num_traces == num_traces  # pyright: ignore


@pytest.mark.thorough
@pytest.mark.quick
def test_neighbours_are_unchanged(llm: LLM, checkpoint: Path) -> None:
    with LLM(str(checkpoint), **SETTINGS) as plain:
        free = params(None, temperature=1.0, seed=3)
        wanted = generate(plain, PROMPTS[:1], [free])
    names = ("all", "guided", "tempered", "all", "all")
    got = generate(llm, PROMPTS, [free, *(params(name) for name in names)])
    assert tokens(got[0]) == tokens(wanted[0])


@pytest.mark.quick
def test_samples_have_states_of_their_own(llm: LLM, dense: DenseModel) -> None:
    (output,) = generate(llm, PROMPTS[:1], [params("guided", n=3, temperature=1.0, seed=7)])
    drawn = tokens(output)
    assert len({tuple(ids) for ids in drawn}) == 3
    for i, ids in enumerate(drawn):
        seed = SamplingParams(seed=7).seed_of(i)
        (single,) = generate(llm, PROMPTS[:1], [params("guided", temperature=1.0, seed=seed)])
        assert tokens(single) == [ids]


def test_bad_processors_and_arguments(llm: LLM, checkpoint: Path) -> None:
    for extra, message in (
        ({"nobody": 1.0}, "each name in `extra_args` must be one of the logits processors of this engine"),
        (
            {"tempered": [1.0, 2.0]},
            r"`extra_args\['tempered'\]` must be a list of 1 numbers, got \[1.0, 2.0\]",
        ),
        ({"tempered": "a"}, r"`extra_args\['tempered'\]` must be .*got 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(llm, PROMPTS[:1], [SamplingParams(extra_args=extra)])
    wrong = LogitsProcessor("wrong", lambda logits, state, extra: (logits[:3], state))
    cases = (
        ([wrong], r"the result of logits processor `wrong` must be float32 logits of shape \("),
        ([PROCESSORS[0]] * 2, "the names of `logits_processors` must be unique, got "),
    )
    for processors, message in cases:
        with pytest.raises(ValueError, match=message):
            LLM(str(checkpoint), logits_processors=processors, **SETTINGS)


def test_a_state_is_not_forked_or_taken_back(llm: LLM) -> None:
    engine = llm.llm_engine
    for name, is_refused in (("guided", True), ("tempered", False)):
        engine.add_request(name, {"prompt_token_ids": PROMPTS[0]}, params(name))
        while not engine.scheduler.queues.find(name).sequences[0].output_token_ids:  # pyright: ignore
            engine.step()
        fork, rollback = functools.partial(engine.fork, name, name + " fork"), engine.rollback
        for edit in (fork, functools.partial(rollback, name, 1), engine.state):
            if is_refused:
                with pytest.raises(ValueError, match="guided"):
                    edit()
            else:
                edit()
        engine.abort_request([name, name + " fork"])
        engine.wait_if_idle()


def test_a_processor_that_breaks_logits_ends_its_request_alone(checkpoint: Path) -> None:
    broken = LogitsProcessor("broken", lambda logits, state, extra: (logits * jnp.nan, state), num_args=0)
    with LLM(str(checkpoint), logits_processors=[broken], **SETTINGS) as llm:
        each = [SamplingParams(extra_args={"broken": []}), params(None)]
        bad, good = generate(llm, PROMPTS[:2], each)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("abort", "non-finite logits")
    assert good.outputs[0].finish_reason == "length"


@pytest.mark.quick
def test_python_functions(llm: LLM, dense: DenseModel) -> None:
    """vLLM's old form: slow, and the same as the processor in JAX; with samples, masks and neighbours."""
    seen: list[tuple[list[int], list[int]]] = []

    def ban(output: list[int], logits: np.ndarray) -> np.ndarray:
        logits[BANNED] = -np.inf
        return logits

    def note(prompt: list[int], output: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append((prompt, output))
        return logits * 1.0

    settings: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 10, "n": 2, "logprobs": 2}
    settings |= {"bad_words_token_ids": [[5]], "ignore_eos": True}
    in_jax = SamplingParams(extra_args={"without": []}, **settings)
    free = params(None, temperature=1.0, seed=3)
    wanted = generate(llm, PROMPTS[:2], [in_jax, free])
    in_python = SamplingParams(logits_processors=[ban, note], **settings)
    with pytest.warns(UserWarning, match="slow"):
        got = generate(llm, PROMPTS[:2], [in_python, free])
    assert list(map(tokens, got)) == list(map(tokens, wanted))
    for a, b in zip(got[0].outputs, wanted[0].outputs, strict=True):
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert list(x) == list(y)
            assert np.allclose([e.logprob for e in x.values()], [e.logprob for e in y.values()], atol=1e-4)
    assert all(prompt == PROMPTS[0] for prompt, _ in seen)
    outputs = [list(completion.token_ids) for completion in got[0].outputs]
    assert sorted(output for _, output in seen) == sorted(ids[:i] for ids in outputs for i in range(10))


def test_a_python_function_that_fails_ends_its_request_alone(llm: LLM) -> None:
    def fail(output: list[int], logits: np.ndarray) -> np.ndarray:
        if len(output) == 2:
            raise RuntimeError("planted")
        return logits[:3] if len(output) > 2 else logits

    with pytest.warns(UserWarning, match="slow"):
        bad, good = generate(llm, PROMPTS[:2], [SamplingParams(logits_processors=[fail]), params(None)])
    assert (bad.outputs[0].finish_reason, len(bad.outputs[0].token_ids)) == ("abort", 2)
    assert good.outputs[0].finish_reason == "length"
    for other in ({"presence_penalty": 1.0}, {"extra_args": {"without": []}}, {"repetition_penalty": 1.1}):
        with pytest.raises(ValueError, match=f"must be None with {next(iter(other))}"):
            SamplingParams(logits_processors=[fail], **other)
