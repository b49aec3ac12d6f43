"""The context of a forward pass: it reaches every module, and what it carries can change chosen rows."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array
from paged_batch import paged_batch

from jax_paged.models.encoder_decoder import EncoderDecoderLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.layers import Linear
from jax_paged.models.registry import MODELS, get_model_class
from jax_paged.models.weights import load_model

FIXTURES = Path(__file__).parent / "fixtures"
# Two texts: a dense batch as they are, a paged one when flattened.
TEXTS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 9)), jnp.int32)
LENS = [9, 9]
# These modules belong to `logits`, which has no context.
HEADS = {"lm_head", "project_out"}


def fixture_configs() -> list[Any]:
    """Returns one config.json per family, by architecture: of the fixture that has the most modules."""
    names = (
        "apertus_bias",
        "arcee_biases_yarn",
        "cohere2_own_head",
        "cohere_head_norms",
        "deepseek_v2_yarn_groups",
        "deepseek_v3_groups",
        "ernie4_5_biases",
        "exaone4_window",
        "gemma2_variants",
        "gemma3_images",
        "gemma3_old_config",
        "glm",
        "glm4",
        "gemma4_hub_images",
        "gemma4_moe_capped",
        "gpt2_variants",
        "gpt_oss",
        "granite_biases",
        "helium_tied_biases",
        "hunyuan_bias",
        "lfm2_biases_old_config",
        "llama3_tied_biases_old_config",
        "ministral3",
        "ministral_windows",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo2",
        "olmo3",
        "opt_post_norm_projected",
        "phi",
        "phi3_window",
        "qwen2_window",
        "qwen3_bias_window",
        "qwen3_moe_and_mlps",
        "qwen3_5",
        "qwen3_5_nested",
        "seed_oss_tied_biases",
        "smollm3_window",
        "stablelm_parallel_head_norms",
        "starcoder2_window",
        "t5_gated_untied",
    )
    configs = [json.loads((FIXTURES / name / "config.json").read_text()) for name in names]
    by_architecture = {config["architectures"][0]: config for config in configs}
    assert by_architecture.keys() == MODELS.keys()
    return [pytest.param(config, id=name) for name, config in by_architecture.items()]


@dataclasses.dataclass(frozen=True, eq=False)
class Recording(ForwardContext):
    """Notes the path of every module that is run."""

    log: list[str] = dataclasses.field(default_factory=list)

    def run(self, module: Module, x: Any) -> Array:
        self.log.append(self.path(module))
        return super().run(module, x)


@dataclasses.dataclass(frozen=True, eq=False)
class RowContext(ForwardContext):
    """Carries a number for every token row."""

    slots: Array = dataclasses.field(kw_only=True)


class PerRow(Module):
    """A stand-in for a Linear; adds 0.5 to the rows whose slot is 1."""

    def __init__(self, inner: Linear) -> None:
        self.inner = inner

    def forward(self, x: Array, context: ForwardContext) -> Array:
        assert isinstance(context, RowContext)
        return self.inner(x, context) + 0.5 * context.slots[..., None]


@dataclasses.dataclass(frozen=True, eq=False)
class PerRowHook(RowContext):
    """Captures what the module at `at` returns, and scales the rows whose slot is 1."""

    at: str = dataclasses.field(kw_only=True)
    kept: list[Array] = dataclasses.field(default_factory=list)

    def run(self, module: Module, x: Any) -> Array:
        y = super().run(module, x)
        if self.path(module) != self.at:
            return y
        self.kept.append(y)
        return y * (1 + 0.5 * self.slots[..., None])


def extend(context: ForwardContext, kind: type[Any], **fields: Any) -> Any:
    """Returns a context of another class with the fields of this one."""
    return kind(**{f.name: getattr(context, f.name) for f in dataclasses.fields(context)}, **fields)


def recorded(model: Any) -> dict[str, list[str]]:
    """Returns the paths of the modules that are run in each kind of pass."""
    logs: dict[str, list[str]] = {}

    def recording(kind: str, context: ForwardContext) -> Recording:
        made = extend(context, Recording)
        logs[kind] = made.log
        return made

    lens = jnp.array(LENS)
    if isinstance(model, EncoderDecoderLM):
        context = recording("encoder", model.encoder_context(TEXTS, lens))
        cross = model.cross_kv(model.encode(TEXTS, context), context)
        model.hidden(TEXTS, recording("dense", model.dense_context(TEXTS, cross, lens)))
    else:
        model.hidden(TEXTS, recording("dense", model.dense_context(TEXTS)))
    metadata, kv_cache = paged_batch(model.kv_cache_specs(), LENS, LENS)
    model.hidden(TEXTS.reshape(-1), recording("paged", model.paged_context(kv_cache, metadata)))
    return logs


@pytest.mark.thorough
@pytest.mark.parametrize("config", fixture_configs())
def test_it_reaches_every_module_in_every_pass(config: dict[str, Any]) -> None:
    _, model_class = get_model_class(config)
    shape, logs = model_class.config_class.from_hf(config), {}

    def trace() -> None:
        logs.update(recorded(model_class(shape, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))))

    jax.eval_shape(trace)  # nothing is computed
    model = nnx.eval_shape(lambda: model_class(shape, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)))
    modules = {".".join(map(str, path)): m for path, m in nnx.iter_modules(model) if isinstance(m, Module)}
    for log in logs.values():
        assert len(log) == len(set(log)), "a module is run once per pass"
    assert sorted(logs["dense"]) == sorted(logs["paged"])
    reached = set().union(*logs.values())
    assert reached | HEADS >= modules.keys() >= reached > set()
    # The path of a module is the path of its weights.
    weights = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert {f"{path}.kernel" for path in reached if isinstance(modules[path], Linear)} <= weights


def both_passes(model: Any, kind: type[Any], **fields: Any) -> Callable[[Array], tuple[Array, Array]]:
    """Returns a function from slots [2, 9] to the hidden states [2, 9, E] of the dense and the paged pass."""
    graph, state = nnx.split(model)

    @jax.jit
    def call(slots: Array) -> tuple[Array, Array]:
        model, lens = nnx.merge(graph, state), jnp.array(LENS)
        metadata, kv_cache = paged_batch(model.kv_cache_specs(), LENS, LENS)
        if isinstance(model, EncoderDecoderLM):
            context = model.encoder_context(TEXTS, lens)
            cross = model.cross_kv(model.encode(TEXTS, context), context)
            dense = model.dense_context(TEXTS, cross, lens)
            options: dict[str, Any] = {"kv_locations": metadata.kv_locations, "backend": "xla"}
            for text, mapping in zip(TEXTS, metadata.slot_mapping.reshape(2, *TEXTS.shape)[0], strict=True):
                mappings = jnp.stack([mapping, mapping])
                kv_cache = model.write_encoded(text, lens[0], kv_cache, mappings, **options)
        else:
            dense = model.dense_context(TEXTS)
        paged = model.paged_context(kv_cache, metadata)
        by_dense = model.hidden(TEXTS, extend(dense, kind, slots=slots, **fields))
        by_paged = model.hidden(TEXTS.reshape(-1), extend(paged, kind, slots=slots.reshape(-1), **fields))
        return by_dense, by_paged.reshape(by_dense.shape)

    return lambda slots: jax.tree.map(np.asarray, call(slots))


def test_a_module_reads_what_the_context_has_for_its_rows() -> None:
    """Tokens of one text get slot 1; the adapted map changes that text, and no bit of the other."""
    model = load_model(FIXTURES / "gqa2_tied").model
    model.layers[0].self_attn.q_proj = PerRow(model.layers[0].self_attn.q_proj)
    passes, slots = both_passes(model, RowContext), jnp.zeros((2, 9), jnp.int32)
    before, after = passes(slots), passes(slots.at[1].set(1))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[0], b[0])
        # Token 0 attends to itself only, whatever its query is.
        assert (np.abs(a[1, 1:] - b[1, 1:]).max(axis=-1) > 1e-3).all()
    np.testing.assert_allclose(after[1], after[0], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "at"),
    [("qwen3_moe_tied", "layers.1.mlp.experts"), ("t5_tied", "decoder.block.1.cross_attention.o")],
)
def test_a_context_changes_the_rows_of_a_module(name: str, at: str) -> None:
    """In the last layer a change to some rows stays in these rows, whichever module it is made in."""
    passes = both_passes(load_model(FIXTURES / name).model, PerRowHook, at=at)
    slots, chosen = jnp.zeros((2, 9), jnp.int32), np.zeros((2, 9), bool)
    chosen[0, [2, 5]] = chosen[1, 8] = True
    before, after = passes(slots), passes(slots + chosen)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[~chosen], b[~chosen])
        assert (np.abs(a[chosen] - b[chosen]).max(axis=-1) > 1e-3).all()
    np.testing.assert_allclose(after[1], after[0], atol=1e-4)


def test_what_a_context_captures_has_a_row_per_token() -> None:
    model, shapes = load_model(FIXTURES / "gqa2_tied").model, []

    def trace() -> None:
        metadata, kv_cache = paged_batch(model.kv_cache_specs(), LENS)
        paged = model.paged_context(kv_cache, metadata)
        for context, tokens in ((model.dense_context(TEXTS), TEXTS), (paged, TEXTS.reshape(-1))):
            hook = extend(context, PerRowHook, slots=jnp.zeros_like(tokens), at="layers.0.self_attn.v_proj")
            model.hidden(tokens, hook)
            shapes.extend(y.shape for y in hook.kept)

    jax.eval_shape(trace)
    assert shapes == [(2, 9, 16), (18, 16)]


def test_a_module_of_another_model_has_no_path() -> None:
    one, other = (load_model(FIXTURES / "gqa2_tied").model for _ in range(2))
    context = one.dense_context(TEXTS)
    assert context.path(one.layers[1].mlp.up_proj) == "layers.1.mlp.up_proj"
    with pytest.raises(AssertionError, match="Linear is not in the model of this forward context"):
        context.path(other.layers[1].mlp.up_proj)


def test_a_pass_without_an_encoder_has_no_cross_attention() -> None:
    context = load_model(FIXTURES / "gqa2_tied").model.dense_context(TEXTS)
    with pytest.raises(
        AssertionError, match="layer 0 called cross_attend in a forward pass without encoder output"
    ):
        context.cross_attend(0, jnp.zeros((2, 9, 4, 8)), scale=1.0)
