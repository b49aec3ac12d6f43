"""Engines whose kernels oneDNN has packed: outputs, the exchange of weights, and training beside them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.real_model import largest_buckets

from jax_paged import LLM, EngineArgs, SamplingParams
from jax_paged.models.layers import Embedding, Linear, PackedKernel
from jax_paged.models.weights import LoadedModel, load_model
from jax_paged.pallas_kernels.native import products
from jax_paged.worker.compilation import plan_steps
from jax_paged.worker.executor import LocalExecutor
from jax_paged.worker.loading.weights import flatten, packed

pytestmark = pytest.mark.thorough

PROBLEM = products.problem(jnp.dtype("float32"))
needs_onednn = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "models" / "fixtures"
# Built in, its embeddings tied; experts; biases and fused projections; an encoder.
FOLDERS = [
    ROOT / "models" / "pagelet",
    FIXTURES / "mixtral",
    pytest.param(FIXTURES / "gpt2_variants", marks=pytest.mark.slow),
    pytest.param(FIXTURES / "t5_gated_untied", marks=pytest.mark.slow),
]
PROMPTS = [np.random.default_rng(n).integers(8, 250, n).tolist() for n in (1, 5, 17, 30)]
load = functools.cache(functools.partial(load_model, dtype="float32"))


def make_llm(model: Path | LoadedModel, matmul_backend: Any) -> LLM:
    """Returns an engine of two buckets."""
    is_loaded = isinstance(model, LoadedModel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_steps, "plan_buckets", largest_buckets)
        return LLM(
            model="loaded" if is_loaded else str(model),
            loaded=model if is_loaded else None,
            dtype="float32",
            attention_backend="xla",
            matmul_backend=matmul_backend,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            num_gpu_blocks_override=64,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )


def generate(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Returns the greedy tokens of some texts, and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    texts = []
    for output in outputs:
        (text,) = output.outputs
        tokens = list(text.token_ids)
        texts.append((tokens, [at[t].logprob for at, t in zip(text.logprobs, tokens, strict=True)]))
    return texts


def runner_of(llm: LLM) -> Any:
    executor = llm.llm_engine.executor
    assert isinstance(executor, LocalExecutor)
    return executor.runner


def kernels(model: Any) -> list[Any]:
    return [m.kernel for _, m in nnx.iter_modules(model) if isinstance(m, Linear)]


@needs_onednn
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_outputs_are_those_of_xla(folder: Path) -> None:
    results = []
    for backend in ("xla", "auto"):
        with make_llm(folder, backend) as llm:
            assert llm.llm_engine.executor.config.matmul_backend == {"auto": "onednn"}.get(backend, backend)
            results.append(generate(llm))
    for (tokens, logprobs), (packed_tokens, packed_logprobs) in zip(*results, strict=True):
        assert packed_tokens == tokens
        # Float32 sums in another order move the log-probabilities of these models by up to 2e-5.
        np.testing.assert_allclose(packed_logprobs, logprobs, atol=1e-4)


@pytest.mark.quick
@needs_onednn
def test_maps_of_the_same_rows_are_one_product() -> None:
    """In a layer: queries, keys and values; their output; gate and up; and down. Then the head."""
    model = packed(load(FIXTURES / "gqa4_llama3").model, in_place=False)
    graph, state = nnx.split(model)
    step = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    program = step.lower(state, jnp.zeros((1, 3), jnp.int32)).compile().as_text()
    assert program.count('custom_call_target="jax_paged_multiply_packed"') == 3 * len(model.layers) + 1
    assert program.count('custom_call_target="jax_paged_multiply_gated"') == len(model.layers)


@needs_onednn
def test_weights_are_exchanged() -> None:
    """While an engine runs: another model's weights, packed as its own are."""
    loaded = load(FIXTURES / "gqa4_llama3")
    other = load_model(FIXTURES / "gqa4_llama3", "float32").model
    for layer in other.layers:
        layer.mlp.down_proj.kernel[...] = -layer.mlp.down_proj.kernel[...]
    with make_llm(loaded, "onednn") as llm:
        before, weights = generate(llm), runner_of(llm).arrays["weights"]
        kept = list(weights)
        _, leaves, _ = flatten(packed(other, in_place=False))
        weights[:] = jax.device_put(leaves, [x.sharding for x in kept])
        after = generate(llm)
        weights[:] = kept
        assert generate(llm) == before
    with make_llm(dataclasses.replace(loaded, model=other), "xla") as llm:
        assert [tokens for tokens, _ in generate(llm)] == [tokens for tokens, _ in after]
    assert after != before


@needs_onednn
def test_a_model_in_training_stays_as_it_is() -> None:
    """An engine that is given a model packs a copy; the model can be trained, and an engine's copy not."""
    loaded = load(FIXTURES / "gqa2_tied")
    tokens = jnp.asarray([PROMPTS[-1]])

    def loss(model: Any) -> jax.Array:
        return -jax.nn.log_softmax(model(tokens))[..., 0].mean()

    with make_llm(loaded, "onednn") as llm:
        generate(llm)
        assert not any(isinstance(k, PackedKernel) for k in kernels(loaded.model))
        value, gradient = nnx.jit(nnx.value_and_grad(loss))(loaded.model)
    assert np.isfinite(value)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient))
    served = packed(loaded.model, in_place=False)
    np.testing.assert_allclose(nnx.jit(loss)(served), value, rtol=1e-5)


@needs_onednn
def test_packed_weights_replace_the_others() -> None:
    """No kernel is kept twice, but for the table of token embeddings that is the head too."""
    for name, is_tied in (("gqa2_tied", True), ("gqa4_llama3", False)):
        model = load_model(FIXTURES / name, "float32").model
        plain = [kernel[...] for kernel in kernels(model)]
        copied = packed(model, in_place=False)
        assert all(kernel[...] is array for kernel, array in zip(kernels(model), plain, strict=True))
        assert packed(model, in_place=True) is model
        for served in (copied, model):
            assert all(isinstance(kernel, PackedKernel) for kernel in kernels(served))
            assert isinstance(served.head, Embedding) is is_tied
            assert (served.embed_tokens.packed_head is not None) is is_tied
        leaves = jax.tree.leaves(nnx.state(model))
        assert not any(leaf is kernel for leaf in leaves for kernel in plain)


def test_without_onednn_the_engine_serves_by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "problem", lambda dtype: "it is not installed")
    folder = FIXTURES / "gqa2_tied"
    with make_llm(folder, "auto") as llm:
        assert llm.llm_engine.executor.config.matmul_backend == "xla"
        assert not any(w.dtype == np.uint8 for w in runner_of(llm).arrays["weights"])
        assert all(len(tokens) == 20 for tokens, _ in generate(llm))
    with pytest.raises(
        ValueError,
        match=r"`matmul_backend` must be 'auto' or 'xla' because oneDNN can't be used \(it is not instal",
    ):
        make_llm(folder, "onednn")
    with pytest.raises(ValueError, match=r"`matmul_backend` must be .*got 'mkl'"):
        EngineArgs(matmul_backend="mkl")  # pyright: ignore[reportArgumentType]
