"""What is encoded and what is kept, beside an encoder that is a function of NumPy's."""

from typing import Any

import numpy as np
import pytest
from helpers.steps import make_output, make_row, new_sequence

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.request import PlaceholderData
from jax_paged.models.image_inputs import Tile
from jax_paged.worker.batch_builder import BatchBuilder
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.features.multimodal.image_encoder import EncodeImagesProgram, ImageEncoder
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.step_features import StepFields
from jax_paged.worker.step_rows import plan_logits_rows


class Encoder:
    """Notes how many tiles each call has; the vector of a tile is its first pixel, twice scaled."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, program: EncodeImagesProgram, weights: Any, *args: np.ndarray) -> np.ndarray:
        tiles, scale, offset = args
        assert len(tiles) == len(scale) == len(offset) == program.num_tiles
        self.sizes.append(program.num_tiles)
        values = tiles[:, 0, 0, 0] * scale[:, 0] + offset[:, 0]
        return np.broadcast_to(values[:, None, None], (len(tiles), 3, 2)).astype(np.float32)


class Batch:
    """Batch slots in which all that is needed is missing."""

    def __init__(self, embeds: dict[int, dict[int, np.ndarray]]) -> None:
        self.features = self
        self.embeds = embeds

    def missing_placeholder_data(
        self, needed: list[tuple[int, PlaceholderData]]
    ) -> list[tuple[int, PlaceholderData]]:
        return needed


def needs(batch_slot: int, *values: int) -> list[tuple[int, PlaceholderData]]:
    one, half = np.full(3, 0.5, np.float32), np.full(3, 1.0, np.float32)
    tiles = [Tile(np.full((3, 2, 2), value, np.uint8), one, half) for value in values]
    return [
        (batch_slot, PlaceholderData(5 * i, 5 * i + 3, str(t.pixels[0, 0, 0]), t))
        for i, t in enumerate(tiles)
    ]


def vectors(batch: Batch) -> dict[int, dict[int, float]]:
    return {
        batch_slot: {i: float(x[0, 0]) for i, x in given.items()}
        for batch_slot, given in batch.features.embeds.items()
    }


def test_each_tile_is_encoded_once() -> None:
    run, encoder, batch = Encoder(), ImageEncoder(10**6), Batch(embeds={})
    needed: Any = needs(0, *range(6)) + needs(1, 3, 3, 9)
    encoder.encode(run, [], needed, batch)
    assert run.sizes == [4, 4]  # of seven tiles; the last one pads
    assert vectors(batch)[0] == {5 * i: i * 0.5 + 1 for i in range(6)}
    assert vectors(batch)[1] == {0: 2.5, 5: 2.5, 10: 5.5}
    encoder.encode(run, [], needed, batch)
    assert run.sizes == [4, 4]
    encoder.encode(run, [], needs(2, 77), batch)  # pyright: ignore[reportArgumentType]
    assert run.sizes == [4, 4, 1]
    encoder.clear()
    encoder.encode(run, [], needs(2, 77), batch)  # pyright: ignore[reportArgumentType]
    assert run.sizes == [4, 4, 1, 1]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_tile_that_fails_concerns_its_own_sequences_only(batch_invariant: bool) -> None:
    run, batch = Encoder(), Batch(embeds={})

    def fail(program: EncodeImagesProgram, weights: Any, *args: np.ndarray) -> np.ndarray:
        if (args[0] == 66).any():
            raise RuntimeError("no memory" + 1000 * "!")
        return run(program, weights, *args)

    encoder = ImageEncoder(10**6, batch_invariant=batch_invariant)
    needed: Any = needs(0, 1, 2) + needs(1, 3, 66) + needs(2, 66) + needs(3, 4, 5)
    errors = encoder.encode(fail, [], needed, batch)
    assert errors.keys() == {1, 2}
    assert all(text.startswith("an image could not be encoded: no memory!") for text in errors.values())
    assert all(len(text) < 400 for text in errors.values())
    assert vectors(batch) == {0: {0: 1.5, 5: 2.0}, 1: {0: 2.5}, 3: {0: 3.0, 5: 3.5}}
    # What has failed is tried again.
    assert not encoder.encode(run, [], needed, batch)
    assert vectors(batch)[2] == {0: 34.0}


def test_those_used_last_stay() -> None:
    run, encoder = Encoder(), ImageEncoder(2 * 3 * 2 * 4)  # room for the vectors of two tiles
    for value in (1, 2, 1, 3, 1, 2):
        encoder.encode(run, [], needs(0, value), Batch(embeds={}))  # pyright: ignore[reportArgumentType]
    assert len(run.sizes) == 4  # 2 was dropped when 3 came
    none = ImageEncoder(0)
    batch = Batch(embeds={})
    none.encode(run, [], needs(0, 1, 2, 3), batch)  # pyright: ignore[reportArgumentType]
    assert vectors(batch) == {0: {0: 1.5, 5: 2.0, 10: 2.5}}
    assert not none._cache


def test_an_invariant_engine_has_one_size() -> None:
    run = Encoder()
    encoder = ImageEncoder(10**6, batch_invariant=True)
    encoder.encode(run, [], needs(0, 1), Batch(embeds={}))  # pyright: ignore[reportArgumentType]
    assert run.sizes == [4]


def test_a_chunk_encodes_what_it_computes_and_no_more() -> None:
    batch = InputBatch(
        max_num_seqs=4,
        num_groups=1,
        max_blocks_per_seq=8,
        num_blocks=50,
        vocab_size=100,
        features=FeatureRows(4),
    )
    sizes = {"block_size": 4, "num_blocks": 50, "groups": (CacheGroup(),), "vocab_size": 100}
    features = StepFields(input_batch=batch, block_size=4, embeds_size=2)
    builder = BatchBuilder(batch, **sizes, features=features)  # pyright: ignore[reportArgumentType]
    run, encoder, bucket = Encoder(), ImageEncoder(10**6), Bucket(False, 32, 4, has_embeds=True)
    placeholder_data = tuple(s._replace(start=s.start + 3, stop=s.stop + 3) for _, s in needs(0, 8, 20))
    ids = list(range(20))
    expected = np.zeros((20, 2))
    expected[3:6], expected[8:11] = 5, 11
    new = new_sequence(1, ids, tables=[[1, 2, 3, 4, 5]], placeholder_data=placeholder_data)
    beside = new_sequence(2, ids, tables=[[6, 7, 8, 9, 10]])
    for (start, stop), num_calls in zip(
        ((0, 2), (2, 5), (5, 10), (10, 12), (12, 20)), (0, 1, 2, 2, 2), strict=True
    ):
        rows = [make_row(2, start, ids[start:stop]), make_row(1, start, ids[start:stop])]
        output = make_output(rows, new=[new, beside] if start == 0 else [])
        batch.update(output)
        encoder.encode(run, [], output, batch)
        assert len(run.sizes) == num_calls
        has_some = bool(expected[start:stop].any())
        assert batch.features.has_embeds(output) == has_some
        inputs, n = builder.build(output, plan_logits_rows(output), bucket), stop - start
        assert inputs.embeds is not None
        assert not inputs.embeds[:n].any()
        assert np.array_equal(inputs.embeds[n : 2 * n], expected[start:stop])
        has_embeds = inputs.fields["has_embeds"]
        assert has_embeds.tolist() == [0] * n + expected[start:stop].any(axis=1).tolist() + [0] * (32 - 2 * n)
    batch.update(make_output(released=[1, 2]))
    batch.check_integrity()
