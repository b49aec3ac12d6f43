"""An engine whose layers cache latents: what they take, what they hold, and who may read them how."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import relative_error
from helpers.real_model import (
    TOLERANCE,
    DenseModel,
    Request,
    finished_outputs,
    log_softmax,
    make_engine,
    run,
    tokens_of,
)

from jax_paged import LLMEngine, SamplingParams
from jax_paged.config.engine_args import EngineArgs
from jax_paged.models.attention import FullAttentionSpec, KVCacheSpec, LatentAttentionSpec
from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.weights import load_model
from jax_paged.pallas_kernels import native
from jax_paged.worker.features import cascade
from jax_paged.worker.kv_cache import plan_layout
from jax_paged.worker.loading import kernel_check

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
LITE, YARN = FIXTURES / "deepseek_v2_lite", FIXTURES / "deepseek_v2_yarn_groups"
RANK, ROTATED = 24, 8
PROMPT = np.random.default_rng(0).integers(0, 256, 45).tolist()
IF_BUILT = pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
NATIVE = pytest.param("native", marks=IF_BUILT)
BACKENDS = [
    pytest.param((YARN, "native"), marks=IF_BUILT),
    pytest.param((LITE, "native"), marks=[IF_BUILT, pytest.mark.slow]),
]
SIZES: dict[str, Any] = {
    "few_buckets": True,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}


def engine_of(folder: Path, **settings: Any) -> LLMEngine:
    return make_engine(folder, **(SIZES | settings))


@pytest.mark.parametrize(("kind", "numbers"), [("bfloat16", 576 * 2), ("float32", 576 * 4), ("int8", 577)])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_memory_per_token_is_a_latent_per_layer(kind: str, numbers: int, num_devices: int) -> None:
    """DeepSeek-V2-Lite: 27 layers of 512 + 64 numbers, whole on every device; heads would take 5120."""
    specs = [LatentAttentionSpec(576, value_dim=512)] * 27
    layout = plan_layout(list(specs), jnp.dtype(kind), num_devices)
    assert layout.block_bytes(16) == 16 * 27 * numbers
    assert layout.pool_shape(10, 16)[:4] == (10, 1, num_devices, 16)


@pytest.fixture(scope="module", params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    """In a pool that is too small for all requests, so that some are preempted, and in chunks."""
    folder, backend = request.param
    limits = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 24, "preemption_mode": "swap"}
    with engine_of(folder, attention_backend=backend, swap_space=0.01, **limits) as engine:
        yield engine


def test_an_engine_holds_a_latent_per_token_and_layer(engine: LLMEngine) -> None:
    arrays = engine.executor.runner.arrays["kv_cache"]  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(x.nbytes for x in arrays) == 20 * 16 * 2 * (RANK + ROTATED) * 4 == engine.config.kv_cache_bytes


def test_equals_transformers(engine: LLMEngine) -> None:
    """Log-probabilities too; test_against_transformers.py does it with the backend "xla"."""
    cases = json.loads((Path(engine.config.model_name) / "reference.json").read_text())["cases"]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    outputs = run(engine, [Request(case["prompt_token_ids"], params) for case in cases])
    assert tokens_of(outputs) == [case["token_ids"] for case in cases]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, case in zip(outputs, cases, strict=True):
        found = [next(iter(entry.values())).logprob for entry in output.outputs[0].logprobs or []]
        np.testing.assert_allclose(found, case["logprobs"], atol=TOLERANCE)


@pytest.mark.slow
def test_what_is_held_is_what_a_dense_pass_attends_to(engine: LLMEngine) -> None:
    """And the attention that is shown is the softmax of its queries."""
    engine.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for _ in range(6):
        engine.step()
    held, shown = [engine.kv("a", layer) for layer in range(2)], engine.inspect("a", [0, 1])
    tokens = [*PROMPT, *finished_outputs(engine)["a"].outputs[0].token_ids][: len(shown.positions)]
    model, seen = load_model(Path(engine.config.model_name), "float32").model, []
    assert isinstance(model, CausalLM)
    context = model.dense_context(jnp.asarray(tokens)[None])

    def attend(layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append((np.asarray(q[0]), np.asarray(k[0]), options["scale"]))
        return context.attend(layer, q, k, v, **options)

    model.hidden(jnp.asarray(tokens)[None], dataclasses.replace(context, attend=attend))
    for layer, (q, k, scale) in enumerate(seen):
        keys, values = held[layer]
        assert keys.shape == (len(tokens) - 1, 1, RANK + ROTATED)
        assert relative_error(keys, k[:-1].astype(np.float64)) < 1e-5
        np.testing.assert_array_equal(values, keys[:, :, :RANK])
        scores = np.einsum("hd,nd->hn", q[-1], k[:, 0]) * scale
        np.testing.assert_allclose(shown.attention[layer][:, 0], np.exp(log_softmax(scores)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
def test_quantised_latents(kind: str) -> None:
    """A row of 24 normed and 8 rotated numbers has one scale: the change is that of a quantised cache."""
    texts = [np.random.default_rng(i).integers(0, 256, 60).tolist() for i in range(4)]
    with engine_of(LITE, kv_cache_dtype=kind) as engine:
        found = np.array(engine.score(texts, 1))
    dense = DenseModel(LITE, 64).logits(texts)
    want = [log_softmax(x)[range(59), t[1:]] for x, t in zip(dense, texts, strict=True)]
    change = np.abs(found - want)
    assert 0 < np.median(change) < {"int8": 0.05, "fp8_e4m3": 0.2}[kind]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", NATIVE])
def test_shared_prefixes_are_attended_to_together(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MIN_ROWS": 2, "MIN_TOKENS": 1, "MIN_SAVED_TOKENS": 1}.items():
        monkeypatch.setattr(cascade, name, value)
    rng, params = np.random.default_rng(1), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [Request([*PROMPT, *rng.integers(0, 256, i + 1).tolist()], params) for i in range(6)]
    found = []
    for settings in ({}, {"disable_cascade_attn": True}):
        with engine_of(YARN, attention_backend=backend, block_size=4, **settings) as engine:
            run(engine, requests[:1])  # its prefix is cached then
            found.append(tokens_of(run(engine, requests)))
            assert (engine.num_saved_reads > 0) == (not settings)
    assert found[0] == found[1]


def test_the_pallas_kernels_refuse_it() -> None:
    with pytest.raises(
        ValueError,
        match=r"with backend 'pallas_interpret', got .* of a pool of latents; backends 'xla' and 'native'",
    ):
        engine_of(LITE, attention_backend="pallas_interpret").close()
    (suite,) = kernel_check.suites_of(EngineArgs(model=str(LITE)))
    assert (suite.kv_heads, suite.head_dim, suite.value_dim) == (1, RANK + ROTATED, RANK)
    verdict = kernel_check.check(suite)
    assert (verdict.outcome, verdict.reason) == (
        "unsupported",
        "the kernels do not support a cache of latents",
    )


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        (LatentAttentionSpec(32, value_dim=16), r"\(1, 32, 16\), \(1, 32, 24\)"),
        (LatentAttentionSpec(16, value_dim=16), r"\(1, 16, 16\), \(1, 32, 24\)"),
        (FullAttentionSpec(1, 32), r"\(1, 32, 24\), \(1, 32, None\)"),
        (FullAttentionSpec(2, 32), r"\(1, 32, 24\), \(2, 32, None\)"),
    ],
    ids=str,
)
def test_layers_that_cache_other_things_share_no_pool(other: KVCacheSpec, shown: str) -> None:
    latents = LatentAttentionSpec(32, value_dim=24)
    for specs in ([latents, other], [other, latents]):
        with pytest.raises(
            ValueError, match=rf"all layers must have the same .*value_dim\) .*latents, got \[{shown}\]"
        ):
            plan_layout(specs, jnp.dtype("float32"))
