"""Every family under random requests, settings and pressure: each request gets what it gets alone.

A seed says how an engine is made, and some runs of its scheduler, each over requests of its own that come at
different steps, share prefixes and are sometimes aborted. Alone, a request runs in the same engine with room
for everything, nothing cached, and one step at a time. A dense call finds the same log-probabilities then,
and the same tokens; requests with a token that rounding could change are left out.
"""

import dataclasses
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.real_model import (
    TOLERANCE,
    DenseModel,
    Request,
    add,
    assert_no_block_lost,
    log_softmax,
    make_engine,
    reschedule,
    run_alone,
    steps_of,
)

from jax_paged import LLMEngine, SamplingParams
from jax_paged.outputs import CompletionOutput, RequestOutput
from jax_paged.pallas_kernels import native

pytestmark = pytest.mark.thorough

FIXTURES = sorted((Path(__file__).parents[1] / "models" / "fixtures").iterdir())
# A latent cache and states: what differs most from keys and values of heads.
EVERY_DAY = {"deepseek_v2_yarn_groups", "lfm2_biases_old_config"}
MAX_LEN, MAX_PROMPT, MAX_OUTPUT, MAX_SAMPLES = 80, 48, 24, 3
VOCAB_SIZE = 128  # all of them have that many tokens
NUM_REQUESTS = 16
MAX_STEPS = 3000
# Logits may be off by 2e-5, and sums of probabilities by half of that over the temperature.
MIN_TEMPERATURE = 0.8
DRAW_TOLERANCE = 2e-5 / MIN_TEMPERATURE / 2


def draw_engine(rng: np.random.Generator, name: str) -> dict[str, Any]:
    """Draws what an engine is made with."""
    settings: dict[str, Any] = {
        "block_size": int(rng.choice([2, 4, 8, 16])),
        "max_num_seqs": int(rng.integers(4, 10)),
        "max_num_batched_tokens": int(rng.integers(16, 64)),
        "attention_backend": str(rng.choice(["xla", "native"])),
        "async_scheduling": bool(rng.integers(2)),
        "num_scheduler_steps": int(rng.choice([1, 1, 4])),
    }
    has_states = name.startswith(("lfm2", "qwen3_5"))
    if has_states:  # of which as many are kept for prefixes as there are seats: of four hardly one is found
        settings["max_num_seqs"] += 4
    if rng.random() < 0.3 and not has_states and not name.startswith("t5"):
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2}
    if native.problem() is not None:
        settings["attention_backend"] = "xla"
    return settings


def draw_requests(rng: np.random.Generator) -> list[Request]:
    """Draws prompts that are alike in the beginning, some of them wholly, and how they are answered."""
    prefixes = rng.integers(0, VOCAB_SIZE, (2, MAX_PROMPT)).tolist()
    requests = []
    for _ in range(NUM_REQUESTS):
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, MAX_PROMPT + 1)).tolist()
        if rng.random() < 0.7:
            num_shared = len(prompt) if rng.random() < 0.5 else int(rng.integers(len(prompt)))
            prompt[:num_shared] = prefixes[rng.integers(2)][:num_shared]
        params: dict[str, Any] = {"temperature": 0.0, "logprobs": 0}
        params["max_tokens"] = int(rng.integers(1, MAX_OUTPUT + 1))
        if rng.random() < 0.5:
            params |= {
                "temperature": float(rng.uniform(MIN_TEMPERATURE, 1.5)),
                "seed": int(rng.integers(2**62)),
            }
            params["presence_penalty"] = float(rng.choice([0.0, 0.5]))
            params["n"] = int(rng.choice([1, 2, MAX_SAMPLES]))
            del prompt[MAX_PROMPT // params["n"] :]
        if rng.random() < 0.3:
            params["stop_token_ids"] = rng.integers(0, VOCAB_SIZE, 10).tolist()
        requests.append(Request(prompt, SamplingParams(**params), priority=int(rng.integers(3))))
    return requests


def draw_scheduler(rng: np.random.Generator, engine: LLMEngine, requests: list[Request]) -> dict[str, Any]:
    """Draws settings of a scheduler whose pool holds the largest request, and perhaps a little more."""
    config = engine.config

    def blocks_of(r: Request) -> int:
        # Samples that are recomputed may share nothing.
        num_own = (len(r.prompt) + (r.params.max_tokens or 0)) // config.block_size + 1
        return r.params.n * num_own * len(config.cache_groups)

    settings: dict[str, Any] = {
        "num_blocks": 1 + int(max(map(blocks_of, requests)) * rng.choice([1.0, 1.1, 1.5])),
        "num_swap_blocks": min(int(rng.choice([0, 16, 2000])), config.num_swap_blocks),
        "preemption_mode": rng.choice(np.array([None, "recompute", "swap"], object)),
        "scheduling_policy": str(rng.choice(["fcfs", "priority"])),
        "max_num_batched_tokens": int(rng.integers(4, config.max_num_batched_tokens + 1)),
        "enable_prefix_caching": bool(rng.random() < 0.75),
    }
    if config.num_state_slots:
        few = int(rng.integers(MAX_SAMPLES + 2, config.num_state_slots + 1))
        settings["num_state_slots"] = few if rng.random() < 0.5 else None
    return settings


@dataclasses.dataclass
class Fuzz:
    """One fixture and its engine; `counts` says what has happened in all runs."""

    engine: LLMEngine
    dense: DenseModel | None  # an encoder-decoder model's is not called with texts
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def alone(self, requests: list[Request]) -> tuple[list[Request], list[RequestOutput]]:
        """Returns what requests get alone, but of those with tokens that rounding could change."""
        config, loop = self.engine.config, self.engine._core
        plain = {"num_scheduler_steps": 1, "speculation": None, "enable_prefix_caching": False}
        reschedule(self.engine, max_num_batched_tokens=config.max_num_batched_tokens, **plain)
        kept, loop.max_in_flight = loop.max_in_flight, 1
        outputs = run_alone(self.engine, [dataclasses.replace(r, priority=0) for r in requests])
        loop.max_in_flight = kept
        if self.dense is None:
            return requests, outputs
        texts = [[*o.prompt_token_ids, *x.token_ids] for o in outputs for x in o.outputs]
        logits = iter(self.dense.logits(texts))
        clear = []
        for i, (request, output) in enumerate(zip(requests, outputs, strict=True)):
            leads = []
            for x in output.outputs:
                rows, tokens = next(logits)[len(request.prompt) - 1 : -1], list(x.token_ids)
                expected = log_softmax(rows)[range(len(rows)), tokens]
                np.testing.assert_allclose(logprobs_of(x), expected, atol=TOLERANCE)
                leads.append(lead(rows, request, x.index, tokens))
            tolerance = DRAW_TOLERANCE if request.params.temperature else TOLERANCE
            assert min(leads) > -tolerance, (request, leads)
            if min(leads) > tolerance:
                clear.append(i)
        self.counts["close"] += len(requests) - len(clear)
        return [requests[i] for i in clear], [outputs[i] for i in clear]

    def together(self, rng: np.random.Generator, requests: list[Request], alone: list[RequestOutput]) -> None:
        """Runs requests that come and leave at any step; compares them with what each got alone."""
        engine, queues = self.engine, self.engine.scheduler.queues
        arrivals = np.sort(rng.integers(0, 2 * len(requests), len(requests)))
        come, finished, aborted = 0, dict[int, RequestOutput](), dict[int, RequestOutput]()
        for step in range(MAX_STEPS):
            while come < len(requests) and arrivals[come] <= step:
                add(engine, [requests[come]], prefix=f"{come} ")  # ids "0 0", "1 0", ...
                come += 1
            unfinished = [*queues.running, *queues.waiting, *queues.swapped]
            if unfinished and rng.random() < 0.015:
                request_id = unfinished[rng.integers(len(unfinished))]
                state = engine.abort_request(request_id)
                assert state is not None
                aborted[int(request_id.split()[0])] = state.output()
            finished |= {int(o.request_id.split()[0]): o for o in engine.step() if o.finished}
            if come == len(requests) and not engine.has_unfinished_requests():
                break
        else:
            raise AssertionError(
                f"{len(finished)} of {len(requests)} requests have ended in {MAX_STEPS} steps"
            )
        assert_no_block_lost(engine)
        assert finished.keys() | aborted.keys() == set(range(len(requests)))
        for i, output in (finished | aborted).items():
            for x, single in zip(output.outputs, alone[i].outputs, strict=i not in aborted):
                num = len(x.token_ids)
                assert list(x.token_ids) == list(single.token_ids)[: None if i in finished else num], (
                    f"output {x.index} of request {i}, {requests[i]}: {x.finish_reason}, {x.stop_reason}"
                )
                np.testing.assert_allclose(logprobs_of(x), logprobs_of(single)[:num], atol=TOLERANCE)
                assert i in aborted or x.finish_reason == single.finish_reason
            self.counts["preempted"] += output.metrics.num_preemptions
            self.counts["cached"] += output.num_cached_tokens
        self.counts["aborted"] += len(aborted)

    def run(self, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
        requests, alone = self.alone(draw_requests(rng))
        settings = draw_scheduler(rng, self.engine, requests)
        try:
            reschedule(self.engine, **settings)
            if settings["scheduling_policy"] == "fcfs":
                requests = [dataclasses.replace(r, priority=0) for r in requests]
            steps = steps_of(self.engine, patch)
            self.together(rng, requests, alone)
        except BaseException as e:
            e.add_note(f"scheduler: {settings}")
            raise
        for step in steps:
            self.counts["swapped"] += len(step.blocks_to_swap_out)
            for row in step.scheduled:
                group, _ = steps.named[row.seq_id]
                num_prompt = len(group.sequences[0].prompt_token_ids)
                self.counts["chunks"] += row.start + row.num_tokens < num_prompt


def lead(logits: np.ndarray, request: Request, index: int, tokens: list[int]) -> float:
    """Returns by how much tokens stand before others in their draws, at the least; negative if others do.

    Of a greedy output it is a difference of logits, else one of the sums of probabilities that a draw lies
    between. These are those of the sampler, in float64.
    """
    params, each = request.params, np.arange(len(tokens))
    if not params.temperature:
        chosen = logits[each, tokens]
        others = logits.copy()
        others[each, tokens] = -np.inf
        return float((chosen - others.max(-1)).min())
    is_seen = np.zeros(logits.shape, bool)
    for i, token in enumerate(tokens[:-1]):
        is_seen[i + 1 :, token] = True
    adjusted = logits.astype(np.float64) - params.presence_penalty * is_seen
    p = np.exp(log_softmax(adjusted / params.temperature))
    above = p.cumsum(-1)[each, tokens]
    words = np.array([params.seed_of(index)], np.uint64).view(np.uint32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32"), len(request.prompt) + each
    )
    drawn = (np.asarray(jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(keys)) >> 2) / 2**30
    return float(np.minimum(drawn - (above - p[each, tokens]), above - drawn).min())


def logprobs_of(output: CompletionOutput) -> list[float]:
    """Returns the log-probabilities of the tokens of an output."""
    assert output.logprobs is not None
    return [entry[t].logprob for entry, t in zip(output.logprobs, output.token_ids, strict=True)]


def cases() -> list[Any]:
    slow = pytest.mark.slow
    some = [pytest.param(f, 0, 4, id=f"{f.name}-once") for f in FIXTURES if f.name in EVERY_DAY]
    return some + [pytest.param(f, 1, 10, id=f.name, marks=slow) for f in FIXTURES]


@pytest.mark.parametrize(("folder", "seed", "num_runs"), cases())
def test_as_alone(folder: Path, seed: int, num_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng([seed, zlib.crc32(folder.name.encode())])
    settings = draw_engine(rng, folder.name)
    has_encoder = folder.name.startswith("t5")
    try:
        with make_engine(
            folder,
            few_buckets=True,
            skip_tokenizer_init=True,
            max_model_len=MAX_LEN,
            num_gpu_blocks_override=600,
            swap_space=2**-8,
            **settings,
        ) as engine:
            fuzz = Fuzz(engine, None if has_encoder else DenseModel(folder, MAX_LEN))
            for _ in range(num_runs):
                fuzz.run(rng, monkeypatch)
    except BaseException as e:
        e.add_note(f"{folder.name}, seed {seed}; engine: {settings}")
        raise
    counts = fuzz.counts
    print(f"{folder.name}: {dict(counts)}; {settings}")
    assert counts["preempted"] > 0
    assert has_encoder or min(counts["cached"], counts["chunks"]) > 0
    assert counts["close"] < num_runs * NUM_REQUESTS / 4
