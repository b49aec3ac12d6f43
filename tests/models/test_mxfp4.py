"""MXFP4: beside the format read number by number, in parts, on devices, and saved as it was decoded."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jax_paged.models.loading.stored_tensors import read_headers
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid
from jax_paged.models.quantization.mxfp4 import decode, with_decoded
from jax_paged.models.weights import load_model, save_model

FOLDER = Path(__file__).parent / "fixtures" / "gpt_oss_mxfp4"
KEY = "model.layers.1.mlp.experts.{}"


def number(code: int) -> float:
    """Returns an E2M1 number: a sign, two bits of exponent with a bias of 1, one bit of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def read_plainly(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the kernels [G, I, O] in float64."""
    experts, outer, groups, _ = blocks.shape
    out = np.zeros((experts, outer, groups * 32))
    for place, scale in np.ndenumerate(scales):
        numbers = [number(code) for byte in blocks[place].tolist() for code in (byte & 15, byte >> 4)]
        *row, group = place
        out[*row, group * 32 : group * 32 + 32] = np.array(numbers) * (2.0 ** (int(scale) - 127))
    return out.swapaxes(1, 2)


def test_every_code_and_scale() -> None:
    blocks = np.random.default_rng(0).permutation(256 * 16).astype(np.uint8).reshape(256, 1, 16)
    scales = np.arange(256, dtype=np.uint8).reshape(256, 1)
    found = decode(blocks, scales)
    assert found.shape == (256, 32)
    want = read_plainly(blocks[:, None], scales[:, None])[:, :, 0]
    # Nothing is rounded; 6 * 2 ** 127 is too large even for float32, and the last scale stands for NaN.
    with np.errstate(over="ignore"):
        want = want.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found[:255], want[:255])
    assert not np.isinf(found[:253]).any()
    assert (np.signbit(found[:255]) == np.signbit(want[:255])).all()
    assert np.isnan(found[255]).all()


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    return load_file(FOLDER / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_decoded_bit_by_bit(stored: dict[str, np.ndarray], dtype: Any) -> None:
    model: Any = load_model(FOLDER, dtype).model
    experts = model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        key = KEY.format(name)
        want = read_plainly(stored[f"{key}_blocks"], stored[f"{key}_scales"])
        found = np.asarray(getattr(experts, name)[...])
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype(np.float64), want)
        assert len(np.unique(want)) > 16


def test_parts_are_those_of_the_whole(stored: dict[str, np.ndarray]) -> None:
    tensor = with_decoded(read_headers(FOLDER))[KEY.format("down_proj")]
    whole, rng = tensor.read(), np.random.default_rng(0)
    assert tensor.shape == whole.shape == (4, 64, 32)
    for _ in range(20):
        columns = []
        for n in whole.shape:
            first = int(rng.integers(n))
            columns.append(np.arange(first, int(rng.integers(first, n)) + 1))
        np.testing.assert_array_equal(tensor.read_columns(columns), whole[np.ix_(*columns)])


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_devices_have_parts_of_the_decoded_weights(size: int, *, by_expert: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:size]), (TENSOR,))
    models: list[Any] = [load_model(FOLDER, grid=grid).model for grid in (None, DeviceGrid(mesh, by_expert))]
    whole, divided = (model.layers[0].mlp.experts for model in models)
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        a, b = getattr(whole, name)[...], getattr(divided, name)[...]
        np.testing.assert_array_equal(a, b)
        part = 1 if name == "down_proj_bias" else size
        assert math.prod(b.addressable_shards[0].data.shape) * part == a.size


def test_saved_as_numbers(tmp_path: Path) -> None:
    first, config = load_model(FOLDER, "bfloat16"), json.loads((FOLDER / "config.json").read_text())
    save_model(first.model, tmp_path, config)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" in config
    again = load_model(tmp_path)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m.model)) for m in (first, again)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors[KEY.format("down_proj_scales")]
    key = KEY.format("gate_up_proj_blocks")
    tensors[key] = tensors[key][..., :8].copy()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="MXFP4 tensors can't be read") as error:
        load_model(folder)
    lines = sorted(line.strip() for line in str(error.value).splitlines()[1:])
    assert lines[0].startswith(
        f"{KEY.format('down_proj_scales')} must be U8 (4, 32, 2) to match the blocks, got nothing"
    )
    assert lines[1].startswith(f"{key} must be ")
