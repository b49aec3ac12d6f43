"""Layers that differ in heads share the arrays of the pool; those that share keys and values have none."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.real_model import TOLERANCE, DenseModel, Request, log_softmax, make_engine, reschedule, run

from jax_paged import LLMEngine, SamplingParams

pytestmark = pytest.mark.thorough

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
MAX_LEN = 200
SIZES: dict[str, Any] = {
    "few_buckets": True,
    "skip_tokenizer_init": True,
    "max_model_len": MAX_LEN,
    "block_size": 4,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 130,
    "swap_space": 0.01,
}
# What each decoder layer caches: key and value heads, and their size.
SHAPES = {
    "gemma4_shared": [(2, 8), (2, 8), (2, 16)],
    "gemma4_moe_capped": [(1, 16), (4, 8), (1, 16)],
    "gemma4_images": [(2, 8)] * 3 + [(1, 16)],
}
slow = pytest.mark.slow


def random_requests(seed: int, count: int) -> list[Request]:
    """Prompts of 1 to 100 tokens, every second one with a prefix that others have, and 1 to 90 new tokens."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, 256, (4, 100))
    found = []
    for i in range(count):
        prompt = rng.integers(0, 256, rng.integers(1, 101))
        if i % 2:
            shared = rng.integers(1, len(prompt) + 1)
            prompt[:shared] = prefixes[rng.integers(0, 4), :shared]
        params = SamplingParams(
            temperature=0, max_tokens=int(rng.integers(1, 91)), logprobs=1, ignore_eos=True
        )
        found.append(Request(prompt.tolist(), params))
    return found


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma4_shared", {"num_blocks": 90, "preemption_mode": "swap"}),
        pytest.param(
            "gemma4_moe_capped",
            {"num_blocks": 90, "preemption_mode": "swap", "num_scheduler_steps": 4},
            marks=slow,
        ),
        pytest.param("gemma4_shared", {"num_blocks": 90, "num_scheduler_steps": 4}, marks=slow),
        pytest.param("gemma4_shared", {"enable_prefix_caching": False}, marks=slow),
        pytest.param("gemma4_shared", {"attention_backend": "native", "num_blocks": 90}, marks=slow),
        pytest.param("gemma4_moe_capped", {"num_blocks": 90}, marks=slow),
        pytest.param("gemma4_moe_capped", {"attention_backend": "native", "num_blocks": 90}, marks=slow),
        pytest.param("gemma4_images", {"num_blocks": 90}, marks=slow),
    ],
)
def test_random_requests_get_the_tokens_of_the_dense_call(name: str, settings: dict[str, Any]) -> None:
    requests = random_requests(3, 20)
    own = {k: settings.pop(k) for k in [*settings] if k == "attention_backend"} | SIZES
    burst = settings.get("num_scheduler_steps", 1)
    with make_engine(FIXTURES / name, num_scheduler_steps=burst, **own) as engine:
        reschedule(engine, **settings)
        outputs = run(engine, requests)
    assert "num_blocks" not in settings or any(o.metrics.num_preemptions for o in outputs if o.metrics)
    if settings.get("enable_prefix_caching", True):
        assert any(output.num_cached_tokens for output in outputs)
    for output, logits in zip(
        outputs, DenseModel(FIXTURES / name, MAX_LEN).output_logits(outputs), strict=True
    ):
        logprobs = log_softmax(logits)
        tokens = list(output.outputs[0].token_ids)
        ours = [
            entry[token].logprob
            for entry, token in zip(output.outputs[0].logprobs or [], tokens, strict=True)
        ]
        chosen = logprobs[np.arange(len(tokens)), tokens]
        assert (chosen > logprobs.max(-1) - 2 * TOLERANCE).all()
        assert np.abs(chosen - ours).max() < TOLERANCE


@pytest.fixture(
    scope="module",
    params=["gemma4_shared", *(pytest.param(n, marks=slow) for n in ("gemma4_moe_capped", "gemma4_images"))],
)
def running(request: pytest.FixtureRequest) -> Any:
    """An engine whose two requests have 40 tokens or so in the pool."""
    with make_engine(FIXTURES / request.param, max_compile_s=0, **SIZES) as engine:
        for i in range(2):
            prompt = np.random.default_rng(i).integers(0, 256, 37).tolist()
            engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        for _ in range(7):
            engine.step()
        yield request.param, engine


def keys_and_values(model: Any, tokens: np.ndarray) -> dict[int, Any]:
    """Returns what each layer of a dense call would cache."""
    given: dict[int, Any] = {}
    context = model.dense_context(tokens)

    def note(layer: int, q: Any, k: Any, v: Any, **options: Any) -> Any:
        if k is not None:
            given[layer] = k, v
        return context.attend(layer, q, k, v, **options)

    model.hidden(tokens, dataclasses.replace(context, attend=note))
    return given


def test_each_layer_has_keys_of_its_own(running: tuple[str, LLMEngine]) -> None:
    """They are those that the dense call makes: no layer, request or group has written over another's."""
    name, engine = running
    model = DenseModel(FIXTURES / name, MAX_LEN)._model
    for request_id in "01":
        text = engine.page_table(request_id).tokens
        given = keys_and_values(model, np.array([text], np.int32))
        assert sorted(given) == list(range(len(SHAPES[name])))
        for layer, shape in enumerate(SHAPES[name]):
            for found, want in zip(engine.kv(request_id, layer), given[layer], strict=True):
                assert found.shape[1:] == shape
                n = len(text) - 1
                # A layer with a window has lost its first blocks.
                np.testing.assert_allclose(found, want[0, n - len(found) : n], atol=1e-4)


def test_attention_that_is_looked_at(running: tuple[str, LLMEngine]) -> None:
    name, engine = running
    layers = list(range(len(SHAPES[name])))
    found = engine.inspect("0", layers)
    for rows in found.attention.values():
        np.testing.assert_allclose(rows.sum(-1), 1, atol=1e-5)
    if name == "gemma4_shared":
        with pytest.raises(ValueError, match=r"`layer` must be an integer in \[0, 2\].*got 3"):
            engine.kv("0", 3)


def test_the_pool_has_the_bytes_that_are_counted(running: tuple[str, LLMEngine]) -> None:
    name, engine = running
    runner: Any = engine.executor
    pool, layout = runner.runner.arrays["kv_cache"], runner.runner.context.layout
    assert sum(x.nbytes for x in pool) == engine.config.kv_cache_bytes
    # A layer's part of a block, in float32.
    sizes = [2 * heads * size * SIZES["block_size"] * 4 for heads, size in SHAPES[name]]
    block = engine.config.kv_cache_bytes // engine.config.num_blocks
    for group in range(len(layout.groups)):
        used = sum(size for size, place in zip(sizes, layout.locations, strict=True) if place.group == group)
        assert max(sizes) <= used <= block


@pytest.mark.quick
@pytest.mark.parametrize("name", ["gemma4_shared", "gemma4_moe_capped"])
def test_a_quantised_cache_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"`kv_cache_dtype` must be 'auto' .*got 'int8'"):
        make_engine(FIXTURES / name, kv_cache_dtype="int8", **SIZES)


@pytest.mark.quick
def test_keys_of_the_hub_are_those_that_are_known(tmp_path: Path) -> None:
    """Weights of layers that share are not read, nor those for images; all others are asked for by name."""
    from safetensors.numpy import load_file, save_file

    from jax_paged.models.weights import load_model

    folder = FIXTURES / "gemma4_hub_images"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert "model.language_model.layers.4.self_attn.k_proj.weight" in tensors
    assert any(key.startswith("model.vision_tower.") for key in tensors)
    for more in ("model.another_tower.weight", "model.language_model.layers.0.mlp.extra.weight"):
        save_file(tensors | {more: np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"{more} is unexpected"):
            load_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["text_config"]["global_head_dim"] == 16
