"""Engines whose kernels are small: their tokens are those of the floats that the kernels mean."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from helpers.adapters import merged, write_random
from helpers.quantized_checkpoints import FORMATS, write_quantized
from helpers.real_model import (
    TOLERANCE,
    VOCAB_SIZE,
    DenseModel,
    Request,
    largest_buckets,
    log_softmax,
    make_engine,
    run,
    tokens_of,
)

from jax_paged import LLM, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from jax_paged.models.quantization.quantize import kernel_places, quantize_model
from jax_paged.models.quantization.quantized_linear import QuantizedWeight
from jax_paged.models.weights import load_model, random_checkpoint, save_model
from jax_paged.outputs import RequestOutput
from jax_paged.worker.compilation import plan_steps
from jax_paged.worker.executor import LocalExecutor

pytestmark = pytest.mark.thorough

SIZES: dict[str, Any] = {
    "few_buckets": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 160,
    "matmul_backend": "auto",
}
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
QUICK = {"awq_32", "on_the_fly_int4"}
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in (*FORMATS, "on_the_fly_int4", "on_the_fly_int8", "on_the_fly_fp8")
]


def prompts(seed: int = 0) -> list[list[int]]:
    """Returns prompts of several chunks, two of which begin alike."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(8, VOCAB_SIZE, n).tolist() for n in (100, 1, 40, 17)]
    return [*found, found[0][:50] + found[2]]


def checkpoints(name: str, base: Path, folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Returns what to serve, the floats that it means, and an engine's argument."""
    floats = folder / "floats"
    if name in FORMATS:
        write_quantized(name, base, folder / "small", floats)
        return folder / "small", floats, {}
    kind = name.removeprefix("on_the_fly_")
    write_floats(base, floats, kind)
    return base, floats, {"quantization": kind}


def write_floats(base: Path, out: Path, kind: Any) -> None:
    """Writes the floats that kernels mean which are made small on the fly."""
    model, small = load_model(base, "float32").model, quantize_model(load_model(base, "float32").model, kind)
    places = {place.path: place for place in kernel_places(model)}
    for made in kernel_places(small):
        if isinstance(made.kernel, QuantizedWeight) and made.path in places:
            places[made.path].kernel.set_value(made.kernel.dense("float32"))
        elif isinstance(made.kernel, QuantizedWeight):  # a table
            model.head.embedding.set_value(made.kernel.dense("float32").T)
    save_model(model, out, json.loads((base / "config.json").read_text()))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if (base / file).exists():
            (out / file).write_bytes((base / file).read_bytes())


def check_greedy(outputs: list[RequestOutput], dense: DenseModel) -> None:
    """Checks that every token is the dense model's best, and its log-probability."""
    for output, logits in zip(outputs, dense.output_logits(outputs), strict=True):
        chosen, logprobs = list(output.outputs[0].token_ids), log_softmax(logits)
        assert chosen == logits.argmax(-1).tolist()
        found = [
            entry[token].logprob
            for entry, token in zip(output.outputs[0].logprobs or [], chosen, strict=True)
        ]
        np.testing.assert_allclose(found, logprobs[range(len(chosen)), chosen], atol=TOLERANCE)


def served(engine: LLMEngine, prompts: list[list[int]]) -> list[RequestOutput]:
    return run(engine, [Request(prompt, GREEDY) for prompt in prompts])


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_floats(name: str, checkpoint: Path, tmp_path: Path) -> None:
    folder, floats, given = checkpoints(name, checkpoint, tmp_path)
    with make_engine(folder, **SIZES, **given) as engine:
        dense = DenseModel(floats, 160)
        check_greedy(served(engine, prompts()), dense)
        again = served(engine, prompts())
        check_greedy(again, dense)
        assert again[0].num_cached_tokens > 0
        assert engine.config.weight_bytes < 0.75 * load_model(floats).weight_bytes


def test_an_encoder(tmp_path: Path) -> None:
    base = Path(__file__).parents[1] / "models" / "pooling_fixtures" / "bert_embedder"
    write_floats(base, tmp_path / "floats", "int8")
    given = {str(base): {"quantization": "int8"}, str(tmp_path / "floats"): {}}
    texts: list[Any] = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9, 8, 5, 6]}]
    found, sizes = [], []
    for folder, more in given.items():
        with LLM(folder, dtype="float32", max_num_seqs=2, max_num_batched_tokens=64, **more) as llm:
            found.append([output.outputs.data for output in llm.encode(texts, use_tqdm=False)])
            sizes.append(llm.llm_engine.config.weight_bytes)
    np.testing.assert_allclose(*found, atol=TOLERANCE)
    assert sizes[0] < sizes[1]


@pytest.mark.slow
def test_bursts_with_two_steps_in_flight(checkpoint: Path, tmp_path: Path) -> None:
    folder, floats, _ = checkpoints("gptq_ordered_32", checkpoint, tmp_path)
    with make_engine(folder, num_scheduler_steps=4, **(SIZES | {"async_scheduling": True})) as engine:
        check_greedy(served(engine, prompts()), DenseModel(floats, 160))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq_32", "on_the_fly_int8"])
def test_adapters_add_to_small_kernels(name: str, checkpoint: Path, tmp_path: Path) -> None:
    folder, floats, given = checkpoints(name, checkpoint, tmp_path)
    adapter = write_random(tmp_path / "adapter", floats, 4, 1)
    with make_engine(folder, enable_lora=True, **SIZES, **given) as engine:
        plain = served(engine, prompts())
        for i, prompt in enumerate(prompts()):
            engine.add_request(f"a{i}", prompt, GREEDY, lora_request=LoRARequest("a", 1, str(adapter)))
        outputs: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            outputs |= {o.request_id: o for o in engine.step() if o.finished}
    dense = DenseModel(floats, 160)
    check_greedy(plain, dense)
    dense._model = merged(floats, adapter)
    check_greedy([outputs[f"a{i}"] for i in range(5)], dense)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq_32", "gptq_ordered_32", "on_the_fly_int8", "fp8_channel"])
def test_two_devices_and_two_stages(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, floats, given = checkpoints(name, checkpoint, tmp_path)
    dense = DenseModel(floats, 160)
    monkeypatch.setattr(plan_steps, "plan_buckets", largest_buckets)
    for parallel in ("tensor_parallel_size", "pipeline_parallel_size"):
        with LLM(
            str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_model_len=160,
            num_scheduler_steps=1,
            **{parallel: 2},
            **given,
        ) as llm:
            found = llm.generate([{"prompt_token_ids": p} for p in prompts()], GREEDY, use_tqdm=False)
        check_greedy(found, dense)


EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


# Another architecture: experts of one tensor, with biases.
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "sliding_window": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other"), [("gptq_32", {}), ("on_the_fly_fp8", {}), ("on_the_fly_int8", GPT_OSS)]
)
@pytest.mark.parametrize("by_expert", [False, True])
def test_experts_on_two_devices(name: str, other: dict[str, Any], by_expert: bool, tmp_path: Path) -> None:
    random_checkpoint(tmp_path, EXPERTS | other, "float32")
    folder, floats, given = checkpoints(name, tmp_path, tmp_path)
    settings = SIZES | given | {"skip_tokenizer_init": True, "enable_expert_parallel": by_expert}
    for size in (1, 2):
        with make_engine(folder, tensor_parallel_size=size, **settings) as engine:
            check_greedy(served(engine, prompts()), DenseModel(floats, 160))


@pytest.mark.quick
def test_groups_that_devices_can_not_share_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    write_quantized("fp8_block", checkpoint, tmp_path / "blocks")
    with pytest.raises(
        ValueError, match=r"`tensor_parallel_size` must be .*a divisor of 1 \(.*down_proj.*got 2"
    ):
        make_engine(tmp_path / "blocks", tensor_parallel_size=2, **SIZES)
    write_quantized("awq_32", checkpoint, tmp_path / "groups")
    with pytest.raises(
        ValueError, match=r"`tensor_parallel_size` must be .*a divisor of 2 \(.*o_proj\.kernel\.scales.*got 4"
    ):
        make_engine(tmp_path / "groups", tensor_parallel_size=4, **SIZES)


@pytest.mark.quick
def test_new_weights_are_made_small_too(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model in memory: it stays as it is, and what is served of it changes with it only when told."""
    model = load_model(checkpoint, "float32").model
    args = EngineArgs(
        str(checkpoint),
        quantization="int8",
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=160,
        async_scheduling=False,
    )
    write_floats(checkpoint, tmp_path / "before", "int8")
    monkeypatch.setattr(plan_steps, "plan_buckets", largest_buckets)
    with LLMEngine(args, LocalExecutor(args, model)) as engine:
        assert engine.config.weight_bytes < 0.75 * load_model(checkpoint).weight_bytes
        check_greedy(served(engine, prompts()), DenseModel(tmp_path / "before", 160))
        for place in kernel_places(model):
            place.kernel.set_value(place.kernel[...] * 1.25)
        save_model(model, tmp_path / "new", json.loads((checkpoint / "config.json").read_text()))
        write_floats(tmp_path / "new", tmp_path / "after", "int8")
        after = DenseModel(tmp_path / "after", 160)
        engine.update_weights(model)
        check_greedy(served(engine, prompts()), after)
        engine.update_weights(str(checkpoint))
        check_greedy(served(engine, prompts()), DenseModel(tmp_path / "before", 160))
        engine.update_weights(nnx.state(model))
        check_greedy(served(engine, prompts()), after)
        engine.sleep(level=1)
        engine.wake_up()
        check_greedy(served(engine, prompts()), after)


@pytest.mark.slow
def test_weights_of_a_quantised_checkpoint_come_from_another_like_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder, _, _ = checkpoints("awq_32", checkpoint, tmp_path)
    other = load_model(checkpoint, "float32").model
    for place in kernel_places(other):
        place.kernel.set_value(place.kernel[...] * 1.25)
    save_model(other, tmp_path / "base", json.loads((checkpoint / "config.json").read_text()))
    write_quantized("awq_32", tmp_path / "base", tmp_path / "new", tmp_path / "after")
    write_quantized("gptq_32", tmp_path / "base", tmp_path / "gptq")
    with make_engine(folder, **SIZES) as engine:
        before = tokens_of(served(engine, prompts()))
        for new in (other, nnx.state(other), {"model.norm.weight": np.ones(64, np.float32)}):
            with pytest.raises(
                ValueError, match="must be the folder or hub id of a checkpoint of the same format"
            ):
                engine.update_weights(new)
        for folder in (checkpoint, tmp_path / "gptq"):
            with pytest.raises(
                ValueError,
                match=r"the weights must be quantized like those of the served model.*layers.0.*_proj",
            ):
                engine.update_weights(str(folder))
        assert tokens_of(served(engine, prompts())) == before
        engine.update_weights(str(tmp_path / "new"))
        check_greedy(served(engine, prompts()), DenseModel(tmp_path / "after", 160))
        engine.sleep(level=2)
        engine.update_weights(str(tmp_path / "small"))
        engine.wake_up()
        assert tokens_of(served(engine, prompts())) == before


@pytest.mark.slow
def test_a_state_holds_small_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_steps, "plan_buckets", largest_buckets)
    prompt, params = {"prompt_token_ids": prompts()[0]}, dataclasses.replace(GREEDY, logprobs=None)
    settings: dict[str, Any] = {"quantization": "fp8", "dtype": "float32", "max_model_len": 160}
    with LLM(str(checkpoint), max_num_seqs=2, num_scheduler_steps=1, **settings) as llm:
        (expected,) = llm.generate([prompt], params, use_tqdm=False)
        llm.llm_engine.add_request("a", prompt, params)
        for _ in range(6):
            llm.llm_engine.step()
        llm.llm_engine.state(weights=True).save(tmp_path / "state")
    with LLM.restore(tmp_path / "state") as restored:
        outputs: list[RequestOutput] = []
        while restored.llm_engine.has_unfinished_requests():
            outputs += [output for output in restored.llm_engine.step() if output.finished]
        assert tokens_of(outputs) == tokens_of([expected])
