"""batch_invariant: the same bits alone, in any batch and chunks, preempted, swapped and from the cache."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.real_model import VOCAB_SIZE, write_checkpoint

from jax_paged import LLM, RequestOutput, SamplingParams
from jax_paged.pallas_kernels import native
from jax_paged.pallas_kernels.native import products
from jax_paged.worker.compilation import plan_steps
from jax_paged.worker.compilation.buckets import Bucket

pytestmark = pytest.mark.thorough

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
LIMITS: dict[str, Any] = {
    "batch_invariant": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "block_size": 4,
    "num_gpu_blocks_override": 400,
    "skip_tokenizer_init": True,
}
Bits = list[tuple[list[int], list[float]]]


def prompts(vocab_size: int) -> list[dict[str, Any]]:
    """One to 70 tokens: some shorter than a block, some longer than a step; the last two share a prefix."""
    rng = np.random.default_rng(4)
    lengths = (1, 3, 17, 47, 48, 49, 70, 25, 66)
    texts = [rng.integers(3, vocab_size, n).tolist() for n in lengths]
    return [{"prompt_token_ids": text} for text in [*texts, texts[-1][:50] + texts[0] * 9]]


def params(**kwargs: Any) -> SamplingParams:
    settings = {"temperature": 0.9, "seed": 11, "max_tokens": 20, "logprobs": 0, "ignore_eos": True}
    return SamplingParams(detokenize=False, **(settings | kwargs))


def bits(outputs: list[RequestOutput]) -> Bits:
    completions = [completion for output in outputs for completion in output.outputs]
    assert all(c.logprobs is not None and len(c.token_ids) == len(c.logprobs) > 0 for c in completions)
    return [
        (
            list(c.token_ids),
            [entry[token].logprob for token, entry in zip(c.token_ids, c.logprobs or (), strict=True)],
        )
        for c in completions
    ]


def generate(llm: LLM, texts: list[dict[str, Any]], salt: str, **kwargs: Any) -> Bits:
    salted = [text | {"cache_salt": f"{salt}{kwargs}"} for text in texts]
    return bits(llm.generate(salted, params(**kwargs), use_tqdm=False))


def alone(llm: LLM, texts: list[dict[str, Any]], **kwargs: Any) -> Bits:
    return [one for i, text in enumerate(texts) for one in generate(llm, [text], f"alone {i}", **kwargs)]


def cases() -> list[Any]:
    """All that there is on this machine; most of it is slow, as each case compiles three engines."""
    found = [("xla", "xla")]
    if native.is_built():
        found.append(("native", "xla"))
        if products.problem(jnp.dtype("float32")) is None:
            found.append(("native", "onednn"))
    quick = {(*found[0], "float32", "fp8_e4m3"), (*found[-1], "bfloat16", "int8")}
    quick |= {(*found[0], "float32", "auto"), (*found[-1], "bfloat16", "auto")}
    caches = ("auto", "int8", "fp8_e4m3")
    every = [(*pair, dtype, cache) for pair in found for dtype in ("float32", "bfloat16") for cache in caches]
    return [
        pytest.param(*case, id=" ".join(case), marks=() if case in quick else pytest.mark.slow)
        for case in every
    ]


@pytest.mark.parametrize(("attention", "matmul", "dtype", "cache"), cases())
def test_the_same_bits(attention: str, matmul: str, dtype: str, cache: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    settings = {"attention_backend": attention, "matmul_backend": matmul, "dtype": dtype, **LIMITS}
    settings["kv_cache_dtype"] = cache
    texts = prompts(VOCAB_SIZE)
    with LLM(str(tmp_path), **settings) as llm:
        expected = alone(llm, texts)
        assert len({tuple(tokens) for tokens, _ in expected}) == len(texts)
        assert generate(llm, texts, "together") == expected
        assert generate(llm, texts[::-1], "together") == expected[::-1], "from the cache, in another order"
        several = alone(llm, texts[:4], n=2, presence_penalty=0.4)
        assert generate(llm, texts[:4], "samples", n=2, presence_penalty=0.4) == several
        scores = [
            one.prompt_logprobs for one in llm.generate(texts, params(prompt_logprobs=0), use_tqdm=False)
        ]
        for text, score in zip(texts, scores, strict=True):
            (one,) = llm.generate([text], params(prompt_logprobs=0), use_tqdm=False)
            assert one.prompt_logprobs == score
    for mode in ("recompute", "swap"):
        # 40 blocks of 4 tokens, where all of them need 150.
        small = settings | {"num_gpu_blocks_override": 40, "preemption_mode": mode}
        with LLM(str(tmp_path), **small) as llm:
            outputs = llm.generate(texts, params(), use_tqdm=False)
            assert bits(outputs) == expected
            assert any(output.metrics.num_preemptions for output in outputs)


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("mixtral", "mistral_window", "gpt2_variants", "t5_tied")
        ),
    ],
)
def test_families(family: str) -> None:
    with LLM(str(FIXTURES / family), **LIMITS | {"max_num_batched_tokens": 24}) as llm:
        vocab_size, longest = llm.llm_engine.config.vocab_size, llm.llm_engine.config.max_model_len
        texts = [t for t in prompts(vocab_size) if len(t["prompt_token_ids"]) + 12 <= longest]
        expected = alone(llm, texts, max_tokens=10)
        assert generate(llm, texts, "together", max_tokens=10) == expected
        assert generate(llm, texts[::-1], "together", max_tokens=10) == expected[::-1]


def test_bursts_are_programs_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"`num_scheduler_steps` must be 1 with batch_invariant.*got 2"):
        LLM(batch_invariant=True, num_scheduler_steps=2)


def test_kernels_that_divide_their_work_by_the_batch_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`batch_invariant` must be False unless attention runs on a CPU.*got True"
    ):
        LLM(batch_invariant=True, attention_backend="pallas_interpret")


@pytest.mark.quick
def test_the_check_at_the_start_finds_steps_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = [Bucket(True, 16, 16), Bucket(False, 64, 16)]  # XLA adds up 16 rows in another order than 64
    monkeypatch.setattr(plan_steps, "plan_invariant_buckets", lambda *args, **kwargs: buckets)
    with pytest.raises(ValueError, match="because results depend on the batch"):
        LLM(
            batch_invariant=True,
            dtype="float32",
            max_num_seqs=16,
            max_num_batched_tokens=64,
            attention_backend="xla",
            matmul_backend="xla",
        )
