"""EAGLE-3 heads: drafts are those of the formulas, and outputs those of an engine without drafts."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.eagle_heads import CONFIG, NumpyHead, Windows, random_tensors, trained_tensors, write_head
from helpers.real_model import CONFIG as MODEL_CONFIG
from helpers.real_model import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Request,
    drain,
    make_executor,
    nan_embedding,
    reschedule,
    reset,
    run,
    write_checkpoint,
)
from helpers.wrapped_executor import WrappedExecutor

from jax_paged import LLM, EngineArgs, LLMEngine, SamplingParams
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.families.eagle import EagleConfig
from jax_paged.models.families.llama import LlamaForCausalLM
from jax_paged.models.features.hooks import recording_hooks
from jax_paged.models.loading.eagle_checkpoint import load_head
from jax_paged.models.weights import load_model, random_model
from jax_paged.outputs import RequestOutput
from jax_paged.worker.compilation import plan_steps
from jax_paged.worker.compilation.buckets import plan_verifying

pytestmark = pytest.mark.thorough

K = 4
# Float32 sums in another order move the logits of these heads by less; a lead below it may be lost.
LEAD = 1e-3
RNG = np.random.default_rng(5)


def prompt(length: int) -> list[int]:
    return RNG.integers(0, VOCAB_SIZE, length).tolist()


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 30, "ignore_eos": True} | values))


def requests() -> list[Request]:
    """Greedy and random requests of all lengths, half of which share a prefix, which ends in a block."""
    prefix = prompt(18)
    out = []
    for i, length in enumerate((1, 2, 3, 4, 5, 9, 16, 17, 31, 40, 64, 70)):
        text = (prefix + prompt(70) if i % 2 else prompt(70))[:length]
        out.append(Request(text, params(max_tokens=20 + i)))
        out.append(Request(text, params(temperature=0.8, seed=i, top_p=0.95)))
    out.append(Request(prompt(10), params(temperature=0.8, seed=50, n=3)))
    out.append(Request(prompt(10), params(temperature=0.9, seed=51, n=3, top_k=20, max_tokens=40)))
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    out.append(Request(prompt(12), params(**penalties)))
    out.append(Request(prompt(12), params(temperature=0.7, seed=52, **penalties)))
    out.append(Request(prompt(12), params(ignore_eos=False, stop_token_ids=list(range(0, VOCAB_SIZE, 20)))))
    return out


REQUESTS = requests()


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(o.token_ids) for o in output.outputs] for output in outputs]


@dataclasses.dataclass(frozen=True)
class Drafted:
    """The drafts of one row: behind a text of `num_tokens` tokens of a sequence."""

    prompt: list[int]
    num_tokens: int
    drafts: list[int]


class Watched(WrappedExecutor):
    """Runs the steps of another executor, and notes what was drafted."""

    def __init__(self, args: EngineArgs) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan_steps, "plan_verifying", lambda config: plan_verifying(config)[-1:])
            super().__init__(make_executor(args), after=self._note)
        self.drafted: list[Drafted] = []
        self.num_bursts = 0
        self._prompts: dict[int, list[int]] = {}

    def _note(self, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
        self._prompts |= {new.seq_id: new.request.prompt_token_ids for new in output.new_sequences}
        self.num_bursts += bool(output.num_multi_step_tokens)
        for i, sample in enumerate(output.samples):
            if sample.num_logits > 1:
                start = output.scheduled[sample.scheduled_index].start
                self.drafted.append(Drafted(self._prompts[sample.seq_id], start + 1, result.drafts[i]))
        return result


def args_of(checkpoint: Path, head: Path, **settings: Any) -> EngineArgs:
    usual: dict[str, Any] = {
        "dtype": "float32",
        "attention_backend": "xla",
        "matmul_backend": "xla",
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 4,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 2000,
        "swap_space": 0.02,
        "num_scheduler_steps": 8,
        "async_scheduling": False,
        "speculative_config": {"method": "eagle3", "model": str(head), "adaptive": False},
    }
    return EngineArgs(model=str(checkpoint), **(usual | settings))


@pytest.fixture(scope="module")
def random_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("random"), CONFIG, random_tensors(CONFIG))


@pytest.fixture(scope="module")
def module_engine(checkpoint: Path, random_head: Path) -> Iterator[LLMEngine]:
    args = args_of(checkpoint, random_head)
    executor = Watched(args)
    with LLMEngine(args, executor) as engine:
        yield engine
    executor.inner.close()


@pytest.fixture
def eagle(module_engine: LLMEngine) -> LLMEngine:
    """An engine with a random head, idle; its scheduler has no bursts."""
    module_engine._core.max_in_flight = 1
    watched(reset(module_engine)).drafted.clear()
    schedule(module_engine)
    return module_engine


def watched(engine: LLMEngine) -> Watched:
    assert isinstance(engine.executor, Watched)
    return engine.executor


def schedule(engine: LLMEngine, **settings: Any) -> None:
    speculation = engine.config.speculation
    assert speculation is not None
    if "is_adaptive" in settings:
        speculation = dataclasses.replace(speculation, is_adaptive=settings.pop("is_adaptive"))
    reschedule(engine, **({"speculation": speculation, "num_scheduler_steps": 1} | settings))


@pytest.fixture(scope="module")
def expected(session_shared_engine: LLMEngine) -> list[list[list[int]]]:
    """The outputs without drafts."""
    return tokens_of(run(reset(session_shared_engine), REQUESTS))


@pytest.fixture(scope="module")
def trained_head(
    checkpoint: Path, expected: list[list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A head that knows these outputs nearly by heart, so that many of its drafts are accepted."""
    model = load_model(checkpoint, "float32").model
    assert isinstance(model, LlamaForCausalLM)
    pairs = [(r.prompt, out) for r, outs in zip(REQUESTS, expected, strict=True) for out in outs]
    texts = [prompt + out for prompt, out in pairs]
    tensors = trained_tensors(
        model, CONFIG, texts, [len(prompt) for prompt, _ in pairs], num_steps=120, batch=16, num_passes=K
    )
    return write_head(tmp_path_factory.mktemp("trained"), CONFIG, tensors)


@contextlib.contextmanager
def head_of(engine: LLMEngine, folder: Path) -> Iterator[LLMEngine]:
    """Gives an engine another head of the same shape for a while."""
    weights = watched(engine).runner.arrays["weights"]
    head = load_head(folder, load_model(Path(engine.config.model_name), "float32"))
    new = jax.tree.leaves(jax.tree.map(jnp.asarray, _state(head)))
    kept = weights[-len(new) :]
    assert [x.shape for x in new] == [x.shape for x in kept]
    weights[-len(new) :] = [jax.device_put(x, old.sharding) for x, old in zip(new, kept, strict=True)]
    try:
        yield engine
    finally:
        weights[-len(new) :] = kept


def _state(head: Any) -> Any:
    return nnx.split(head)[1]


# Drafts.


@pytest.mark.parametrize("budget", [128, 13])
def test_drafts_are_those_of_the_formulas(
    eagle: LLMEngine, checkpoint: Path, random_head: Path, budget: int
) -> None:
    """Of whole prompts and of chunks, over slots that hold NaN."""
    watched(eagle).runner.fill_kv_cache(np.nan)
    schedule(eagle, enable_prefix_caching=False, max_num_batched_tokens=budget)
    greedy = [Request(prompt(n), params(max_tokens=9)) for n in (1, 2, 4, 5, 13, 30)]
    outputs = run(eagle, greedy)
    assert_drafts_right(eagle, checkpoint, random_head, outputs)
    assert max(len(d.drafts) for d in watched(eagle).drafted) == K


def test_drafts_of_a_head_that_is_often_right(eagle: LLMEngine, checkpoint: Path, trained_head: Path) -> None:
    """Rows go on behind drafts that were accepted, whose features and entries the step has left."""
    chosen = [r for r in REQUESTS if r.params.temperature == 0 and r.params.repetition_penalty == 1]
    watched(eagle).runner.fill_kv_cache(np.nan)
    schedule(eagle, enable_prefix_caching=False)
    with head_of(eagle, trained_head):
        outputs = [o for some in itertools.batched(chosen, 7) for o in run(eagle, list(some))]
    assert sum(eagle.scheduler.drafts.num_accepted) > 50
    assert_drafts_right(eagle, checkpoint, trained_head, outputs)


@pytest.mark.thorough
@pytest.mark.quick
def test_drafts_behind_bursts(
    eagle: LLMEngine, checkpoint: Path, random_head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries and features that bursts have left are those of the formulas, too."""
    schedule(eagle, enable_prefix_caching=False, num_scheduler_steps=8)
    before = watched(eagle).num_bursts
    for i, length in enumerate((11, 3)):
        eagle.add_request(str(i), prompt(length), params(max_tokens=50))
    with monkeypatch.context() as patch:
        patch.setattr(eagle.scheduler.drafts, "plan", lambda step: False)
        while watched(eagle).num_bursts < before + 2:
            eagle.step()
    outputs = drain(eagle)
    assert len(watched(eagle).drafted) > 20
    assert_drafts_right(eagle, checkpoint, random_head, list(outputs.values()))


@pytest.mark.quick
def test_drafts_do_not_depend_on_who_had_the_seat(eagle: LLMEngine) -> None:
    """Behind a cached prefix the feature of its last token, at position 11, is not known.

    The seat has kept features of other positions; one of position 11 would be taken for it.
    """
    text, found = prompt(13), []
    run(eagle, [Request(text, params(max_tokens=2))])
    for length in (6, 9, 30):
        run(eagle, [Request(prompt(length), params(max_tokens=8))])
        watched(eagle).drafted.clear()
        (output,) = run(eagle, [Request(text, params(max_tokens=12))])
        assert output.num_cached_tokens == 12
        found.append([d.drafts for d in watched(eagle).drafted])
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "head_config", "windows", "settings"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 6}, {}, (6, 5), {}),
        ({}, {"norm_before_residual": True}, (None, None), {}),
        ({}, {}, (None, None), {"attention_backend": "auto", "matmul_backend": "auto"}),
    ],
    ids=["windows", "residual", "native"],
)
def test_drafts_of_other_models(
    tmp_path: Path,
    config: dict[str, Any],
    head_config: dict[str, Any],
    windows: Windows,
    settings: dict[str, Any],
) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG | config))
    head = write_head(tmp_path / "head", CONFIG | head_config, random_tensors(CONFIG))
    args = args_of(tmp_path, head, num_scheduler_steps=1, **settings)
    executor = Watched(args)
    with LLMEngine(args, executor) as engine:
        executor.runner.fill_kv_cache(np.nan)
        outputs = run(engine, [Request(prompt(n), params(max_tokens=20)) for n in (1, 2, 9, 30)])
        assert_drafts_right(engine, tmp_path, head, outputs, windows)
    executor.inner.close()


def assert_drafts_right(
    engine: LLMEngine, target: Path, head: Path, outputs: list[RequestOutput], windows: Windows = (None, None)
) -> None:
    """Compares all drafts with those of the formulas, but for rows of which another token nearly leads."""
    reference, num_rows = NumpyHead(head, target, windows), 0
    texts = {tuple(o.prompt_token_ids): o.prompt_token_ids + list(o.outputs[0].token_ids) for o in outputs}
    for drafted in watched(engine).drafted:
        text = texts[tuple(drafted.prompt)][: drafted.num_tokens]
        expected, lead = reference.drafts(text, len(drafted.drafts))
        if lead > LEAD:
            num_rows += 1
            assert drafted.drafts == expected, (len(drafted.prompt), drafted.num_tokens)
    assert num_rows > 0.8 * len(watched(engine).drafted)
    assert num_rows >= 3


# Outputs.

SCHEDULERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked prompts": {"max_num_batched_tokens": 20},
    "recomputed": {"num_blocks": 60, "num_swap_blocks": 0, "preemption_mode": "recompute"},
    "swapped": {"num_blocks": 60, "preemption_mode": "swap"},
    "without prefix caching": {"enable_prefix_caching": False},
    "adaptive": {"is_adaptive": True},
    "adaptive, with bursts": {"is_adaptive": True, "num_scheduler_steps": 8},
}


def in_turns(engine: LLMEngine) -> list[RequestOutput]:
    """Runs the requests, a few at a time: while others wait, there are no drafts."""
    return [output for some in itertools.batched(REQUESTS, 10) for output in run(engine, list(some))]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_outputs_are_those_without_drafts(
    eagle: LLMEngine, trained_head: Path, expected: list[list[list[int]]], name: str, in_flight: int
) -> None:
    eagle._core.max_in_flight = in_flight
    runner, num_bursts = watched(eagle).runner, watched(eagle).num_bursts
    with head_of(eagle, trained_head):
        runner.fill_kv_cache(np.nan)
        schedule(eagle, **SCHEDULERS[name])
        outputs = in_turns(eagle)
        assert tokens_of(outputs) == expected
        drafts = eagle.scheduler.drafts
        if "adaptive" not in name:
            assert sum(drafts.num_accepted) > 0.25 * drafts.num_drafts > 50
        assert (watched(eagle).num_bursts > num_bursts) == (name == "adaptive, with bursts")
        num_preemptions = sum(o.metrics.num_preemptions for o in outputs if o.metrics)
        assert (num_preemptions > 3) == (name in ("recomputed", "swapped"))
        if name == "plain":  # again, from prefixes that are in the pool
            cold, drafts.num_drafts, drafts.num_accepted[:] = sum(drafts.num_accepted), 0, [0] * K
            again = in_turns(eagle)
            assert tokens_of(again) == expected
            assert sum(o.num_cached_tokens or 0 for o in again) > 200
            assert sum(drafts.num_accepted) > 0.7 * cold


def test_nothing_becomes_nan(eagle: LLMEngine, trained_head: Path) -> None:
    """In the pool, in what is kept by seat; whatever is drawn in place of a token is one."""
    runner = watched(eagle).runner
    with head_of(eagle, trained_head):
        for settings in SCHEDULERS.values():
            runner.fill_kv_cache(0)
            schedule(eagle, **settings)
            in_turns(eagle)
            arrays = [runner.arrays["kv_cache"][-1], *runner.arrays["draft_states"]]
            assert all(bool(jnp.isfinite(x).all()) for x in arrays)
    drafts = [token for d in watched(eagle).drafted for token in d.drafts]
    assert min(drafts) >= 0
    assert max(drafts) < VOCAB_SIZE


def test_features_are_not_taken_over_from_broken_requests(
    eagle: LLMEngine, checkpoint: Path, random_head: Path
) -> None:
    """A request that ends as its logits are NaN leaves nothing behind in its seat, nor in its blocks."""
    with nan_embedding(eagle, [3]):
        (output,) = run(eagle, [Request([1, 2, 3], params())])
        assert output.outputs[0].finish_reason == "abort"
    assert all(bool(jnp.isfinite(x).all()) for x in watched(eagle).runner.arrays["draft_states"])
    schedule(eagle)
    watched(eagle).drafted.clear()
    outputs = run(eagle, [Request(prompt(9), params(max_tokens=9))])
    assert_drafts_right(eagle, checkpoint, random_head, outputs)


# Checkpoints.


@pytest.mark.parametrize(
    ("config", "tensors", "messages"),
    [
        ({"num_hidden_layers": 2}, {}, ["`num_hidden_layers` must be 1, got 2"]),
        (
            {"draft_vocab_size": 999},
            {},
            ["`draft_vocab_size` must be at most vocab_size, which is 384, got 999"],
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
            {},
            [
                "`eagle_config.eagle_aux_hidden_state_layer_ids` must be a list of 3 layer indices, or "
                "an empty list"
            ],
        ),
        (
            {"vocab_size": 400, "target_hidden_size": 32, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
            {"d2t": None, "midlayer.hidden_norm.weight": None, "x": np.zeros(3, np.float32)},
            [
                "`vocab_size` must be 384 as in the target model, got 400",
                "`target_hidden_size` must be 64 as in the target model, got 32",
                "must be at most 2",
                "d2t is missing",
                "midlayer.hidden_norm.weight is missing",
                "x is unexpected",
                "fc.weight must have shape (64, 96) by config.json, got (64, 192)",
            ],
        ),
        ({}, {"d2t": np.zeros(300, np.float32)}, ["d2t must be I64 or I32 of shape (300,), got F32 (300,)"]),
        ({}, {"d2t": np.full(300, 100)}, ["d2t must map draft token 284 to an id in [0, 383], got 384"]),
        (
            {},
            {"d2t": np.array([1, *[0] * 299])},
            ["d2t must map each draft token to a different id, got the same id for several"],
        ),
        (
            {"hidden_size": 32, "target_hidden_size": 64, "head_dim": 16},
            random_tensors(CONFIG | {"hidden_size": 32, "target_hidden_size": 64}),
            [
                "embed_tokens.weight is missing: the embeddings of the target model can't be used because "
                "they have 64 values, and hidden_size of the head is 32"
            ],
        ),
    ],
)
def test_heads_that_do_not_fit(
    checkpoint: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], messages: list[str]
) -> None:
    every = {k: x for k, x in (random_tensors(CONFIG) | tensors).items() if x is not None}
    folder = write_head(tmp_path / "head", CONFIG | config, every)
    with pytest.raises(ValueError) as error:
        load_head(folder, load_model(checkpoint, "float32"))
    for message in messages:
        assert message in str(error.value)


def test_models_of_other_families_have_no_heads(tmp_path: Path) -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2}
    target = random_model(gpt2 | {"n_head": 4, "n_positions": 64}, "float32")
    with pytest.raises(
        ValueError, match="must be of the Llama family and generate text, got GPT2LMHeadModel"
    ):
        load_head(write_head(tmp_path / "head", CONFIG, random_tensors(CONFIG)), target)


def test_forms_of_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    """As a model of one layer; with embeddings of its own; for the whole vocabulary; in bfloat16."""
    target = load_model(checkpoint, "float32")
    tensors = random_tensors(CONFIG)
    renamed = {f"model.{k.replace('midlayer', 'layers.0')}": x for k, x in tensors.items()}
    plain = load_head(write_head(tmp_path / "plain", CONFIG, tensors), target)
    other = load_head(write_head(tmp_path / "renamed", CONFIG, renamed), target)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), _state(plain), _state(other))
    assert all(jax.tree.leaves(same))
    ids = np.arange(300) + tensors["d2t"]
    assert (np.asarray(plain.columns[...])[ids] == np.arange(300)).all()

    whole = CONFIG | {"draft_vocab_size": VOCAB_SIZE}
    tensors = random_tensors(whole) | {"embed_tokens.weight": np.zeros((VOCAB_SIZE, 64), np.float32)}
    del tensors["d2t"]
    own = load_head(write_head(tmp_path / "whole", whole, tensors), target)
    assert own.embed_tokens is not None
    context = own.context(jnp.arange(3), lambda *args, **how: jnp.zeros(()))
    assert own.logits(jnp.ones((3, 64)), context).shape == (3, VOCAB_SIZE)
    assert load_head(tmp_path / "whole", load_model(checkpoint, "bfloat16")).fc.kernel.dtype == jnp.bfloat16


@pytest.mark.quick
def test_layers_that_are_read() -> None:
    def paths(num_layers: int, **values: Any) -> tuple[str, ...]:
        config = {k: v for k, v in CONFIG.items() if k != "eagle_aux_hidden_state_layer_ids"}
        return EagleConfig.from_hf(config | values).feature_paths(num_layers)

    assert paths(32) == ("layers.1", "layers.15", "layers.28")
    assert paths(4) == ("layers.1", "layers.1", "layers.0")
    assert paths(1) == ("layers.0", "layers.0", "layers.0")
    name = "eagle_aux_hidden_state_layer_ids"
    assert paths(32, **{name: [0, 3, 32]}) == ("embed_tokens", "layers.2", "layers.31")
    assert paths(32, eagle_config={name: [0, 3, 31]}) == ("layers.0", "layers.3", "layers.31")
    assert paths(32, eagle_config={name: []}) == paths(32)


def test_outputs_are_read_behind_hooks() -> None:
    found: dict[str, Any] = {}
    hooks = recording_hooks(("a", "b"), {"a": lambda y: y + 1, "c": lambda y: y * 2}, found)
    assert [hooks[name](jnp.float32(3)) for name in "abc"] == [4, 3, 6]
    assert found == {"a": 4, "b": 3}


# A head for the built-in model.


@pytest.mark.slow
def test_a_trained_head_for_pagelet_is_right_more_often(tmp_path: Path) -> None:
    """It is trained for about a minute, and drafts the answers to other wordings of the questions."""
    folder = resolve_model_dir("pagelet")
    lines = (folder / "data" / "chat.txt").read_text().splitlines()
    asked = [line[3:].split(" | ") for line in lines if line.startswith("Q: ")]
    seen = [[{"role": "user", "content": wording}] for wordings in asked for wording in wordings[:3]]
    unseen = [[{"role": "user", "content": wordings[-1]}] for wordings in asked[:60]]
    config = CONFIG | {
        "vocab_size": 2048,
        "draft_vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 10000.0,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }

    def answered(
        name: str, tensors: dict[str, np.ndarray], chats: list[Any]
    ) -> tuple[list[RequestOutput], float]:
        """Returns the answers, and the share of drafts that was accepted."""
        head = write_head(tmp_path / name, config, tensors)
        speculative = {
            "method": "eagle3",
            "model": str(head),
            "num_speculative_tokens": 2,
            "adaptive": False,
        }
        limits = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256}
        with LLM("pagelet", dtype="float32", speculative_config=speculative, **limits) as llm:
            outputs = llm.chat(chats, params(max_tokens=60, ignore_eos=False), use_tqdm=False)
            drafts = llm.llm_engine.scheduler.drafts
            print(name, drafts.num_verified, drafts.num_drafts, drafts.num_accepted)
            return outputs, sum(drafts.num_accepted) / drafts.num_drafts

    outputs, random_share = answered("random", random_tensors(config), [*seen, *unseen])
    texts = [o.prompt_token_ids + list(o.outputs[0].token_ids) for o in outputs]
    num_prompt = [len(o.prompt_token_ids) for o in outputs]
    model, n = load_model(folder, "float32").model, len(seen)
    assert isinstance(model, LlamaForCausalLM)
    tensors = trained_tensors(
        model, config, texts[:n], num_prompt[:n], num_steps=120, batch=16, rate=3e-3, num_passes=2
    )
    again, trained_share = answered("trained", tensors, unseen)
    assert tokens_of(again) == tokens_of(outputs[n:])
    assert random_share < 0.02
    assert trained_share > 0.3
