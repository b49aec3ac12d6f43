"""Adapters in PEFT's format: read as PEFT computes with them, and refused with all that is wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.adapters import ADAPTERS, CONFIG, FIXTURES, limits_of, merged, reference, write, write_random
from jax.sharding import AbstractMesh

from jax_paged.models.features.lora.adapter_files import read_adapter
from jax_paged.models.features.lora.layers import LoraLayout, lora_maps, row_functions
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid
from jax_paged.models.weights import load_model

NAMES = sorted(folder.name for folder in ADAPTERS.iterdir() if folder.name != "soft_prompt")
BASE = FIXTURES / "gqa4_llama3"
LAYER = "base_model.model.model.layers.0."
# Float32 sums in another order move the log-probabilities of these models by up to 2e-5.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def limits() -> Any:
    return limits_of(BASE)


def half(letter: str, *shape: int, module: str = "mlp.up_proj") -> dict[str, np.ndarray]:
    return {f"{LAYER}{module}.lora_{letter}.weight": np.ones(shape, np.float32)}


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_the_dense_model_computes_what_peft_does_merged_and_beside_it(name: str) -> None:
    """All texts of an adapter in one batch, in slot 2 of 2, beside one without an adapter."""
    expected = reference(name)
    base, cases = FIXTURES / expected["base"], expected["cases"]
    tokens = np.zeros((len(cases) + 1, 64), np.int32)
    for row, case in zip(tokens, cases, strict=False):
        text = case["prompt_token_ids"] + case["token_ids"]
        row[: len(text)] = text
    tokens[-1] = tokens[-2]
    model = load_model(base, "float32").model
    layout = LoraLayout(lora_maps(model), 2, 16, jnp.dtype("float32"))
    adapter = read_adapter(ADAPTERS / name, limits_of(base))
    grid = DeviceGrid(AbstractMesh((1,), (TENSOR,)))
    pairs = zip(layout.shapes(32, grid), layout.padded(adapter, grid), strict=True)
    # What lies in the other slot is nobody's, and infinite.
    arrays = [jnp.full(shape, 3e38).at[-x.shape[0] :, -x.shape[1] :].set(x) for shape, x in pairs]
    arrays = [x.at[:16].set(1e38) if i % 2 else x for i, x in enumerate(arrays)]
    slots = jnp.array([2] * len(cases) + [0])[:, None]

    @nnx.jit
    def logits(model: Any, tokens: Any) -> Any:
        context = model.dense_context(tokens)
        by_token = jnp.broadcast_to(slots, tokens.shape).reshape(-1)

        def flat(change: Any) -> Any:
            def run(x: Any, y: Any) -> Any:
                rows = change(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]))
                return rows.reshape(y.shape)

            return run

        changes = {path: flat(f) for path, f in row_functions(layout, arrays, by_token).items()}
        return model.logits(model.hidden(tokens, dataclasses.replace(context, output_edits=changes)))

    alone = nnx.jit(lambda model, tokens: model(tokens))
    beside, whole = logits(model, tokens), alone(merged(base, ADAPTERS / name), tokens)
    for each in (beside, whole):
        for row, case in zip(nnx.log_softmax(each), cases, strict=False):
            first = len(case["prompt_token_ids"]) - 1
            got = np.asarray(row[first : first + len(case["token_ids"])])
            assert got.argmax(-1).tolist() == case["token_ids"]
            np.testing.assert_allclose(got.max(-1), case["logprobs"], atol=TOLERANCE)
    np.testing.assert_array_equal(beside[-1], alone(model, tokens)[-1])


def test_one_content_has_one_key(limits: Any, tmp_path: Path) -> None:
    folders = [write_random(tmp_path / str(seed), BASE, 2, seed) for seed in (0, 0, 1)]
    config = json.loads((folders[1] / "adapter_config.json").read_text())
    (folders[1] / "adapter_config.json").write_text(json.dumps(config | {"revision": "other"}))
    first, same, other = (read_adapter(folder, limits).key for folder in folders)
    assert first == same != other
    config["lora_alpha"] = 5
    (folders[1] / "adapter_config.json").write_text(json.dumps(config))
    assert read_adapter(folders[1], limits).key not in (first, other)
    assert read_adapter(folders[0], dataclasses.replace(limits, dtype="bfloat16")).key != first


def test_the_message_lists_everything_that_is_wrong(limits: Any, tmp_path: Path) -> None:
    tensors = {
        **half("A", 20, 64),
        **half("B", 64, 20),
        **half("A", 2, 64, module="mlp.down_proj"),
        **half("A", 2, 63, module="self_attn.q_proj"),
        **half("B", 64, 2, module="self_attn.q_proj"),
        **half("A", 2, 64, module="mlp.experts.up_proj"),
        "base_model.model.lm_head.weight": np.ones((2, 2), np.float32),
    }
    write(
        tmp_path,
        tensors,
        r=2,
        rank_pattern={"up_proj": 20},
        use_dora=True,
        bias="all",
        modules_to_save=["lm_head"],
        init_lora_weights="pissa_niter_4",
        target_modules=["up_proj", "c_attn"],
    )
    with pytest.raises(ValueError, match="does not fit") as caught:
        read_adapter(tmp_path, limits)
    message = str(caught.value)
    for part in (
        "`use_dora` must be False or None, got True",
        "`bias` must be 'none', got 'all'",
        "`modules_to_save` must be None or [], got ['lm_head']",
        "`init_lora_weights` must be a method that leaves the base model unchanged, got 'pissa_niter_4'",
        "each of `target_modules` must be one of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, ",
        "the rank of model.layers.0.mlp.up_proj must be at most 16 (max_lora_rank), got 20",
        "model.layers.0.mlp.down_proj must have lora_A and lora_B, got only lora_A",
        "model.layers.0.self_attn.q_proj.lora_A must have shape (2, 64), got (2, 63)",
        "for model.layers.0.mlp.experts.up_proj",
        "each tensor must be lora_A or lora_B of a linear layer, got base_model.model.lm_head.weight",
    ):
        assert part in message
    assert len(message.splitlines()) == 11


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"peft_type": "IA3"}, "`peft_type` must be 'LORA' or 'PROMPT_TUNING', got 'IA3'"),
        ({"r": 0}, "`r` must be an integer above 0, got 0"),
        ({"r": True}, "`r` must be an integer above 0, got True"),
        ({"lora_alpha": float("inf")}, "`lora_alpha` must be a finite number, got inf"),
        ({"lora_alpha": None}, "`lora_alpha` must be a finite number, got None"),
        (
            {"rank_pattern": {"up_proj": "2"}},
            "`rank_pattern` must map names or regular expressions to integers above 0, got {'up_proj': '2'}",
        ),
        (
            {"alpha_pattern": {"(": 2}},
            "`alpha_pattern` must map names or regular expressions to finite numbers, got {'(': 2}",
        ),
        ({"use_rslora": "yes"}, "`use_rslora` must be true or false, got 'yes'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
    ],
)
def test_configs_that_are_not_a_plain_lora(
    config: dict[str, Any], part: str, limits: Any, tmp_path: Path
) -> None:
    write(tmp_path, half("A", 2, 64) | half("B", 64, 2), **({"r": 2, "target_modules": ["up_proj"]} | config))
    with pytest.raises(ValueError, match="does not fit") as caught:
        read_adapter(tmp_path, limits)
    assert part in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_numbers_that_are_not_finite(value: float, limits: Any, tmp_path: Path) -> None:
    """3e38 times the scale is too large."""
    tensors = half("A", 2, 64) | half("B", 64, 2)
    tensors[f"{LAYER}mlp.up_proj.lora_B.weight"][3, 1] = value
    write(tmp_path, tensors, r=2)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj must have finite values in float32"):
        read_adapter(tmp_path, limits)


def test_files_that_are_no_adapter(limits: Any, tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(ValueError, match="can't be read") as caught:
            read_adapter(tmp_path / "adapter", limits)
        return str(caught.value)

    assert "must contain adapter_config.json, which PEFT writes: No such file" in message()
    (tmp_path / "adapter").mkdir()
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text("[1")
    assert "is not JSON" in message()
    file.write_text("[1]")
    assert "adapter_config.json must be a JSON object, got a list" in message()
    file.write_text(json.dumps(CONFIG | {"r": 2}))
    assert "adapter_model.safetensors" in message()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"\x00" * 40)
    assert "adapter_model.safetensors" in message()
    write(tmp_path / "adapter", {}, r=2)
    with pytest.raises(ValueError, match="must contain lora_A and lora_B of linear layers, got no tensors"):
        read_adapter(tmp_path / "adapter", limits)


def test_soft_prompts(limits: Any, tmp_path: Path) -> None:
    read = read_adapter(ADAPTERS / "soft_prompt", limits)
    assert read.prompt is not None
    assert read.prompt.shape == (5, 64)
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}
    for tensors, more, part in (
        (
            {"prompt_embeddings": np.ones((3, 65), np.float32)},
            {},
            r"must have shape \(3, 64\), got \(3, 65\)",
        ),
        (
            {"prompt_embeddings": np.ones((2, 64), np.float32)},
            {},
            r"must have shape \(3, 64\), got \(2, 64\)",
        ),
        ({"prompt_embeddings": np.full((3, 64), np.nan, np.float32)}, {}, "must have finite values"),
        (
            {"other": np.ones((3, 64), np.float32)},
            {},
            r"the only tensor must be prompt_embeddings, got \[.other.\]",
        ),
        ({"prompt_embeddings": np.ones((200, 64), np.float32)}, {"num_virtual_tokens": 200}, r"\[1, 100\]"),
        (
            {"prompt_embeddings": np.ones((3, 64), np.float32)},
            {"num_transformer_submodules": 2},
            "must be 1",
        ),
    ):
        write(tmp_path, tensors, **(config | more))
        with pytest.raises(ValueError, match=part):
            read_adapter(tmp_path, limits)
    with pytest.raises(ValueError, match="enable_prompt_embeds"):
        read_adapter(ADAPTERS / "soft_prompt", dataclasses.replace(limits, hidden_size=0))
