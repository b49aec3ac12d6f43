"""Weights that change while a model is served: exchanged, or noticed; nothing of the old ones is shared."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.real_model import TOLERANCE
from safetensors.numpy import load_file

from jax_paged import LLM, SamplingParams
from jax_paged.lab.recording import replay
from jax_paged.models.weights import load_model, save_model
from jax_paged.pallas_kernels.native import products

pytestmark = pytest.mark.thorough

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
PROMPT = np.random.default_rng(0).integers(8, 300, 21).tolist()
OTHER = np.random.default_rng(1).integers(8, 300, 9).tolist()
ONEDNN = products.problem(jnp.dtype("float32")) is None
SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "num_gpu_blocks_override": 64,
    "num_scheduler_steps": 1,
    "async_scheduling": False,
}


def make(model: Any, **settings: Any) -> LLM:
    return LLM.from_module(model, **(SETTINGS | settings))


def train(model: Any) -> None:
    """One step of gradient descent, as a user's loop does it: the module gets new arrays."""
    optimizer = nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)
    tokens = jnp.asarray([PROMPT])

    def loss(model: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens)[:, :-1], tokens[:, 1:]).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def generate(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> Any:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def values(output: Any) -> list[tuple[int, float]]:
    """Returns the tokens of an output with their log-probabilities, which tell weights apart to the bit."""
    text = output.outputs[0]
    return [(t, at[t].logprob) for t, at in zip(text.token_ids, text.logprobs, strict=True)]


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return load_model(checkpoint, "float32").model


@pytest.fixture(
    scope="module",
    params=["xla", pytest.param("onednn", marks=pytest.mark.skipif(not ONEDNN, reason="there is no oneDNN"))],
)
def served(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[tuple[LLM, Any, LLM]]:
    """An engine, other weights for it, and an engine that never had any but these, and shares no prefixes."""
    other = load_model(checkpoint, "float32").model
    train(other)
    settings = SETTINGS | {"matmul_backend": request.param}
    with (
        LLM(str(checkpoint), dtype="float32", **settings) as llm,
        LLM.from_module(other, enable_prefix_caching=False, **settings) as fresh,
    ):
        for made in (llm, fresh):
            made.llm_engine.executor.wait_until_compiled()
        yield llm, other, fresh


def test_a_training_step_under_a_served_module_is_an_error_until_it_is_handed_over(model: Any) -> None:
    with make(model) as llm:
        llm.llm_engine.executor.wait_until_compiled()
        before, num_traces = values(generate(llm)), llm.llm_engine.executor.runner.compiled.num_traces
        train(model)
        with pytest.raises(RuntimeError, match=r"call update_weights\(model\)"):
            generate(llm)
        with pytest.raises(RuntimeError, match="call update_weights"):
            llm.llm_engine.add_request("a", PROMPT, GREEDY)
        llm.update_weights(model)
        output = generate(llm)
        assert output.num_cached_tokens == 0
        after = values(output)
        assert after != before
        assert llm.llm_engine.executor.runner.compiled.num_traces == num_traces
        with make(model) as own:
            own.llm_engine.executor.wait_until_compiled()
            assert values(generate(own)) == after


@pytest.mark.quick
def test_a_training_step_between_two_steps_of_a_request_is_an_error_and_no_harm(model: Any) -> None:
    with make(model) as llm:
        engine = llm.llm_engine
        engine.add_request("a", PROMPT, GREEDY)
        engine.step()
        train(model)
        with pytest.raises(RuntimeError, match="call update_weights"):
            engine.step()
        llm.update_weights(model, running="recompute")
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert len(outputs[-1].outputs[0].token_ids) == GREEDY.max_tokens


@pytest.mark.parametrize("change", ["a module", "a weight"])
def test_parts_of_a_served_module_that_are_replaced_are_noticed(
    model: Any, checkpoint: Path, change: str
) -> None:
    other = load_model(checkpoint, "float32").model
    with make(model) as llm:
        if change == "a module":
            model.layers[1].mlp = other.layers[1].mlp
        else:
            model.norm.scale = nnx.Param(model.norm.scale[...])
        with pytest.raises(RuntimeError, match="call update_weights"):
            generate(llm)


def test_a_function_that_only_reads_the_module_is_no_change(model: Any) -> None:
    with make(model) as llm:
        before = values(generate(llm))
        nnx.jit(lambda model: model(jnp.asarray([PROMPT])))(model)
        llm.update_weights(model)
        nnx.jit(lambda model: model(jnp.asarray([PROMPT])))(model)
        assert values(generate(llm)) == before


@pytest.mark.quick
def test_weights_that_were_donated_are_noticed(model: Any) -> None:
    state = nnx.state(model)
    with make(model, matmul_backend="xla") as llm:
        llm.update_weights(state)
        state = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)(state)
        with pytest.raises(RuntimeError, match="were deleted"):
            generate(llm)
        llm.update_weights(state)
        generate(llm)


def forms(model: Any, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Returns the weights of a model in each form that update_weights takes."""
    save_model(model, folder, json.loads((checkpoint / "config.json").read_text()))
    tensors = load_file(folder / "model.safetensors")
    return {
        "module": model,
        "state": nnx.state(model),
        "params": nnx.state(model, nnx.Param),
        "names": tensors,
        "pairs": [(name, jnp.asarray(x)) for name, x in tensors.items()],
        "folder": folder,
        "path": str(folder),
    }


def test_every_form_of_weights_is_served(
    served: tuple[LLM, Any, LLM], checkpoint: Path, tmp_path: Path
) -> None:
    llm, other, fresh = served
    want = values(generate(fresh))
    for name, weights in forms(other, checkpoint, tmp_path).items():
        llm.update_weights(checkpoint)
        assert values(generate(llm)) != want, name
        llm.update_weights(weights)
        output = generate(llm)
        assert (values(output), output.num_cached_tokens) == (want, 0), name


def test_a_changed_numpy_array_changes_nothing(served: tuple[LLM, Any, LLM], checkpoint: Path) -> None:
    llm, _, _ = served
    tensors = load_file(checkpoint / "model.safetensors")
    llm.update_weights(tensors)
    before = values(generate(llm, OTHER))
    for x in tensors.values():
        x[:] = 0
    llm.update_weights(llm.llm_engine.config.model_name)
    assert values(generate(llm, OTHER)) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=np.zeros(3)), "extra is unexpected"),
        (
            lambda t: t.update({"lm_head.weight": np.zeros((3, 4), np.float32)}),
            r"must have shape \(384, 64\), got \(3, 4\)",
        ),
        (lambda t: t.update({"model.norm.weight": np.ones(64)}), "must be of type float32, got float64"),
        (
            lambda t: t.update({"model.norm.weight": jnp.ones(64, jnp.bfloat16)}),
            "must be of type float32, got bfloat16",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    served: tuple[LLM, Any, LLM], checkpoint: Path, change: Any, message: str
) -> None:
    llm, _, _ = served
    before = values(generate(llm))
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    with pytest.raises(ValueError, match=message):
        llm.update_weights(tensors)
    output = generate(llm)
    assert [t for t, _ in values(output)] == [t for t, _ in before]
    assert output.num_cached_tokens > 0


def test_a_model_of_another_shape_is_an_error(served: tuple[LLM, Any, LLM]) -> None:
    with pytest.raises(ValueError, match=r"a different config:\n  `vocab_size` must be 384, got 2048\n"):
        served[0].update_weights("pagelet")


def test_a_pinned_prefix_is_computed_again(served: tuple[LLM, Any, LLM], checkpoint: Path) -> None:
    llm, other, fresh = served
    llm.update_weights(checkpoint)
    name = llm.pin_prefix(PROMPT[:16])
    llm.update_weights(other)
    output = generate(llm)
    assert output.num_cached_tokens == 16
    # Pinned and computed in chunks of eight, as a fresh engine computes them.
    assert values(output) == values(generate(fresh))
    llm.llm_engine.add_request("a", OTHER, GREEDY)
    with pytest.raises(RuntimeError, match=f"the prefixes '{name}' are pinned"):
        llm.update_weights(other, running="recompute")
    llm.llm_engine.abort_request("a")
    llm.unpin_prefix(name)


def finish(llm: LLM) -> dict[str, Any]:
    outputs = {}
    while llm.llm_engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
    return outputs


def test_running_requests_are_an_error_unless_said_otherwise(served: tuple[LLM, Any, LLM]) -> None:
    llm, other, _ = served
    llm.llm_engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="requests are running"):
        llm.update_weights(other)
    with pytest.raises(ValueError, match=r"`running` must be .*got 'ignore'"):
        llm.update_weights(other, running="ignore")  # pyright: ignore[reportArgumentType]
    finish(llm)


@pytest.mark.parametrize("running", ["recompute", "keep"])
def test_running_requests_go_on_with_other_weights(
    served: tuple[LLM, Any, LLM], checkpoint: Path, running: Any
) -> None:
    llm, other, fresh = served
    llm.update_weights(checkpoint)
    old = values(generate(llm))
    llm.update_weights(checkpoint)  # nothing is cached now
    llm.llm_engine.add_request("a", PROMPT, GREEDY)
    for _ in range(5):  # three chunks, the last of which draws a token; two more tokens
        llm.llm_engine.step()
    llm.update_weights(other, running=running)
    got = values(finish(llm)["a"])
    assert got[:3] == old[:3]
    text = PROMPT + [t for t, _ in got[:3]]
    rest = GREEDY.clone()
    rest.max_tokens = 5
    want = values(generate(fresh, text, rest))
    if running == "recompute":
        assert got[3:] == want
    else:
        assert got[3:] not in (want, old[3:])
    # Nobody is given what the request has computed with the old weights, or with both.
    text = PROMPT + [t for t, _ in got]
    output, want = generate(llm, text), values(generate(fresh, text))
    assert (output.num_cached_tokens == 0) == (running == "keep")
    if running == "keep":
        assert values(output) == want
    else:  # cached prefixes leave other chunks to compute, so sums have another order
        assert [t for t, _ in values(output)] == [t for t, _ in want]
        np.testing.assert_allclose([x for _, x in values(output)], [x for _, x in want], atol=TOLERANCE)


def dense_logprobs(model: Any, output: Any) -> np.ndarray:
    """Returns the log-probabilities that the model, called densely, gives the tokens of an output."""
    prompt, drawn = output.prompt_token_ids, list(output.outputs[0].token_ids)
    logits = model(jnp.asarray([prompt + drawn]))[0, len(prompt) - 1 : -1]
    return np.asarray(jax.nn.log_softmax(logits))[np.arange(len(drawn)), drawn]


def serve_ten_versions(llm: LLM, model: Any) -> None:
    """Trains a model ten times; after each, an engine that goes on running has to say what the model does."""
    runner = llm.llm_engine.executor.runner  # pyright: ignore[reportAttributeAccessIssue]
    num_traces, first = runner.compiled.num_traces, llm.llm_engine._core.num_weight_updates
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for i in range(10):
        if not llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.add_request("runs on", OTHER, long)
            llm.llm_engine.step()
        train(model)
        llm.update_weights(model, running=("keep", "recompute")[i % 2])
        llm.llm_engine.step()
        output = generate(llm)
        assert (output.num_cached_tokens, output.weight_version) == (0, str(first + i + 1))
        got = [logprob for _, logprob in values(output)]
        np.testing.assert_allclose(got, dense_logprobs(model, output), atol=TOLERANCE)
        assert generate(llm).num_cached_tokens > 0
    assert runner.compiled.num_traces == num_traces


def test_ten_versions_in_a_running_engine(served: tuple[LLM, Any, LLM], model: Any) -> None:
    llm, _, _ = served
    llm.update_weights(model)
    serve_ten_versions(llm, model)
    finish(llm)


def test_a_prefix_of_older_weights_would_be_noticed(
    served: tuple[LLM, Any, LLM], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _, _ = served
    llm.update_weights(model)
    before = generate(llm)
    with monkeypatch.context() as patch:
        patch.setattr(type(llm.llm_engine.scheduler.block_manager), "forget_prefixes", lambda self: None)
        with pytest.raises(AssertionError):
            serve_ten_versions(llm, model)
        finish(llm)
        # Not only are cached tokens counted: what comes of them is wrong.
        llm.update_weights(model)
        stale = generate(llm)
    assert stale.num_cached_tokens > 0
    error = np.abs(dense_logprobs(model, stale) - [logprob for _, logprob in values(stale)]).max()
    assert error > 10 * TOLERANCE
    assert values(before) != values(stale)
    llm.update_weights(model)
    output = generate(llm)
    got = [logprob for _, logprob in values(output)]
    np.testing.assert_allclose(got, dense_logprobs(model, output), atol=TOLERANCE)


def test_outputs_name_the_weights_that_drew_them(served: tuple[LLM, Any, LLM], model: Any) -> None:
    llm, other, _ = served
    llm.update_weights(model, weight_version="first")
    llm.llm_engine.add_request("a", PROMPT, GREEDY)
    for _ in range(4):
        llm.llm_engine.step()
    llm.update_weights(other, running="keep", weight_version="second")
    llm.llm_engine.add_request("b", OTHER, GREEDY)
    outputs = finish(llm)
    assert outputs["a"].weight_versions == ("first", "second")
    assert outputs["a"].weight_version == outputs["b"].weight_version == "second"
    assert outputs["b"].weight_versions == ("second",)
    with pytest.raises(ValueError, match=r"`weight_version` must be None or a non-empty string.*got ''"):
        llm.update_weights(other, weight_version="")
    llm.update_weights(other)
    output = generate(llm)
    assert output.weight_version == str(llm.llm_engine._core.num_weight_updates)


def test_weights_of_older_versions_take_no_memory(
    served: tuple[LLM, Any, LLM], checkpoint: Path, model: Any
) -> None:
    llm, _, _ = served
    tensors = load_file(checkpoint / "model.safetensors")
    gc.collect()
    gc.disable()  # modules are cycles: nothing may wait for the collector
    try:
        sizes = {}
        for name, weights in {"folder": checkpoint, "names": tensors, "model": model}.items():
            sizes[name] = []
            for _ in range(3):
                llm.update_weights(weights)
                # Of arrays that share their memory, each counts.
                sizes[name].append(len({x.unsafe_buffer_pointer() for x in jax.live_arrays()}))
    finally:
        gc.enable()
    for name, counts in sizes.items():
        assert counts[1:] == counts[:1] * 2, (name, counts)


def test_a_recording_goes_on_over_new_weights(served: tuple[LLM, Any, LLM], checkpoint: Path) -> None:
    llm, other, _ = served
    lines: list[str] = []
    llm.llm_engine.record(lines.append)
    generate(llm)
    llm.llm_engine.add_request("a", PROMPT, GREEDY)
    llm.llm_engine.step()
    llm.update_weights(other, running="recompute")
    finish(llm)
    llm.update_weights(checkpoint)
    generate(llm)
    assert len(replay(lines).steps) > 5


def test_an_engine_that_has_its_own_weights_frees_only_these(model: Any, checkpoint: Path) -> None:
    llm = make(model, matmul_backend="xla")
    llm.update_weights(checkpoint)
    llm.update_weights(model)
    llm.close()
    assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(model)))


def test_from_module_reads_what_lies_beside_its_tokenizer(tmp_path: Path) -> None:
    loaded = load_model(Path(__file__).parents[2] / "models" / "pagelet", "float32")
    with LLM.from_module(loaded.model, "pagelet", **SETTINGS) as llm:
        assert llm.llm_engine.config.eos_token_ids == loaded.eos_token_ids
        assert llm.get_default_sampling_params().temperature == 0
    with pytest.raises(ValueError, match=r"`dtype` must be 'auto' or 'float32'.*got 'bfloat16'"):
        make(loaded.model, dtype="bfloat16")
