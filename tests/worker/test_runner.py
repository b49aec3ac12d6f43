"""The runner on a real small model, step by step and without a scheduler."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.real_model import VOCAB_SIZE, DenseModel
from helpers.steps import execute, make_output, make_row, new_sequence

from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.model_runner_output import NO_TOKEN, ModelRunnerOutput
from jax_paged.core.scheduler_output import NewSequence, Sample, ScheduledSequence
from jax_paged.sampling_params import SamplingParams
from jax_paged.worker.compilation import plan_steps
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.executor import LocalExecutor
from jax_paged.worker.model_runner import ModelRunner
from jax_paged.worker.traced_step import StepProgram

MAX_LEN, BLOCK_SIZE, NUM_BATCH_SLOTS, NUM_TOKENS = 64, 4, 8, 32
BUCKETS = [Bucket(True, NUM_BATCH_SLOTS, NUM_BATCH_SLOTS), Bucket(False, NUM_TOKENS, NUM_BATCH_SLOTS)]
# The best token leads by more than rounding; where it does not, either may be chosen.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def executor(checkpoint: Path) -> Iterator[LocalExecutor]:
    args = EngineArgs(
        model=str(checkpoint),
        dtype="float32",
        attention_backend="xla",
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        max_num_seqs=NUM_BATCH_SLOTS,
        max_num_batched_tokens=NUM_TOKENS,
        num_gpu_blocks_override=1 + 20 * MAX_LEN // BLOCK_SIZE,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_steps, "plan_buckets", lambda *limits, **kind: BUCKETS)
        executor = LocalExecutor(args)
    executor.wait_until_compiled()
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def dense(checkpoint: Path) -> DenseModel:
    return DenseModel(checkpoint, MAX_LEN)


@dataclasses.dataclass
class Text:
    """A sequence, as its scheduler would know it; it holds all of its blocks from the start."""

    seq_id: int
    prompt: list[int]
    params: dict[str, Any]
    output: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    place: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def new(self) -> NewSequence:
        n = MAX_LEN // BLOCK_SIZE
        table = list(range(1 + self.place * n, 1 + (self.place + 1) * n))
        return new_sequence(self.seq_id, self.prompt, self.output, tables=[table], **self.params)

    def row(self, num_tokens: int | None = None) -> ScheduledSequence:
        stop = None if num_tokens is None else self.num_computed + num_tokens
        row = make_row(self.seq_id, self.num_computed, self.tokens[self.num_computed : stop])
        self.num_computed += row.num_tokens
        return row


class Driver:
    """Batch slots texts and runs steps of them; everything is let go at the end."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.seated: list[int] = []
        self.coming: list[NewSequence] = []
        self.leaving: list[int] = []

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *error: object) -> None:
        seated = [i for i in self.seated if i not in self.leaving]
        execute(self.runner, make_output(released=[*self.leaving, *seated]))

    def batch_slot(self, *texts: Text) -> None:
        self.coming += [text.new() for text in texts]
        self.seated += [text.seq_id for text in texts]

    def release(self, *texts: Text) -> None:
        self.leaving += [text.seq_id for text in texts]
        self.seated = [i for i in self.seated if i not in self.leaving]

    def step(
        self, rows: Sequence[ScheduledSequence], samples: Sequence[Sample] = (), **moves: Any
    ) -> ModelRunnerOutput:
        rows = list(rows)
        output = make_output(rows, samples, new=self.coming, released=self.leaving, **moves)
        self.coming, self.leaving = [], []
        return execute(self.runner, output)

    def draw(self, texts: Sequence[Text], **moves: Any) -> ModelRunnerOutput:
        """Runs each text to its end and appends the token that is drawn."""
        ordered = sorted(texts, key=lambda t: len(t.tokens) - t.num_computed > 1)
        samples = [Sample(i, t.seq_id) for i, t in enumerate(ordered)]
        result = self.step([t.row() for t in ordered], samples, **moves)
        for text, (token_id,) in zip(ordered, result.token_ids, strict=True):
            text.output.append(token_id)
        return result


def random_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_given_tokens_draws_what_single_steps_draw(
    executor: LocalExecutor, temperature: float
) -> None:
    params = {"temperature": temperature, "seed": 11, "logprobs": 3, "top_p": 0.95, "min_tokens": 3}
    params |= {"end_token_ids": [5], "bad_words_token_ids": [[9], [3, 4]], "logit_bias": {8: 1.0}}
    prompt, k = random_prompt(1, 6), 5
    with Driver(executor.runner) as driver:
        single = Text(1, prompt, params)
        driver.batch_slot(single)
        steps = [driver.draw([single]) for _ in range(k + 1)]
        # The same tokens, given at once; beside them a plain row and a chunk without a sample.
        given = Text(2, prompt, params, output=single.output[:1], num_computed=0, place=1)
        other, chunk = Text(3, random_prompt(2, 4), {}, place=2), Text(4, random_prompt(3, 9), {}, place=3)
        driver.batch_slot(given, other, chunk)
        driver.step([given.row(6)])
        given.output = single.output[:k]
        rows = [given.row(), other.row(), chunk.row(3)]
        result = driver.step(rows, [Sample(0, 2, k), Sample(1, 3)])
    assert result.token_ids[0] == [step.token_ids[0][0] for step in steps[1:]]
    assert len(result.token_ids[1]) == 1
    assert result.is_finite == [True] * 3
    for got, step in zip(result.logprobs[0], steps[1:], strict=True):
        want = step.logprobs[0][0]
        assert (got.rank, got.top_token_ids) == (want.rank, want.top_token_ids)
        assert [got.logprob, *got.top_logprobs] == pytest.approx([want.logprob, *want.top_logprobs], abs=1e-4)
    assert result.logprobs[1][0].top_token_ids == []


def penalised(logits: np.ndarray, text: Text) -> np.ndarray:
    """The logits that the next token is chosen from, by the definitions of mask and penalties."""
    p = SamplingParams(**text.params)
    if p.allowed_token_ids is not None:
        logits = np.where(np.isin(np.arange(VOCAB_SIZE), p.allowed_token_ids), logits, -np.inf)
    counts = np.bincount(np.array(text.output, int), minlength=VOCAB_SIZE)
    seen = np.isin(np.arange(VOCAB_SIZE), text.tokens)
    x = logits.astype(np.float64)
    x = np.where(seen, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
    return x - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)


def assert_chosen_rightly(dense: DenseModel, texts: Sequence[Text]) -> int:
    """Checks all tokens of outputs; returns how many the penalties have changed."""
    num_changed = 0
    for text, logits in zip(texts, dense.logits([t.tokens for t in texts]), strict=True):
        for i, token_id in enumerate(text.output):
            so_far = dataclasses.replace(text, output=text.output[:i])
            raw = logits[len(text.prompt) + i - 1]
            plain = dataclasses.replace(so_far, params={k: text.params[k] for k in ("allowed_token_ids",)})
            x = penalised(raw, so_far)
            assert x[token_id] > x.max() - TOLERANCE, f"token {i} of {text.params}"
            num_changed += int(token_id != penalised(raw, plain).argmax())
    return num_changed


PENALTIES = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.8},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"presence_penalty": 2.0},
    {"presence_penalty": 1.1, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {},
]


def test_penalties_of_chunks_and_preemptions(executor: LocalExecutor, dense: DenseModel) -> None:
    # Few tokens to choose from, of which some stand in the prompt: so they come again and again.
    prompts = [random_prompt(i, 12) for i in range(len(PENALTIES))]
    texts = [
        Text(i, prompt, params | {"allowed_token_ids": [*prompt[:3], *range(i, 100, 12)]}, place=i)
        for i, (prompt, params) in enumerate(zip(prompts, PENALTIES, strict=True))
    ]
    with Driver(executor.runner) as driver:
        driver.batch_slot(*texts)
        for _ in range(3):  # the prompts in chunks of four: 28 of the 32 tokens of a step
            driver.step([t.row(3) for t in texts])
        for round_ in range(3):
            for _ in range(6):
                driver.draw(texts)
            # Preempted: they lose their batch slots, come back in others, and are computed again in two
            # chunks.
            lost = texts[round_ : round_ + 3]
            driver.release(*lost)
            for text in lost:
                text.seq_id += 100
                text.num_computed = 0
            driver.batch_slot(*reversed(lost))
            driver.step([t.row(9) for t in lost])
            for text in lost:
                driver.step([text.row(len(text.tokens) - 1 - text.num_computed)])
        driver.draw(texts)
    assert all(len(t.output) == 19 for t in texts)
    assert assert_chosen_rightly(dense, texts) > 20


def test_penalties_of_forks(executor: LocalExecutor, dense: DenseModel) -> None:
    """Samples forked at the end of the prompt, and one forked in its middle, count tokens of their own."""
    params = {"frequency_penalty": 1.5, "repetition_penalty": 1.3}
    texts = [Text(i, random_prompt(20, 5), params | {"logit_bias": {50 + i: 30.0}}) for i in range(3)]
    for i, text in enumerate(texts):
        text.place = i
    n = MAX_LEN // BLOCK_SIZE
    with Driver(executor.runner) as driver:
        driver.batch_slot(*texts)
        row = texts[0].row()
        result = driver.step([row], [Sample(0, i) for i in range(3)])
        for text, (token_id,) in zip(texts, result.token_ids, strict=True):
            text.output.append(token_id)
            text.num_computed = 5
        # Blocks 0 and 1 of the first hold the prompt of all.
        copies = [(1 + j, 1 + i * n + j) for i in (1, 2) for j in (0, 1)]
        driver.draw(texts, copies=copies)
        for _ in range(5):
            driver.draw(texts)
        fork = dataclasses.replace(texts[1], seq_id=9, output=list(texts[1].output), place=3)
        driver.batch_slot(fork)
        copies = [(1 + n + j, 1 + 3 * n + j) for j in range(n)]
        driver.draw([*texts, fork], copies=copies)
        assert fork.output == texts[1].output
        driver.release(texts[1])
        for _ in range(4):
            driver.draw([texts[0], texts[2], fork])
    for i, text in enumerate(texts):
        assert text.output.count(50 + i) >= 2, "its own bias shows in each"
    biased = [texts[0], texts[2], fork]
    for text in biased:
        (token_id,) = text.params["logit_bias"]
        logits = dense.logits([text.tokens])[0].copy()
        logits[:, token_id] += 30.0
        plain = dataclasses.replace(text, params=params)
        for i, drawn in enumerate(text.output):
            x = penalised(
                logits[len(text.prompt) + i - 1], dataclasses.replace(plain, output=text.output[:i])
            )
            assert x[drawn] > x.max() - TOLERANCE


def test_allowed_tokens_and_bad_words(executor: LocalExecutor, dense: DenseModel) -> None:
    prompt = random_prompt(30, 6)
    plain = Text(1, prompt, {})
    with Driver(executor.runner) as driver:
        driver.batch_slot(plain)
        for _ in range(8):
            driver.draw([plain])
        first, second, third = plain.output[:3]
        words = [[first, second], [prompt[-1], 7], [third, third, third]]
        texts = [
            Text(2, prompt, {"allowed_token_ids": [1, 33, 200, VOCAB_SIZE - 1]}, place=1),
            Text(3, prompt, {"bad_words_token_ids": words}, place=2),
            Text(4, prompt, {"bad_words_token_ids": [[first]]}, place=3),
            Text(5, prompt, {}, place=4),
        ]
        driver.batch_slot(*texts)
        for _ in range(8):
            driver.draw(texts)
    allowed, pair, single, same = texts
    assert same.output == plain.output
    assert set(allowed.output) <= {1, 33, 200, VOCAB_SIZE - 1}
    logits = dense.logits([allowed.tokens])[0]
    for i, token_id in enumerate(allowed.output):
        row = logits[len(prompt) + i - 1]
        assert row[token_id] > row[[1, 33, 200, VOCAB_SIZE - 1]].max() - TOLERANCE
    assert pair.output[0] == first
    assert pair.output[1] != second
    assert first not in single.output


def test_rows_without_any_token_to_choose(executor: LocalExecutor) -> None:
    """They are told apart, also within a row that is drawn from several times; other rows are as without."""
    prompts, token = [random_prompt(35 + i, 5) for i in range(4)], 300
    plain = Text(1, prompts[0], {})
    with Driver(executor.runner) as driver:
        driver.batch_slot(plain)
        driver.draw([plain])
        texts = [
            Text(2, prompts[0], {}, place=1),
            Text(3, prompts[1], {"allowed_token_ids": [token], "bad_words_token_ids": [[token]]}, place=2),
            Text(4, prompts[2], {"allowed_token_ids": [5], "end_token_ids": [5], "min_tokens": 2}, place=3),
            # The second of these tokens may be chosen only where the first does not stand before it.
            Text(5, prompts[3], {"allowed_token_ids": [token], "bad_words_token_ids": [[8, token]]}, place=4),
        ]
        driver.batch_slot(*texts)
        texts[3].output = [token, 8, token]
        chunk = Text(
            6, random_prompt(40, 9), {"allowed_token_ids": [5], "bad_words_token_ids": [[5]]}, place=5
        )
        driver.batch_slot(chunk)
        rows = [*(text.row() for text in texts), chunk.row(3)]
        samples = [Sample(0, 2), Sample(1, 3), Sample(2, 4), Sample(3, 5, 4)]
        result = driver.step(rows, samples)
    missing = [NO_TOKEN]
    assert result.token_ids == [plain.output, missing, missing, [token, token, NO_TOKEN, token]]
    assert result.is_finite == [True] * 5


def test_prompt_logprobs_of_chunks(executor: LocalExecutor, dense: DenseModel) -> None:
    """A chunk of one token beside decodes has them too; only positions of the prompt have any."""
    params = {"prompt_logprobs": 2}
    text, other = Text(1, random_prompt(40, 11), params), Text(2, random_prompt(41, 3), {}, place=1)
    got = []
    with Driver(executor.runner) as driver:
        driver.batch_slot(text, other)
        driver.draw([other])
        for num_tokens in (4, 1, 5):
            result = driver.step([other.row(), text.row(num_tokens)], [Sample(0, 2)])
            other.output.append(result.token_ids[0][0])
            assert result.prompt_logprobs[0] == []
            assert len(result.prompt_logprobs[1]) == num_tokens
            got += result.prompt_logprobs[1]
        result = driver.draw([text])
        assert result.prompt_logprobs == [[]], "the last token of the prompt has no follower in it"
        assert driver.draw([text]).prompt_logprobs == [[]]
    logits = dense.logits([text.prompt])[0].astype(np.float64)
    for position, logprobs in enumerate(got, 1):
        x = logits[position - 1]
        want = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        token_id = text.prompt[position]
        assert logprobs.logprob == pytest.approx(want[token_id], abs=TOLERANCE)
        assert logprobs.rank == 1 + (x > x[token_id]).sum()
        assert logprobs.top_logprobs == pytest.approx(np.sort(want)[:-3:-1].tolist(), abs=TOLERANCE)


def test_steps_in_flight(executor: LocalExecutor) -> None:
    """Several steps are dispatched before the first result is asked for; results come in their order."""
    runner, prompts = executor.runner, [random_prompt(50 + i, 5) for i in range(4)]
    with Driver(runner) as driver:
        texts = [Text(i, p, {"frequency_penalty": 1.0}, place=i) for i, p in enumerate(prompts)]
        driver.batch_slot(*texts)
        wanted = [driver.draw([t]).token_ids for t in texts]
    outputs = [
        make_output(
            [make_row(10 + i, 0, t.prompt)],
            [Sample(0, 10 + i)],
            new=[dataclasses.replace(t, seq_id=10 + i, output=[]).new()],
            released=[9 + i] if i else [],
            step_id=70 + i,
        )
        for i, t in enumerate(texts)
    ]
    outputs.insert(2, make_output(step_id=99))
    for output in outputs:
        executor.dispatch(output)
    results = [executor.result() for _ in outputs]
    assert [result.step_id for result in results] == [70, 71, 99, 72, 73]
    empty = results.pop(2)
    assert (empty.token_ids, empty.logprobs, empty.is_finite, empty.prompt_logprobs) == ([], [], [], [])
    assert [result.token_ids for result in results] == wanted
    with pytest.raises(AssertionError, match="no dispatched step"):
        executor.result()
    execute(runner, make_output(released=[13]))


def test_nan_in_any_row_of_logits_is_noticed(executor: LocalExecutor) -> None:
    """Of a row that is drawn from several times, and of a chunk without a sample; other rows are fine."""
    runner, nan_token = executor.runner, 17
    weights = runner.arrays["weights"]
    (index,) = (i for i, w in enumerate(weights) if w.shape == (VOCAB_SIZE, 64))
    kept = weights[index]
    broken = np.array(kept)
    broken[nan_token] = np.nan
    prompts = [[1, 2, 3, nan_token], [4, 5, 6, 7], [8, nan_token, 9, 10]]
    with Driver(runner) as driver:
        texts = [Text(i, prompt, {}, place=i) for i, prompt in enumerate(prompts)]
        driver.batch_slot(*texts)
        weights[index] = jax.device_put(broken, kept.sharding)
        try:
            result = driver.step([t.row(4 - (t.seq_id == 2)) for t in texts], [Sample(0, 0, 3), Sample(1, 1)])
        finally:
            weights[index] = kept
    assert result.is_finite == [False, True, False]
    # Of rows behind drafts, those up to the first that is not finite.
    assert [len(tokens) for tokens in result.token_ids] == [1, 1]
    runner.fill_kv_cache(0.0)


def test_what_unwritten_blocks_hold_does_not_matter(executor: LocalExecutor) -> None:
    outputs = []
    for value in (0.0, np.nan):
        executor.runner.fill_kv_cache(value)
        with Driver(executor.runner) as driver:
            texts = [Text(i, random_prompt(60 + i, 3 + 5 * i), {}, place=i) for i in range(3)]
            driver.batch_slot(*texts)
            for _ in range(6):
                driver.draw(texts)
            outputs.append([t.output for t in texts])
    executor.runner.fill_kv_cache(0.0)
    assert outputs[0] == outputs[1]


def uses_outside_conditionals(jaxpr: Any, shape: tuple[int, ...]) -> list[str]:
    """The primitives that read an int32 array of a shape, and are not in a branch."""
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        is_leaf = name == "cond" or name.startswith("scatter")
        inner = [] if is_leaf else [v for v in equation.params.values() if hasattr(v, "jaxpr")]
        for value in inner:
            found += uses_outside_conditionals(value.jaxpr, shape)
        avals = [v.aval for v in equation.invars]
        if not inner and any(a.shape == shape and a.dtype == np.int32 for a in avals):
            found.append(name)
    return found


def test_steps_without_penalties_only_count(executor: LocalExecutor) -> None:
    """Outside the branch of bias and penalties, nothing reads the token counts but the scatter."""
    context = dataclasses.replace(executor.runner.context, max_num_seqs=9)
    for bucket in BUCKETS:
        traced = StepProgram(bucket).trace(context)
        uses = uses_outside_conditionals(traced.jaxpr.jaxpr, (9, VOCAB_SIZE))
        assert sorted(uses) == ["cond", "scatter-add"]


def test_nothing_large_is_copied(executor: LocalExecutor) -> None:
    """Neither the pool nor what the batch slots have, however many of them there are."""
    runner = executor.runner
    pool_bytes = executor.config.kv_cache_bytes
    count_bytes = runner.arrays["token_counts"][0].nbytes
    table_bytes = runner.arrays["block_tables"][0].nbytes
    assert count_bytes == NUM_BATCH_SLOTS * VOCAB_SIZE * 4
    for bucket in BUCKETS:
        memory = runner.compiled[StepProgram(bucket)].memory
        assert memory.alias_size_in_bytes >= pool_bytes + count_bytes + table_bytes
        many_slots = dataclasses.replace(runner.context, max_num_seqs=20_000)
        larger = StepProgram(bucket).lower(many_slots).compile().memory_analysis()
        assert larger is not None
        more_bytes = (20_000 - NUM_BATCH_SLOTS) * (
            4 + (count_bytes + table_bytes) // NUM_BATCH_SLOTS
        )  # a last token each
        assert larger.alias_size_in_bytes == memory.alias_size_in_bytes + more_bytes
        assert larger.temp_size_in_bytes - memory.temp_size_in_bytes < 0.01 * more_bytes


def test_the_plan_names_every_program(executor: LocalExecutor) -> None:
    names = [*map(str, BUCKETS), "copy 8", "swap out", "swap in"]
    names += ["write block tables", "reset token counts", "prompt logprobs"]
    assert [str(program) for program in executor.runner.compiled.programs] == names
    _, *lines, backend = executor.compile_plan().splitlines()
    assert [line.split("  ")[0].strip() for line in lines] == names
    assert backend == "backend xla (requested)"
    assert executor.buckets == tuple(map(str, BUCKETS))
