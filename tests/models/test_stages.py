"""Decoders cut into the stages of a pipeline."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.loading.weight_reading import weights_of
from jax_paged.models.parallel.stages import even_parts, split_model
from jax_paged.models.weights import outline

FIXTURES = Path(__file__).parent / "fixtures"
WHOLE = ("gemma4_hub_images", "gemma4_shared", "t5")
DECODERS = sorted(folder for folder in FIXTURES.iterdir() if not folder.name.startswith(WHOLE))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 7),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_no_other_cut_has_a_smaller_largest_part(sizes: list[int], num: int, first: int, last: int) -> None:
    num = min(num, len(sizes))

    def largest(cuts: tuple[int, ...]) -> int:
        parts = [sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(sizes)))]
        parts[0] += first
        parts[-1] += last
        return max(parts)

    parts = even_parts(sizes, num, first, last)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert len(parts) == num
    assert all(parts)
    best = min(map(largest, itertools.combinations(range(1, len(sizes)), num - 1)))
    assert largest(tuple(part.start for part in parts[1:])) == best


@pytest.mark.thorough
@pytest.mark.parametrize("folder", DECODERS, ids=lambda folder: folder.name)
def test_each_weight_is_on_one_stage_and_a_tied_table_on_two(folder: Path) -> None:
    model = outline(folder, "auto", None)
    assert isinstance(model, CausalLM)
    stages = split_model(model, 2)
    found = Counter(weight.path for stage in stages for weight in weights_of(stage))
    assert found.keys() == {weight.path for weight in weights_of(model)}
    twice = [path for path, num in found.items() if num > 1]
    is_tied = model.head is getattr(model, model.embed_path or model.pre_layer_names[0])
    assert twice == ([(model.pre_layer_names[0], "embedding")] if is_tied else [])
    assert [(stage.is_first_stage, stage.is_last_stage) for stage in stages] == [(True, False), (False, True)]
    places = [i for stage in stages for i in stage.layer_indices]
    assert places == list(range(len(model.kv_cache_specs())))


def test_what_has_no_stages() -> None:
    with pytest.raises(ValueError, match="1 because T5ForConditionalGeneration is not a decoder-only model"):
        split_model(outline(FIXTURES / "t5_tied", "auto", None), 2)
    for name in WHOLE[:2]:
        with pytest.raises(
            ValueError, match=r"1 because Gemma4For.* can't be split into stages: its last layers share the"
        ):
            split_model(outline(FIXTURES / name, "auto", None), 2)
    with pytest.raises(ValueError, match="at most 2, the number of layers of the model"):
        split_model(outline(FIXTURES / "gqa2_tied", "auto", None), 3)
