"""A model in stages, with an engine for each, gives the tokens of the same model on one device."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.real_model import assert_no_block_lost, largest_buckets
from test_data_parallel import KINDS, facts
from test_tensor_parallel import FIXTURES, MOE, NAMES, config_of, requests

from jax_paged import LLM, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from jax_paged.engine.replicas.replicated_engine import ReplicatedEngine, serving_engine
from jax_paged.models.features.hooks import Hook
from jax_paged.models.weights import random_checkpoint
from jax_paged.outputs import RequestOutput
from jax_paged.pallas_kernels import xla
from jax_paged.structured_outputs import StructuredOutputsParams
from jax_paged.worker.compilation import plan_steps
from jax_paged.worker.features.user_functions.logits_processors import ExtraArgs, LogitsProcessor
from jax_paged.worker.sampling.sampler import SamplingBatch

pytestmark = pytest.mark.thorough

WHOLE = ("gemma4_shared", "gemma4_hub_images")  # whose layers share keys and values
STATES = ("lfm2", "qwen3_5")  # which are not divided into stages
DECODERS = [name for name in NAMES if not name.startswith(("t5", *STATES)) and name not in WHOLE]
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "xla",
    "matmul_backend": "xla",
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "swap_space": 0.01,
    "num_scheduler_steps": 1,
}


@pytest.fixture(scope="module", autouse=True)
def few_shapes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_steps, "plan_buckets", largest_buckets)
        yield


def make_checkpoint(folder: Path, name: str, num_layers: int = 4) -> Path:
    """A model of a fixture's family with so many layers, whose logits lie well apart."""
    per_layer = ("layer_types", "max_window_layers", "per_layer_config")
    config = {k: v for k, v in config_of(name).items() if k not in per_layer} | {"global_head_dim": 16}
    layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
    random_checkpoint(
        folder, config | {layers: num_layers, "initializer_range": 0.3, "init_std": 0.3}, "float32"
    )
    return folder


def vocab_size_of(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]


def arrays_of(engine: LLMEngine, name: str) -> list[jax.Array]:
    return engine.executor.runner.arrays[name]  # pyright: ignore[reportAttributeAccessIssue]


def blocks_of(name: str, num_blocks: int) -> int:
    """Blocks that hold any request: the layers of Gemma 4 are several groups, each with blocks of its own."""
    return 2 * num_blocks if name.startswith("gemma4") else num_blocks


def outputs_of(folder: Path, stages: int, size: int = 1, num_blocks: int = 28, **settings: Any) -> list[Any]:
    """Tokens and cumulative log-probability of every output; no engine's pool is large enough."""
    given = requests(vocab_size_of(folder))
    plain, beams = [r for r in given if r.beams is None], [r for r in given if r.beams]
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
    settings = LIMITS | {"preemption_mode": "swap", "skip_tokenizer_init": True} | sizes | settings
    with LLM(str(folder), num_gpu_blocks_override=stages * num_blocks, **settings) as llm:
        assert len(llm._replicas) == stages
        assert {e.config.num_blocks for e in llm._replicas} == {num_blocks}
        outputs = llm.generate([r.prompt for r in plain], [r.params for r in plain], use_tqdm=False)
        num_preempted = sum(o.metrics.num_preemptions for o in outputs if o.metrics)
        assert num_preempted or stages > 2
        params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
        assert params == beams[0].beams
        found = [
            s.tokens for s in llm.beam_search([r.prompt for r in beams], params, use_tqdm=False)[0].sequences
        ]
        for engine in llm._replicas:
            assert_no_block_lost(engine)
            assert len({d for x in arrays_of(engine, "kv_cache") for d in x.devices()}) == stages * size
    return [*([(o.token_ids, o.cumulative_logprob) for o in output.outputs] for output in outputs), found]


def check(folder: Path, sizes: list[tuple[int, int]], without: int = 1, **settings: Any) -> None:
    """Compares outputs with those of a single stage: the tokens, and log-probabilities to a sum's rounding.

    Args:
        folder: The checkpoint.
        sizes: Stages, and devices of each.
        without: Devices of the single stage.
        **settings: Of all engines.
    """
    *wanted, wanted_beams = outputs_of(folder, 1, without, **settings)
    for stages, size in sizes:
        *found, beams = outputs_of(folder, stages, size, **settings)
        assert [[x[0] for x in o] for o in found] == [[x[0] for x in o] for o in wanted], (stages, size)
        assert beams == wanted_beams
        for x, y in zip(found, wanted, strict=True):
            for (_, a), (_, b) in zip(x, y, strict=True):
                assert a == b or abs(a - b) < 1e-3


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "sizes", "mode"),
    [
        ("gqa4_llama3", [(4, 1)], "swap"),
        pytest.param("gemma2", [(2, 2)], "recompute", marks=slow),
        pytest.param("gqa2_tied", [(2, 1), (4, 1), (2, 2)], "recompute", marks=slow),
        pytest.param("gpt2_variants", [(2, 1), (4, 1), (2, 2)], "swap", marks=slow),
        pytest.param("gemma2", [(2, 1), (4, 1)], "swap", marks=slow),
        pytest.param("mixtral", [(2, 1), (4, 1), (2, 2)], "recompute", marks=slow),
        pytest.param("mistral_window", [(2, 1), (4, 1)], "swap", marks=slow),
        pytest.param("opt_post_norm_projected", [(2, 1), (3, 1)], "swap", marks=slow),
    ],
)
def test_the_tokens_of_one_device(tmp_path: Path, name: str, sizes: list[tuple[int, int]], mode: str) -> None:
    """Of every kind of sampling, with preemption, chunks of prompts, and two steps of an engine in flight."""
    check(make_checkpoint(tmp_path, name), sizes, preemption_mode=mode)


@slow
@pytest.mark.parametrize("name", DECODERS)
def test_the_tokens_of_one_device_for_every_family(name: str) -> None:
    sizes = [(2, 1), (2, 2)] if "mqa" not in name else [(2, 1)]
    check(FIXTURES / name, sizes, num_blocks=blocks_of(name, 34))


@slow
@pytest.mark.parametrize("name", MOE)
def test_experts_whole_on_a_device(tmp_path: Path, name: str) -> None:
    # Experts on two devices add up in another order, which moves a draw of one of these models.
    settings = {"num_blocks": blocks_of(name, 28), "enable_expert_parallel": True}
    check(make_checkpoint(tmp_path, name), [(2, 2)], without=2, **settings)


@slow
@pytest.mark.parametrize(
    "settings",
    [
        {"attention_backend": "native", "matmul_backend": "auto"},
        {"kv_cache_dtype": "int8"},
        {"async_scheduling": False},
        {"batch_invariant": True},
        {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 96},
        {"scheduling_policy": "priority"},
        {"disable_cascade_attn": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_settings(tmp_path: Path, settings: dict[str, Any]) -> None:
    check(make_checkpoint(tmp_path, "gqa2_tied"), [(2, 1)], **settings)


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **LIMITS, num_gpu_blocks_override=200, seed=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[LLM]:
    sizes = {"pipeline_parallel_size": 2, "num_gpu_blocks_override": 400}
    with LLM(str(checkpoint), **LIMITS, **sizes, seed=3) as llm:
        yield llm
        for engine in llm._replicas:
            assert_no_block_lost(engine)


@pytest.mark.thorough
@pytest.mark.quick
def test_seeds_and_every_kind_of_request(one: LLM, two: LLM) -> None:
    prompts = [[i + j for j in range(5 + i % 17)] for i in range(2 * len(KINDS))]
    params = [KINDS[i % len(KINDS)] for i in range(len(prompts))]
    for _ in range(2):  # the second time, from the prefix cache, and seeds go on where they were
        expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (one, two))
        assert facts(found) == facts(expected)
        for x, y in zip(found, expected, strict=True):
            assert x.outputs[0].cumulative_logprob == pytest.approx(y.outputs[0].cumulative_logprob, abs=1e-3)
            for a, b in zip(x.prompt_logprobs or [], y.prompt_logprobs or [], strict=True):
                assert (a is None) == (b is None)
                assert list(a or {}) == list(b or {})
    assert any(o.num_cached_tokens for o in found)


@slow
def test_pipelines_side_by_side(one: LLM, checkpoint: Path) -> None:
    sizes = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "num_gpu_blocks_override": 400}
    prompts, params = [[i, i + 1, 3 * i, 7] for i in range(12)], [KINDS[0], KINDS[2]] * 6
    with LLM(str(checkpoint), **LIMITS, **sizes) as llm:
        devices = [{d for x in arrays_of(e, "kv_cache") for d in x.devices()} for e in llm._replicas]
        found = llm.generate(prompts, params, use_tqdm=False)
    first, second = set(jax.devices()[:2]), set(jax.devices()[2:])
    assert devices == [first, first, second, second]
    expected = one.generate(prompts, params, use_tqdm=False)
    assert [x.outputs[0].token_ids for x in found] == [x.outputs[0].token_ids for x in expected]


def test_forms_and_functions_that_change_logits(one: LLM, two: LLM) -> None:
    form = StructuredOutputsParams(regex="(ab|cd)+e")

    def doubled(output: list[int], logits: np.ndarray) -> np.ndarray:
        return logits * (1 + len(output) % 2)

    params = [SamplingParams(temperature=1, max_tokens=12, structured_outputs=form)]
    params.append(SamplingParams(temperature=1, max_tokens=9, logits_processors=[doubled]))
    prompts = ["one", "two", "three", "four"]
    with pytest.warns(UserWarning, match="logits_processors run on the host"):
        expected = one.generate(prompts, 2 * params, use_tqdm=False)
    with pytest.warns(UserWarning, match="logits_processors run on the host"):
        found = two.generate(prompts, 2 * params, use_tqdm=False)
    assert facts(found) == facts(expected)


def test_pooling(checkpoint: Path) -> None:
    found = []
    for stages in (1, 2):
        sizes = {"pipeline_parallel_size": stages, "num_gpu_blocks_override": 200 * stages}
        with LLM(str(checkpoint), runner="pooling", **LIMITS, **sizes) as llm:
            outputs = llm.embed(["a text", "another one", "and a third"], use_tqdm=False)
            found.append(np.array([output.outputs.embedding for output in outputs]))
    np.testing.assert_allclose(*found, atol=1e-5)


def test_who_asks_a_server_is_answered_by_all_engines_together(one: LLM, checkpoint: Path) -> None:
    args = EngineArgs(str(checkpoint), **LIMITS, pipeline_parallel_size=2, num_gpu_blocks_override=400)
    params = SamplingParams(temperature=1, max_tokens=20, seed=5)
    prompts: list[Any] = [[7 * i + j for j in range(9)] for i in range(12)]

    async def run(engine: Any) -> list[RequestOutput]:
        async def ask(i: int) -> RequestOutput:
            stream = await engine.submit({"prompt_token_ids": prompts[i]}, params, f"r{i}", final_only=True)
            outputs = [output async for output in stream]
            return outputs[-1]

        return await asyncio.gather(*map(ask, range(len(prompts))))

    engine = serving_engine(args)
    assert isinstance(engine, ReplicatedEngine)
    try:
        outputs = asyncio.run(run(engine))
        counts = [replica.statistics.num_steps for replica in engine.replicas]
        with pytest.raises(ValueError, match=r"`pipeline_parallel_size` must be 1 to sleep.*got 2"):
            asyncio.run(engine.sleep())
    finally:
        engine.close()
    expected = one.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert len(counts) == 2
    assert min(counts) > 0


@pytest.mark.quick
def test_every_stage_has_its_part_alone(two: LLM) -> None:
    first, second = two._replicas
    devices = jax.devices()[:2]
    weights = arrays_of(first, "weights")
    assert [x is y for x, y in zip(weights, arrays_of(second, "weights"), strict=True)] == [True] * len(
        weights
    )
    sizes = [sum(x.nbytes for x in weights if x.devices() == {device}) for device in devices]
    assert sum(sizes) == first.config.weight_bytes
    assert max(sizes) < 0.55 * sum(sizes)
    for engine in two._replicas:
        pool = arrays_of(engine, "kv_cache")
        assert [x.devices() for x in pool] == [{device} for device in devices]
        assert {x.shape[0] for x in pool} == {200}
        tables = arrays_of(engine, "block_tables")
        assert [x.devices() for x in tables] == [{device} for device in devices]
    assert first.executor.runner.compiled is second.executor.runner.compiled  # pyright: ignore


def test_block_tables_are_the_same_on_all_stages(two: LLM) -> None:
    two.generate([[i] * 30 for i in range(4)], KINDS[0], use_tqdm=False)
    for engine in two._replicas:
        tables = [np.asarray(x) for x in arrays_of(engine, "block_tables")]
        assert np.array_equal(*tables)
        assert tables[0].any()


def test_engines_end_one_by_one(checkpoint: Path) -> None:
    settings = LIMITS | {"pipeline_parallel_size": 2, "num_gpu_blocks_override": 400}
    llm = LLM(str(checkpoint), **settings)
    first, second = llm._replicas
    weights = arrays_of(first, "weights")
    first.close()
    second.add_request("a", [1, 2, 3], KINDS[0])
    while second.has_unfinished_requests():
        second.step()
    assert not any(x.is_deleted() for x in weights)
    llm.close()
    assert all(x.is_deleted() for x in weights)


@slow
def test_attention_sampler_and_processors_of_ones_own(checkpoint: Path) -> None:
    """Attention in all stages, the others in the last; a processor's states survive the loss of a seat."""
    num_calls = [0]

    def attend(*args: Any, **options: Any) -> jax.Array:
        num_calls[0] += 1
        return xla.ragged_attention(*args, **options)

    def halved(logits: jax.Array, state: jax.Array, args: ExtraArgs) -> tuple[jax.Array, jax.Array]:
        return logits / (1 + state % 3), state + 1

    def second(logits: jax.Array, batch: SamplingBatch) -> jax.Array:
        return jax.lax.top_k(logits + batch.position[:, None] % 2 * logits[:, ::-1], 2)[1][:, 1]

    parts: dict[str, Any] = {
        "attend": attend,
        "sampler": second,
        "logits_processors": [LogitsProcessor("halved", halved, state=jnp.zeros(()))],
    }
    params = SamplingParams(temperature=1, max_tokens=20, ignore_eos=True, extra_args={"halved": 1.0})
    found = []
    for stages in (1, 2):
        settings = LIMITS | {"pipeline_parallel_size": stages, "num_gpu_blocks_override": 26 * stages}
        with LLM(str(checkpoint), **parts, **settings) as llm:
            outputs = llm.generate([[i, 2 + i, 3] * 8 for i in range(8)], params, use_tqdm=False)
            assert any(o.metrics.num_preemptions for o in outputs if o.metrics)
            found.append(facts(outputs))
    assert found[0] == found[1]
    assert num_calls[0] > 0


def test_hooks_are_refused(checkpoint: Path) -> None:
    settings = LIMITS | {"pipeline_parallel_size": 2}
    with pytest.raises(ValueError, match=r"`hooks` must be empty with pipeline_parallel_size above 1"):
        LLM(str(checkpoint), hooks=[Hook("a", "layers.0", lambda x, *_: x)], **settings)


def test_what_concerns_one_engine_is_refused(two: LLM, tmp_path: Path, one: LLM) -> None:
    engine = two.llm_engine
    state = one.llm_engine.state()
    calls: list[Callable[[], Any]] = [
        two.sleep,
        two.wake_up,
        lambda: two.update_weights(tmp_path),
        lambda: two.pin_prefix([1] * 32),
        two.pool_map,
        lambda: LLM.restore(state, pipeline_parallel_size=2),
        lambda: LLM("scripted", executor=one.llm_engine.executor, pipeline_parallel_size=2),
        lambda: LLM.from_module(object(), pipeline_parallel_size=2),  # pyright: ignore[reportArgumentType]
        engine.sleep,
        engine.state,
        lambda: engine.update_weights({}),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"`pipeline_parallel_size` must be 1 .*got 2"):
            call()
    assert not engine.is_sleeping()


def test_running_requests_are_not_looked_into(two: LLM) -> None:
    engine = two.llm_engine
    engine.add_request("a", [1, 2, 3, 4], KINDS[0])
    engine.step()
    for call in (lambda: engine.kv("a", 0), lambda: engine.inspect("a")):
        with pytest.raises(ValueError, match=r"`pipeline_parallel_size` must be 1 to .*got 2"):
            call()
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 0}, "`pipeline_parallel_size` must be an integer of at least 1, got 0"),
        (
            {"pipeline_parallel_size": True},
            "`pipeline_parallel_size` must be an integer of at least 1, got True",
        ),
        (
            {"pipeline_parallel_size": 3},
            "`pipeline_parallel_size` must be at most 2, the number of layers of the model, got 3",
        ),
        (
            {"pipeline_parallel_size": 5},
            "`pipeline_parallel_size` must be at most 4 because .* each stage takes 1, got 5",
        ),
        (
            {"pipeline_parallel_size": 4, "tensor_parallel_size": 2},
            "`pipeline_parallel_size` must be at most 2 because .* each stage takes 2, got 4",
        ),
        (
            {"pipeline_parallel_size": 2, "data_parallel_size": 3},
            "`data_parallel_size` must be at most 2 because .* each engine takes 2, got 3",
        ),
        (
            {"pipeline_parallel_size": 2, "num_scheduler_steps": 4},
            "`num_scheduler_steps` must be 1 with pipeline_parallel_size above 1, .*got 4",
        ),
        (
            {"pipeline_parallel_size": 2, "speculative_config": {"method": "ngram"}},
            "`speculative_config` must be None with pipeline_parallel_size above 1, .*",
        ),
        (
            {"pipeline_parallel_size": 2, "enable_lora": True},
            "`enable_lora` must be False with pipeline_parallel_size above 1, .*got True",
        ),
        (
            {"pipeline_parallel_size": 2, "enable_prompt_embeds": True},
            "`enable_prompt_embeds` must be False with pipeline_parallel_size above 1, .*got True",
        ),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
            "`distributed_executor_backend` must be 'uni', 'mp' or 'external_launcher' with .*got 'ray'",
        ),
        (
            {"pipeline_parallel_size": 2, "num_gpu_blocks_override": 3},
            r"`num_gpu_blocks_override` must be an integer in \[4, .*got 3",
        ),
    ],
)
def test_what_can_t_be(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    """It is named before a weight is read."""
    if "num_gpu_blocks_override" not in settings:
        monkeypatch.setattr("jax_paged.models.weights.read_weights", None)
    with pytest.raises(ValueError, match=message):
        LLM(str(checkpoint), **(LIMITS | settings))


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_share_keys_and_values_are_not_parted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax_paged.models.weights.read_weights", None)
    message = (
        "`pipeline_parallel_size` must be 1 because Gemma4For.* can't be split into stages: its last "
        "layers share"
    )
    with pytest.raises(ValueError, match=message):
        LLM(str(FIXTURES / name), skip_tokenizer_init=True, pipeline_parallel_size=2, max_model_len=64)


def test_an_encoder_decoder_model_has_no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax_paged.models.weights.read_weights", None)
    with pytest.raises(
        ValueError, match=r"`pipeline_parallel_size` must be 1 because T5.* is not a decoder-only model"
    ):
        LLM(str(FIXTURES / "t5_tied"), skip_tokenizer_init=True, pipeline_parallel_size=2, max_model_len=64)


def test_an_engine_alone_has_no_stages(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"`pipeline_parallel_size` must be 1 for LLMEngine .LLM .*got 2"):
        LLMEngine(EngineArgs(str(checkpoint), pipeline_parallel_size=2))


def test_llm_has_no_bursts_then(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    settings = {k: v for k, v in LIMITS.items() if k != "num_scheduler_steps"}
    with LLM(str(folder), **settings, pipeline_parallel_size=2, num_gpu_blocks_override=400) as llm:
        assert llm.llm_engine.config.num_scheduler_steps == 1
