"""An engine whose pool holds int8 or fp8_e4m3: what it computes, how much fits, and what it refuses.

That its bits are the same in any batch, from the cache and after preemptions is in test_batch_invariance.py.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import quantized
from helpers.real_model import DenseModel, Request, log_softmax, make_engine, reset, run, tokens_of

from jax_paged import LLM, EngineArgs, SamplingParams
from jax_paged.config.engine_config import EngineConfig
from jax_paged.models import causal_lm
from jax_paged.pallas_kernels.quantization import DTYPES, dequantize, quantize, rows_of

pytestmark = pytest.mark.thorough

KINDS = sorted(DTYPES)
ONE_QUICK = ["int8", pytest.param("fp8_e4m3", marks=pytest.mark.slow)]
FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "few_buckets": True}


def prompt(seed: int, length: int, vocab_size: int = 384) -> list[int]:
    return np.random.default_rng(seed).integers(8, vocab_size, length).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_a_dense_call_with_rounded_keys_and_values(
    kind: str, checkpoint: Path, dense: DenseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [prompt(i, 120) for i in range(8)]
    with make_engine(checkpoint, kv_cache_dtype=kind, **SIZES) as engine:
        found = np.array(engine.score(texts, 1))
    exact, plain = DenseModel(checkpoint, 120), causal_lm.dense_attention

    def attend(q, k, v, **options):
        k, v = (dequantize(quantize(x, DTYPES[kind]), x.dtype) for x in (k, v))
        return plain(q, k, v, **options)

    def scores(model):
        return np.array(
            [log_softmax(x)[range(119), t[1:]] for x, t in zip(model.logits(texts), texts, strict=True)]
        )

    of_floats = scores(DenseModel(checkpoint, 120))
    monkeypatch.setattr(causal_lm, "dense_attention", attend)
    error, change = np.abs(found - scores(exact)), np.abs(found - of_floats)
    # A sum in another order may take a number to the other side of a rounding step, here and there.
    assert np.median(error) < 1e-5
    assert np.median(error) < np.median(change) / 100
    assert error.max() < change.max() < {"int8": 0.5, "fp8_e4m3": 2}[kind]


@pytest.mark.thorough
@pytest.mark.quick
@pytest.mark.parametrize("kind", ONE_QUICK)
def test_kv_is_what_the_numbers_were_rounded_to(kind: str, checkpoint: Path) -> None:
    """The keys and values of the first layer depend on no cache, so an engine of floats has them too."""
    held = {}
    for name in ("auto", kind):
        with make_engine(checkpoint, kv_cache_dtype=name, **SIZES) as engine:
            engine.add_request("a", prompt(0, 50), SamplingParams(temperature=0, max_tokens=60))
            for _ in range(10):
                engine.step()
            held[name] = engine.kv("a", 0)
            rows = engine.inspect("a", [0, 1]).attention
            assert all(np.allclose(row.sum(-1), 1, atol=1e-5) for row in rows.values())
    for floats, numbers in zip(held["auto"], held[kind], strict=True):
        assert numbers.dtype == np.float32
        want = quantized(floats[:50], kind)[1]
        np.testing.assert_array_equal(numbers[:50], want)


@pytest.mark.parametrize("kind", ONE_QUICK)
def test_a_state_goes_on_elsewhere(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    request = Request(prompt(1, 70), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    settings = {"kv_cache_dtype": kind, "num_gpu_blocks_override": 40, **SIZES}
    with make_engine(checkpoint, **settings) as engine:
        (expected,) = tokens_of(run(engine, [request]))
        engine.add_request("a", request.prompt, request.params)
        for _ in range(12):
            engine.step()
        state = engine.state()
        state.save(tmp_path / "state")
        engine.abort_request("a")
    with make_engine(checkpoint, **settings) as engine:
        engine.load_state(tmp_path / "state")
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    assert list(outputs[-1].outputs[0].token_ids) == expected
    with (
        make_engine(checkpoint, num_gpu_blocks_override=40, **SIZES) as engine,
        pytest.raises(
            ValueError,
            match=rf"kv_cache_dtype in `state` must be 'auto' as in this engine, got '{kind}'",
        ),
    ):
        engine.load_state(state)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if quick == kind else pytest.mark.slow)
        for family, quick in (("mistral_window", "int8"), ("gemma2", None), ("t5_tied", "fp8_e4m3"))
        for kind in KINDS
    ],
)
def test_windows_and_encoders(family: str, kind: str) -> None:
    scores = {}
    for name in ("auto", kind):
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "skip_tokenizer_init": True}
        with LLM(str(FIXTURES / family), dtype="float32", kv_cache_dtype=name, **limits) as llm:
            vocab_size = llm.llm_engine.config.vocab_size
            prompts = [{"prompt_token_ids": prompt(i, n, vocab_size)} for i, n in enumerate((5, 20, 33))]
            params = SamplingParams(
                temperature=0, max_tokens=1, logprobs=20, ignore_eos=True, detokenize=False
            )
            outputs = llm.generate(prompts, params, use_tqdm=False)
            scores[name] = [o.outputs[0].logprobs[0] for o in outputs]
    for floats, numbers in zip(scores["auto"], scores[kind], strict=True):
        both = sorted(floats.keys() & numbers.keys())
        change = [abs(floats[t].logprob - numbers[t].logprob) for t in both]
        assert len(both) >= 15
        assert 0 < max(change) < {"int8": 0.1, "fp8_e4m3": 0.5}[kind]


def config_of(**settings) -> EngineConfig:
    with LLM("pagelet", max_num_seqs=2, max_num_batched_tokens=16, max_compile_s=0, **settings) as llm:
        pool = llm.llm_engine.executor.runner.arrays["kv_cache"]
        assert sum(x.nbytes for x in pool) == llm.llm_engine.config.kv_cache_bytes
        assert ("in int8" in repr(llm.llm_engine)) == (settings.get("kv_cache_dtype") == "int8")
        return llm.llm_engine.config


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_twice_the_blocks_fit(kind: str) -> None:
    """A row of 64 numbers takes 65 bytes, and 128 in bfloat16; host memory for swaps holds more, too."""
    size = {"kv_cache_memory_bytes": 2**22, "swap_space": 2**-9, "max_model_len": 2048}
    floats, bytes_ = config_of(**size), config_of(kv_cache_dtype=kind, **size)
    block_bytes = 4 * 2 * 2 * 16 * 65  # layers, keys and values, heads, tokens, row
    assert (floats.num_blocks, bytes_.num_blocks) == (128, 2**22 // block_bytes) == (128, 252)
    assert (floats.num_swap_blocks, bytes_.num_swap_blocks) == (64, 126)


@pytest.mark.quick
def test_what_is_not_supported_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"`kv_cache_dtype` must be one of 'auto', 'fp8_e4m3', 'int8'.*got 'fp8'"
    ):
        EngineArgs(kv_cache_dtype="fp8")


def test_unwritten_rows_may_be_anything(checkpoint: Path) -> None:
    request = Request(prompt(2, 37), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for kind in KINDS:
        with make_engine(checkpoint, kv_cache_dtype=kind, num_gpu_blocks_override=30, **SIZES) as engine:
            expected = tokens_of(run(engine, [request]))
            engine.executor.runner.fill_kv_cache(jnp.nan)
            first = engine.executor.runner.arrays["kv_cache"][0]
            assert np.isnan(np.asarray(dequantize(rows_of(first), jnp.dtype("float32")))).all()
            assert tokens_of(run(reset(engine), [request])) == expected
