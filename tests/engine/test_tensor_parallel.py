"""A model that is divided among devices gives the tokens of the same model on one."""

import collections
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.real_model import Request, make_engine, run

from jax_paged import LLM, BeamSearchParams, Hook, LLMEngine, LoRARequest, SamplingParams
from jax_paged.models.loading import weight_reading
from jax_paged.models.weights import load_model, random_checkpoint
from jax_paged.pallas_kernels.native import products

pytestmark = pytest.mark.thorough

MODELS = Path(__file__).parents[1] / "models"
FIXTURES, ADAPTERS = MODELS / "fixtures", MODELS / "adapters"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
KINDS = ("mixtral", "moe", "gpt_oss", "deepseek")
MOE = [name for name in NAMES if any(kind in name for kind in KINDS)]


def requests(vocab_size: int, *, has_encoder: bool = False) -> list[Request]:
    """Greedy ones, random ones with every filter and penalty, several samples, beams; some share a prefix."""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, vocab_size, 24).tolist()
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.9, "n": 1 if has_encoder else 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "prompt_logprobs": None if has_encoder else 2},
        {"temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 0.7, "logit_bias": {5: 2.0, vocab_size - 1: 3.0}},
    ]
    found = []
    for i, values in enumerate(2 * settings):
        own = rng.integers(3, vocab_size, int(rng.integers(1, 40))).tolist()
        params = SamplingParams(
            seed=2**40 + i, max_tokens=int(rng.integers(6, 20)), ignore_eos=True, **values
        )
        found.append(Request(own if i % 3 else shared + own, params))
    if not has_encoder:
        beams = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
        found.append(Request(shared, SamplingParams(), beams=beams))
    return found


def config_of(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / name / "config.json").read_text())


def vocab_size_of(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]


def engine_of(folder: Path, size: int, **settings: Any) -> LLMEngine:
    """An engine whose pool is too small for all requests, and holds any of them alone."""
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, "max_model_len": 96}
    num_blocks = 80 if folder.name.startswith("gemma4") else 40  # its layers are four groups
    memory = {"num_gpu_blocks_override": num_blocks, "swap_space": 0.01, "preemption_mode": "swap"}
    settings["skip_tokenizer_init"] = True
    return make_engine(folder, few_buckets=True, tensor_parallel_size=size, **(limits | memory | settings))


def outputs_of(folder: Path, size: int, **settings: Any) -> list[list[tuple[list[int], float | None]]]:
    """Tokens and cumulative log-probability of every output of every request."""
    has_encoder = folder.name.startswith("t5")
    if has_encoder:
        settings = {"preemption_mode": "recompute"} | settings
    with engine_of(folder, size, **settings) as engine:
        outputs = run(engine, requests(vocab_size_of(folder), has_encoder=has_encoder))
        assert any(output.metrics.num_preemptions for output in outputs if output.metrics)
        pool = engine.executor.runner.arrays["kv_cache"]  # pyright: ignore[reportAttributeAccessIssue]
        assert all(len(array.sharding.device_set) == size for array in pool)
    return [[(o.token_ids, o.cumulative_logprob) for o in output.outputs] for output in outputs]


def check(folder: Path, sizes: tuple[int, ...], **settings: Any) -> None:
    """Compares outputs with those of one device: the tokens, and log-probabilities to a sum's rounding."""
    wanted = outputs_of(folder, 1, **settings)
    for size in sizes:
        found = outputs_of(folder, size, **settings)
        assert [[x[0] for x in o] for o in found] == [[x[0] for x in o] for o in wanted], size
        for a, b in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
            assert (a[1] is None) == (b[1] is None)
            assert a[1] is None or abs(a[1] - (b[1] or 0)) < 1e-3


QUICK = [("gqa4_llama3", 4), pytest.param("t5_tied", 2, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "size"), QUICK)
def test_the_tokens_of_one_device(name: str, size: int) -> None:
    check(FIXTURES / name, (size,))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_of_one_device_for_every_family(name: str) -> None:
    config = config_of(name)
    num_heads = config.get("text_config", config).get("linear_num_key_heads", 4)  # of a delta rule
    check(FIXTURES / name, tuple(size for size in (2, 4) if num_heads % size == 0))


@pytest.mark.parametrize("by_expert", [pytest.param(False, marks=pytest.mark.slow), True])
def test_experts(by_expert: bool) -> None:
    check(FIXTURES / "qwen3_moe_tied", (4,), enable_expert_parallel=by_expert)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_experts_whole_on_a_device(name: str) -> None:
    config = json.loads((FIXTURES / name / "config.json").read_text())
    num_experts = next(
        config[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in config
    )
    sizes = tuple(size for size in (2, 4) if num_experts % size == 0)
    check(FIXTURES / name, sizes, enable_expert_parallel=True)


@pytest.mark.slow
def test_the_native_backend(tmp_path: Path) -> None:
    config = config_of("gqa2_tied") | {"head_dim": 64, "initializer_range": 0.3}
    random_checkpoint(tmp_path, config, "float32")
    check(tmp_path, (2,), attention_backend="native")


def test_recomputed_in_bursts_with_two_steps_in_flight_and_a_cache_of_bytes() -> None:
    settings = {"num_scheduler_steps": 4, "async_scheduling": True, "kv_cache_dtype": "int8"}
    few = {"preemption_mode": "recompute", "num_gpu_blocks_override": 30}
    check(FIXTURES / "mistral_window", (2,), **few, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gqa2_tied", "gqa4_llama3", "gpt2_variants"],
)
def test_a_vocabulary_of_an_odd_size(tmp_path: Path, name: str) -> None:
    random_checkpoint(tmp_path, config_of(name) | {"vocab_size": 263, "initializer_range": 0.3}, "float32")
    check(tmp_path, (4,))


@pytest.mark.slow
def test_a_model_that_drafts(tmp_path: Path) -> None:
    speculative = {"model": str(FIXTURES / "gqa2_tied"), "num_speculative_tokens": 3}
    folder = shutil.copytree(FIXTURES / "gqa2_tied", tmp_path / "model")
    check(folder, (2,), speculative_config=speculative, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("base", "adapter"),
    [
        pytest.param("gqa4_llama3", "rank8_all_linear", marks=pytest.mark.slow),
        ("phi3_longrope", "phi3_fused"),
    ],
)
def test_adapters(base: str, adapter: str) -> None:
    """On maps whose columns are in another order on devices, too."""
    config = json.loads((ADAPTERS / adapter / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).name == base
    prompts = [np.random.default_rng(i).integers(3, 256, 9).tolist() for i in range(4)]
    lora = LoRARequest("a", 1, str(ADAPTERS / adapter))
    found = []
    for size in (1, 2):
        with engine_of(FIXTURES / base, size, enable_lora=True, max_lora_rank=16) as engine:
            for i, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
                engine.add_request(str(i), prompt, params, lora_request=lora if i % 2 else None)
            done: dict[str, Any] = {}
            while engine.has_unfinished_requests():
                done |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
            found.append(done)
    assert found[0] == found[1]
    assert found[0]["0"] != found[0]["1"]


def test_new_weights_and_sleep() -> None:
    """Weights of a folder and of a model in memory, where kv heads lie on two devices each."""
    folder, prompt = FIXTURES / "phi3_window", list(range(3, 20))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def generate(engine: LLMEngine) -> list[int]:
        return run(engine, [Request(prompt, params)])[0].outputs[0].token_ids

    other = load_model(folder, "float32").model
    for layer in other.layers:
        layer.mlp.down_proj.kernel[...] = -layer.mlp.down_proj.kernel[...]
    found = []
    for size in (1, 4):
        with engine_of(folder, size) as engine:
            tokens = [generate(engine)]
            engine.update_weights(other)
            tokens.append(generate(engine))
            engine.update_weights(str(folder))
            tokens.append(generate(engine))
            engine.sleep(2)
            engine.wake_up()
            tokens.append(generate(engine))
            found.append(tokens)
    assert found[0] == found[1]
    assert found[0][0] == found[0][2] == found[0][3] != found[0][1]


@pytest.mark.quick
def test_no_device_ever_has_more_than_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a checkpoint is loaded, and after it."""
    config = config_of("gqa4_llama3") | {"intermediate_size": 256, "num_key_value_heads": 4}
    random_checkpoint(tmp_path, config, "float32")
    sizes = [x.nbytes for x in jax.tree.leaves(nnx.state(load_model(tmp_path, "float32").model))]
    monkeypatch.setattr(weight_reading, "NUM_LOADING_THREADS", 1)
    before, most, load = jax.live_arrays(), [0], weight_reading._load_weight
    known = set(map(id, before))

    def watched(*args: Any) -> jax.Array:
        array = load(*args)
        # A part of an array is an array too, in the same memory.
        parts = {
            (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
            for kept in jax.live_arrays()
            if id(kept) not in known
            for shard in kept.addressable_shards
        }
        held = collections.Counter[jax.Device]()
        for (device, _), num_bytes in parts.items():
            held[device] += num_bytes
        most.append(max(held.values()))
        return array

    monkeypatch.setattr(weight_reading, "_load_weight", watched)
    with engine_of(tmp_path, 4) as engine:
        arrays = engine.executor.runner.arrays["weights"]  # pyright: ignore[reportAttributeAccessIssue]
        held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
    assert len(most) > 10
    assert max(*most, held) <= sum(sizes) / 4 + max(sizes)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("gqa2_tied", 3, r"`tensor_parallel_size` must be .*a divisor of 4 \(layers.0.self_attn.*, got 3"),
        (
            "gqa2_tied",
            5,
            r"`tensor_parallel_size` must be at most 4, the number of devices that JAX sees, got 5",
        ),
        ("gqa2_tied", 0, r"`tensor_parallel_size` must be an integer of at least 1, got 0"),
    ],
)
def test_sizes_that_can_not_be(name: str, size: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named before a weight is read."""
    monkeypatch.setattr("jax_paged.models.weights.read_weights", None)
    with pytest.raises(ValueError, match=message):
        engine_of(FIXTURES / name, size)


@pytest.mark.skipif(products.problem(jnp.dtype("float32")) is not None, reason="there is no oneDNN")
def test_packed_weights_are_not_divided() -> None:
    with pytest.raises(
        ValueError, match=r"`matmul_backend` must be 'auto' or 'xla' with tensor_.*.*got 'onednn'"
    ):
        engine_of(FIXTURES / "gqa2_tied", 2, matmul_backend="onednn")


@pytest.mark.quick
def test_hooks_have_whole_outputs() -> None:
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 32}
    settings |= {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 20}
    hooks = [Hook("layers.0.mlp", lambda params, y, args: (y + args, y), name="add")]
    hooks += [Hook("layers.1.mlp.up_proj", lambda params, y, args: (y * args, y), name="scale")]
    params = SamplingParams(temperature=0, max_tokens=6, hook_args={"add": 0.5, "scale": 1.5})
    found = []
    for size in (1, 2):
        with LLM(str(FIXTURES / "gqa2_tied"), hooks=hooks, tensor_parallel_size=size, **settings) as llm:
            found.append(llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0])
    (alone, divided) = (output.outputs[0] for output in found)
    assert alone.token_ids == divided.token_ids
    for name in ("add", "scale"):
        np.testing.assert_allclose(divided.captured[name], alone.captured[name], rtol=0, atol=1e-4)


def test_outputs_in_the_order_of_devices_have_no_hooks() -> None:
    name = next(name for name in NAMES if name.startswith("phi3"))
    hook = Hook("layers.0.self_attn.qkv_proj", lambda params, y, args: y, num_args=0, name="look")
    with pytest.raises(
        ValueError,
        match=r"`path` must be a module whose outputs are in order .*got 'layers.0.self_attn.qkv_proj'",
    ):
        LLM(str(FIXTURES / name), hooks=[hook], tensor_parallel_size=2, skip_tokenizer_init=True)
