"""Engines compute the same, to the bit, whatever settings of JAX the user's program has changed."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.real_model import make_executor

from jax_paged import LLM, EngineArgs, Hook, SamplingParams
from jax_paged.pallas_kernels import native
from jax_paged.worker.executor import LocalExecutor
from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor

pytestmark = pytest.mark.thorough

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
# A decoder, and an encoder-decoder model.
EVERY_DAY = {"gqa4_llama3", "t5_tied"}
LIMITS: dict[str, Any] = {
    "num_gpu_blocks_override": 100,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "skip_tokenizer_init": True,
    "num_scheduler_steps": 1,
}
OTHER = {
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_threefry_partitionable": False,
}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5, "top_k": 20},
    {"temperature": 1.1, "seed": 6, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.8, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {5: 3.0}},
]


@contextlib.contextmanager
def other_settings(**settings: Any) -> Iterator[None]:
    """Changes JAX's settings for all threads."""
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def make_llm(name: str, backend: Any = "xla", *parts: Any) -> LLM:
    settings = LIMITS | {"attention_backend": backend, "matmul_backend": "xla"}
    model = str(FIXTURES / name)
    args = EngineArgs(model=model, **settings)
    return LLM(model, executor=make_executor(args), **settings)


def generated(llm: LLM, num: int = 5, **more: Any) -> list[Any]:
    """Returns tokens and log-probabilities of requests that are sampled in all ways."""
    is_decoder = llm.llm_engine.config.decoder_start_token_id is None
    common = {"max_tokens": 5, "logprobs": 3, "prompt_logprobs": 1 if is_decoder else None}
    params = [
        SamplingParams(**common, **each, **more, detokenize=False, ignore_eos=True) for each in SAMPLED[:num]
    ]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 128, n).tolist() for n in (5, 17, 9, 3, 20)[:num]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].logprobs, o.prompt_logprobs) for o in outputs]


def cases() -> Iterator[Any]:
    for folder in sorted(FIXTURES.iterdir()):
        for backend in ("xla", "native"):
            is_quick = folder.name in EVERY_DAY and backend == "native"
            marks = [] if is_quick else [pytest.mark.slow]
            if backend == "native":
                marks.append(pytest.mark.skipif(not native.is_built(), reason="native is not built"))
            yield pytest.param(folder.name, backend, marks=marks, id=f"{folder.name} {backend}")


@pytest.mark.parametrize(("name", "backend"), cases())
def test_the_same_bits(name: str, backend: str) -> None:
    with make_llm(name, backend) as llm:
        expected = generated(llm)
        with other_settings(**OTHER):
            assert generated(llm) == expected, "changed after the engine was made"
        with jax.enable_x64(True):
            assert generated(llm) == expected, "in a scope of the caller's thread"
    with other_settings(**OTHER), make_llm(name, backend) as llm:
        assert generated(llm) == expected, "changed before the engine was made"


@pytest.mark.quick
def test_every_method_of_the_executor_has_the_settings() -> None:
    """Also of methods that are added later: a decorator of the class covers them."""
    public = [f for name, f in vars(LocalExecutor).items() if callable(f) and not name.startswith("_")]
    assert public
    assert all(hasattr(f, "__wrapped__") for f in [*public, LocalExecutor.__init__])


def test_parts_of_the_user_in_64_bits() -> None:
    """Arrays that the user's program has made of 64 bits are computed with in 32 bits."""

    def parts() -> dict[str, Any]:
        direction = jnp.asarray(np.linspace(-1, 1, 64))
        hook = Hook("layers.0.mlp", lambda p, y, args: y + args * p + direction, direction, name="h")
        state = jnp.zeros(()), jnp.arange(3)

        def change(logits: Any, state: Any, args: Any) -> Any:
            return logits * (1 + state[0]), (state[0] + args.values[0], state[1] + 1)

        return {"hooks": [hook], "logits_processors": [LogitsProcessor("p", change, state=state)]}

    def run() -> list[Any]:
        model, settings = str(FIXTURES / "gqa4_llama3"), LIMITS | {"max_compile_s": 0}
        with LLM(model, **settings, **parts()) as llm:
            return generated(llm, 2, hook_args={"h": [2.0]}, extra_args={"p": [0.1]})

    expected = run()
    with other_settings(jax_enable_x64=True):
        assert parts()["logits_processors"][0].state[0].dtype == jnp.float64
        assert run() == expected
