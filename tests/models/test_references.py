"""Every family by its dense call: against transformers (make_references.py), gradients, bfloat16, saving."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_paged.models.encoder_decoder import EncoderDecoderLM
from jax_paged.models.registry import MODELS
from jax_paged.models.weights import as_loaded_model, load_model, save_model
from jax_paged.pallas_kernels.native import products
from jax_paged.worker.loading.weights import packed

FIXTURES = sorted((Path(__file__).parent / "fixtures").iterdir())
MAX_LEN = 128
# Float32 sums in another order move the log-probabilities of these models by up to 2e-5.
TOLERANCE = 1e-4
# Of these relatives of Llama one fixture is enough for every day; they share most of their modules.
ONE_A_DAY = {
    *("ApertusForCausalLM", "ArceeForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM"),
    *("Ernie4_5ForCausalLM", "Exaone4ForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM"),
    *("GraniteForCausalLM", "HeliumForCausalLM", "HunYuanDenseV1ForCausalLM", "MinistralForCausalLM"),
    *("Ministral3ForCausalLM", "NemotronForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    *("PhiForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM", "StableLmForCausalLM"),
    "Starcoder2ForCausalLM",
}
# Some of their layers do not rotate queries and keys, which have biases in fixtures.
WITHOUT_POSITIONS = {"Cohere2ForCausalLM", "SmolLM3ForCausalLM"}
# Families all of whose modules another family has too; their gradients are the long tail.
RELATIVES = (ONE_A_DAY - {"ApertusForCausalLM", "StableLmForCausalLM"}) | {
    "Gemma2ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
}
PROBLEM = products.problem(jnp.dtype("float32"))
load = functools.cache(load_model)  # no test here modifies a model


def hf_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def by_architecture() -> dict[str, list[Path]]:
    folders: dict[str, list[Path]] = {name: [] for name in MODELS}
    for folder in FIXTURES:
        folders[hf_config(folder)["architectures"][0]].append(folder)
    return folders


@nnx.jit
def dense_logprobs(model: Any, tokens: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(model(tokens))


@nnx.jit
def encoder_decoder_logprobs(model: Any, prompts: jax.Array, lens: jax.Array, tokens: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(model(prompts, lens, tokens))


def reference_logprobs(model: Any, cases: list[dict[str, Any]]) -> list[np.ndarray]:
    """Returns our log-probabilities [24, V] of each case's output tokens, given those before."""
    prompts, outputs = ([c[name] for c in cases] for name in ("prompt_token_ids", "token_ids"))

    def padded(texts: list[list[int]]) -> jax.Array:
        tokens = np.zeros((len(texts), MAX_LEN), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        return jnp.asarray(tokens)

    lens = np.array([len(p) for p in prompts])
    if isinstance(model, EncoderDecoderLM):
        firsts = np.zeros_like(lens)
        begun = padded([[model.config.decoder_start_token_id, *output] for output in outputs])
        logprobs = encoder_decoder_logprobs(model, padded(prompts), jnp.asarray(lens), begun)
    else:
        firsts = lens - 1
        logprobs = dense_logprobs(model, padded([p + o for p, o in zip(prompts, outputs, strict=True)]))
    return [rows[first : first + 24] for rows, first in zip(np.asarray(logprobs), firsts, strict=True)]


def compare(model: Any, folder: Path) -> tuple[bool, float]:
    """Returns whether all greedy tokens equal the references', and the largest error of a log-probability.

    Every token of a reference must be the most likely one after those before it, so that greedy decoding
    gives the reference token for token.
    """
    cases = json.loads((folder / "reference.json").read_text())["cases"]
    assert {1, 16, 17, 32, 100} <= {len(c["prompt_token_ids"]) for c in cases}
    equal, error = True, 0.0
    for rows, case in zip(reference_logprobs(model, cases), cases, strict=True):
        equal &= rows.argmax(1).tolist() == case["token_ids"]
        ours = np.take_along_axis(rows, np.array(case["top_token_ids"]), axis=1)
        error = max(error, np.abs(ours - case["top_logprobs"]).max())
        error = max(error, np.abs(ours[:, 0] - case["logprobs"]).max())
    return equal, error


# One fixture of each kind of architecture, for `make test`.
QUICK = {
    *(
        "deepseek_v3_groups",
        "gemma2",
        "gemma4_shared",
        "gpt_oss_mxfp4",
        "gqa2_tied",
        "lfm2",
        "mixtral",
        "opt",
    ),
    *("phi3_longrope", "qwen3_5", "qwen3_tied", "t5_tied"),
}


def fixtures() -> list[Any]:
    often = {folders[-1] for folders in by_architecture().values()}
    rare = {f for name in ONE_A_DAY for f in by_architecture()[name]} - often
    assert {f.name for f in FIXTURES} >= QUICK

    def mark(folder: Path) -> Any:
        return pytest.mark.slow if folder in rare else () if folder.name in QUICK else pytest.mark.thorough

    return [pytest.param(f, id=f.name, marks=mark(f)) for f in FIXTURES]


@pytest.mark.parametrize("folder", fixtures())
def test_equals_transformers(folder: Path) -> None:
    equal, error = compare(load(folder).model, folder)
    assert equal
    assert error < TOLERANCE
    assert sum(f.stat().st_size for f in folder.iterdir()) < 500_000


@pytest.mark.slow
@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
@pytest.mark.parametrize("folder", FIXTURES, ids=lambda f: f.name)
def test_packed_kernels_equal_transformers(folder: Path) -> None:
    equal, error = compare(packed(load(folder).model, in_place=False), folder)
    assert equal
    assert error < TOLERANCE


def test_every_family_has_two_fixtures() -> None:
    assert {name for name, folders in by_architecture().items() if len(folders) < 2} == set()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "architecture", [pytest.param(m, marks=[pytest.mark.slow] if m in RELATIVES else []) for m in MODELS]
)
def test_gradient_and_bfloat16(architecture: str) -> None:
    """With each family's last fixture: jax.grad works on the model, and bfloat16 is close to float32."""
    folder = by_architecture()[architecture][-1]
    exact = load(folder).model
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 32)))

    def logprob(model: Any) -> jax.Array:
        prompt = (tokens, jnp.array([32, 20])) if isinstance(model, EncoderDecoderLM) else ()
        logprobs = jax.nn.log_softmax(model(*prompt, tokens[:, :-1]))
        return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    value, gradient = nnx.jit(nnx.value_and_grad(logprob))(exact)
    for path, leaf in nnx.to_flat_state(gradient):
        size = float(jnp.abs(leaf[...]).max())
        assert np.isfinite(size), path
        # A norm follows the scale of the last layer. What chooses experts only has no gradient. A bias of
        # keys that no position rotates adds the same to all scores of a query.
        has_no_effect = (
            path[-1] == "e_score_correction_bias"
            or (path[-2:] == ("k_proj", "bias") and architecture in WITHOUT_POSITIONS)
            or (path[-1] == "layer_scalar" and path[-2] == len(exact.layers) - 1)
        )
        assert size > 1e-6 or has_no_effect, path

    rounded = load_model(folder, "bfloat16")
    kept = {p[-1]: x.dtype for p, x in nnx.to_flat_state(nnx.state(rounded.model)) if x.dtype != "bfloat16"}
    assert kept == ({"e_score_correction_bias": "float32"} if architecture.startswith("DeepseekV3") else {})
    assert as_loaded_model(rounded.model, None).dtype == jnp.dtype("bfloat16")
    # bfloat16 rounds by 2^-9; over two layers the errors stay within a few per cent of a log-probability.
    assert float(nnx.jit(logprob)(rounded.model)) == pytest.approx(float(value), rel=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", MODELS)
def test_saved_as_it_was_loaded(architecture: str, tmp_path: Path) -> None:
    folder = by_architecture()[architecture][-1]
    first = load(folder)
    save_model(first.model, tmp_path, hf_config(folder))
    again = load_model(tmp_path)
    assert nnx.graphdef(first.model) == nnx.graphdef(again.model)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m.model)) for m in (first, again)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_texts_longer_than_the_model_was_made_for() -> None:
    model = load(FIXTURES[0]).model
    with pytest.raises(ValueError, match="the length of `tokens` must be at most 512, got 513"):
        model(jnp.zeros((1, 513), jnp.int32))
