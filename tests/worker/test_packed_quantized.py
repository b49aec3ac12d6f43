"""Models whose quantized weights are packed: against the same models in XLA, and what they keep in memory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_paged import EngineArgs
from jax_paged.models.layers import Embedding, Linear
from jax_paged.models.quantization.online import quantize
from jax_paged.models.quantization.packed_weight import PackedWeight
from jax_paged.models.quantization.quantize import kernel_places, quantize_model
from jax_paged.models.quantization.quantized_linear import QuantizationScheme, QuantizedWeight
from jax_paged.models.weights import load_model
from jax_paged.pallas_kernels import native
from jax_paged.worker.loading.mesh import Packing, choose_packing
from jax_paged.worker.loading.weights import packed_quantized

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
pytestmark = pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")


def quantized(name: str) -> nnx.Module:
    """A model whose linear maps, experts and embedding table have 8 bits."""
    model = quantize_model(load_model(FIXTURES / name, "float32").model, "int8")
    table = model.embed_tokens
    assert isinstance(table, Embedding)
    if not isinstance(table.embedding, QuantizedWeight):  # a tied table is quantized with the model
        arrays, shape = quantize(table.embedding[...].T, "int8"), table.embedding.shape[::-1]
        scheme = QuantizationScheme.online("int8", shape[0])
        table.embedding = QuantizedWeight(scheme, shape, (None, None), arrays)
    return model


@pytest.mark.parametrize("name", ["gqa2_tied", "mixtral"])
def test_packed_models_have_the_same_outputs(name: str) -> None:
    model = quantized(name)
    packed = packed_quantized(model, in_place=False)
    kernels = [place.kernel for place in kernel_places(packed) if isinstance(place.kernel, PackedWeight)]
    assert kernels
    assert not any(isinstance(place.kernel, QuantizedWeight) for place in kernel_places(packed))
    assert not any(isinstance(place.kernel, PackedWeight) for place in kernel_places(model))
    tokens = jnp.arange(12)[None] % 50
    logits, expected = (np.asarray(nnx.jit(lambda m, t: m(t))(m, tokens)) for m in (packed, model))
    # Two float32 sums of n terms in other orders differ by about sqrt(n) roundings of 2**-24. Logits depend
    # on about ten of them in each of at most four layers, with n at most 256.
    tolerance = 2 * 10 * 4 * 256**0.5 * 2**-24
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_maps_with_one_input_share_a_weight_and_a_product() -> None:
    packed = packed_quantized(quantized("gqa2_tied"), in_place=True)
    attention = packed.layers[0].self_attn
    maps = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert len({id(m.kernel) for m in maps}) == 1
    graph, state = nnx.split(packed)
    step = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    program = step.lower(state, jnp.zeros((1, 3), jnp.int32)).compile().as_text()
    products = program.count('custom_call_target="jax_paged_multiply_quantized"')
    # q, k and v; o; gate and up; down; and the head.
    assert products == 4 * len(packed.layers) + 1


def test_packing_in_place_keeps_no_copy() -> None:
    model = quantized("mixtral")
    before = jax.tree.leaves(
        [p.kernel.arrays for p in kernel_places(model) if isinstance(p.kernel, QuantizedWeight)]
    )
    packed = packed_quantized(model, in_place=True)
    assert packed is model
    assert all(array.is_deleted() for array in before)
    assert not any(array.is_deleted() for array in jax.tree.leaves(nnx.state(packed)))


def test_groups_that_are_too_small_stay_as_they_are() -> None:
    model = quantized("gqa2_tied")
    linear = next(m for _, m in nnx.iter_modules(model) if isinstance(m, Linear))
    kernel = linear.kernel
    assert isinstance(kernel, QuantizedWeight)
    rows, columns = kernel.shape
    scheme = QuantizationScheme("int8", 4, "int8")
    arrays = kernel.arrays._replace(scales=jnp.ones((rows // 4, columns)))
    linear.kernel = QuantizedWeight(scheme, kernel.shape, kernel.split, arrays)
    Linear.pack_quantized([linear])
    assert isinstance(linear.kernel, QuantizedWeight)


def test_without_the_library_xla_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = EngineArgs(model="pagelet", matmul_backend="auto")
    assert choose_packing(args, "xla", is_quantized=True) == Packing(floats=False, quantized=True)
    by_xla = EngineArgs(model="pagelet", matmul_backend="xla")
    assert choose_packing(by_xla, "xla", is_quantized=True) == Packing(floats=False, quantized=False)
    assert not caplog.messages
    monkeypatch.setattr(native, "_load", lambda: "it was not compiled")
    for is_quantized, num_warnings in ((False, 0), (True, 1)):
        assert choose_packing(args, "xla", is_quantized=is_quantized) == Packing(
            floats=False, quantized=False
        )
        assert len(caplog.messages) == num_warnings
    assert "packed ones are faster, but the native backend can't be used: it was not compiled" in caplog.text
