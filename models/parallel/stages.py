"""A decoder cut into the stages of a pipeline: each has some of the layers, one after the other.

    stage        0                 1          2
    has          embeddings
                 layers 0, 1, 2    3, 4, 5    6, 7
                                              norm, head

A head that is tied to the table of token embeddings is on the last stage once more.
"""

import itertools
from collections.abc import Sequence

import jax
from flax import nnx

from jax_paged.models.causal_lm import CausalLM, LanguageModel
from jax_paged.models.forward_context import MissingLayer


def split_model(model: LanguageModel, num_stages: int) -> list[CausalLM]:
    """Returns the stages of a model, which share its weights.

    The largest stage has as few bytes as possible: weights are what has to fit a device, and reading them is
    most of the time of a decode step.

    Args:
        model: Weights, or shapes in their places.
        num_stages: How many.

    Raises:
        ValueError: If the model has fewer layers, or no stages; the message says what is allowed.
    """
    if not isinstance(model, CausalLM):
        raise ValueError(f"1, as {type(model).__name__} is no decoder alone")
    if model.pp_unsupported_reason:
        raise ValueError(f"1, as {type(model).__name__} must be whole: {model.pp_unsupported_reason}")
    layers = getattr(model, model.layers_name)
    sizes = [num_bytes(layer) for layer in layers]
    if num_stages > len(layers):
        raise ValueError(f"at most {len(layers)}, the layers of the model")
    alone = [num_bytes(stage(model, range(i, i))) for i in (0, len(layers))]
    return [stage(model, part) for part in even_parts(sizes, num_stages, alone[0], alone[1])]


def even_parts(sizes: Sequence[int], num_parts: int, first: int, last: int) -> list[range]:
    """Cuts a list into parts that lie one after the other, none of them empty, the largest of which is small.

    Args:
        sizes: Of what is in the list.
        num_parts: How many parts.
        first: What the first part has besides.
        last: What the last part has besides.
    """
    # By the number of items that the parts so far have: the size of the largest, and where the parts end.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    for part in range(num_parts):
        left = num_parts - part - 1
        more = (first if part == 0 else 0) + (last if left == 0 else 0)
        ends = range(part + 1, len(sizes) - left + 1) if left else [len(sizes)]
        best = {
            end: min(
                (max(largest, sum(sizes[start:end]) + more), [*cuts, end])
                for start, (largest, cuts) in best.items()
                if start < end
            )
            for end in ends
        }
    cuts = best[len(sizes)][1]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def stage(model: CausalLM, layers: range) -> CausalLM:
    """Returns the part of a model with some layers, with what stands before the first or follows the last."""
    part = nnx.merge(*nnx.split(model))
    all_layers, head = getattr(part, part.layers_name), part.head
    part.begins, part.ends = layers.start == 0, layers.stop == len(all_layers)
    kept = [layer if i in layers else MissingLayer() for i, layer in enumerate(all_layers)]
    for name, module in list(vars(part).items()):
        is_first = name in part.first_names
        is_here = (part.begins and is_first) or (part.ends and (not is_first or module is head))
        if isinstance(module, nnx.Module) and not is_here:
            setattr(part, name, None)
    setattr(part, part.layers_name, nnx.List(kept))
    return part


def num_bytes(module: nnx.Module) -> int:
    """Returns the size of all weights of a module, or of shapes in their places."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(module)))
