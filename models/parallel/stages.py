"""Division of a decoder into pipeline stages, each with some consecutive layers.

    stage        0                 1          2
    has          embeddings
                 layers 0, 1, 2    3, 4, 5    6, 7
                                              norm, head

If the head is tied to the token embeddings, the last stage has a copy of them.
"""

import itertools
from collections.abc import Sequence

import jax
from flax import nnx

from jax_paged.models.causal_lm import CausalLM, LanguageModel
from jax_paged.models.forward_context import MissingLayer


def split_model(model: LanguageModel, num_stages: int) -> list[CausalLM]:
    """Returns the pipeline stages of a model. They share the weights of the model.

    The layers are divided so that the largest stage has as few bytes as possible. The weights have to fit
    into the memory of a device, and reading them takes most of the time of a decode step.

    Args:
        model: A model, or its outline.
        num_stages: Number of stages.

    Raises:
        ValueError: If the model cannot be split into this number of stages. The message is only the allowed
            number, such as "at most 8, the number of layers of the model"; the caller completes the sentence.
    """
    name = type(model).__name__
    if not isinstance(model, CausalLM):
        raise ValueError(f"1 because {name} is not a decoder-only model")
    if model.pp_unsupported_reason:
        raise ValueError(f"1 because {name} can't be split into stages: {model.pp_unsupported_reason}")
    layers = getattr(model, model.layers_name)
    sizes = [num_bytes(layer) for layer in layers]
    if num_stages > len(layers):
        raise ValueError(f"at most {len(layers)}, the number of layers of the model")
    # A stage without layers has only the modules before the first layer, or after the last one.
    before, after = (num_bytes(stage(model, range(i, i))) for i in (0, len(layers)))
    return [stage(model, part) for part in even_parts(sizes, num_stages, before, after)]


def even_parts(sizes: Sequence[int], num_parts: int, first: int, last: int) -> list[range]:
    """Divides a list into consecutive, non-empty parts so that the largest part is as small as possible.

    Args:
        sizes: Size of each item of the list.
        num_parts: Number of parts.
        first: Size that is added to the first part.
        last: Size that is added to the last part.
    """
    # Dynamic programming. The key is the number of items in the parts so far. The value is the smallest
    # possible size of the largest part, and the indices where the parts begin and end.
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
    """Returns a pipeline stage of a model.

    If it is the first stage, it has the modules before the layers. If it is the last stage, it has the
    modules after the layers.

    Args:
        model: A model, or its outline; not modified.
        layers: Indices of the stage's layers.
    """
    part = nnx.merge(*nnx.split(model))
    all_layers, head = getattr(part, part.layers_name), part.head
    begins, ends = layers.start == 0, layers.stop == len(all_layers)
    part.is_first_stage, part.is_last_stage = begins, ends
    kept = [layer if i in layers else MissingLayer() for i, layer in enumerate(all_layers)]
    for name, module in list(vars(part).items()):
        is_first = name in part.pre_layer_names
        is_here = (begins and is_first) or (ends and (not is_first or module is head))
        if isinstance(module, nnx.Module) and not is_here:
            setattr(part, name, None)
    setattr(part, part.layers_name, nnx.List(kept))
    return part


def num_bytes(module: nnx.Module) -> int:
    """Returns the size of all weights of a module (bytes).

    Args:
        module: A module with weights, or with shapes in their place.
    """
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(module)))
