"""The encoder of images of Idefics3 and SmolVLM: positions of patches, beside transformers."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np

from jax_paged.models.families.idefics3 import Idefics3ForConditionalGeneration
from jax_paged.models.families.siglip import SiglipConfig, position_ids

POSITIONS = json.loads((Path(__file__).parent / "siglip_positions.json").read_text())
ROUNDED = [19, 25, 29, 31, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62]


def test_positions_equal_transformers() -> None:
    """For images of 1 to 64 patches on a side, those with rounding errors included."""
    assert len(POSITIONS) == 64
    for side, expected in POSITIONS.items():
        n = int(side)
        ids = position_ids(n).reshape(n, n)
        assert ids[0].tolist() == expected["row"], side
        assert ids[:, 0].tolist() == expected["column"], side
        assert (ids == ids[:1] + ids[:, :1]).all(), side
        assert np.array_equal(ids.reshape(-1), np.arange(n**2)) == (n not in ROUNDED), side


def test_the_encoder_gets_these_positions() -> None:
    model: Any = MagicMock()
    model.config.vision = SiglipConfig(image_size=38, patch_size=2)
    model.embed_tokens.dtype = jnp.float32
    tiles, zeros = jnp.zeros((2, 3, 38, 38), jnp.uint8), jnp.zeros((2, 3))
    Idefics3ForConditionalGeneration.encode_images(model, tiles, zeros, zeros)
    _, context = model.vision.call_args.args
    assert np.asarray(context.positions).tolist() == [position_ids(19).tolist()] * 2
