"""Loading of drafters, and checks against the served model."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.speculative import SpeculativeConfig
from jax_paged.errors import check
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.kv_location import KVLocation
from jax_paged.models.loading.eagle_checkpoint import load_head
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.weights import LoadedModel, load_model
from jax_paged.worker.features.speculation.draft_model import DraftModel, check_draft, check_groups
from jax_paged.worker.features.speculation.drafter import Drafter
from jax_paged.worker.features.speculation.eagle_drafter import EagleDrafter
from jax_paged.worker.kv_cache import KVCacheLayout, plan_layout
from jax_paged.worker.loading.mesh import Packing
from jax_paged.worker.loading.weights import apply_packing, flatten, placed


def load_drafter(
    args: EngineArgs,
    speculative: SpeculativeConfig,
    loaded: LoadedModel,
    layout: KVCacheLayout,
    grid: DeviceGrid,
    *,
    packing: Packing,
) -> tuple[Drafter, list[Array]]:
    """Loads a draft model or an EAGLE-3 head, in the dtype of the served model.

    Args:
        args: Engine arguments.
        speculative: The configuration, which names a draft model or an EAGLE-3 head.
        loaded: The served model.
        layout: Cache layout of the served model.
        grid: The devices that share the weights.
        packing: The weights that are packed.

    Returns:
        The drafter and its weights.

    Raises:
        ValueError: If the drafter can't be loaded, or does not fit the served model.
    """
    name = speculative.model
    assert name is not None, "n-gram drafts are found on the host, without a drafter"
    if speculative.resolved_method == "eagle3":
        head = load_head(resolve_model_dir(name), loaded, grid)
        window, group = _widest(layout)
        # An entry is stored one position before its token. With the full window, it would attend to one
        # position that has already left the served model's window, and whose block may be freed.
        window = None if window is None else max(1, window - 1)
        head_layout = plan_layout([head.kv_cache_spec(window)], layout.dtype, grid.num_devices)
        head_layout = dataclasses.replace(
            head_layout, groups=layout.groups, locations=(KVLocation(0, group),)
        )
        paths = head.config.feature_paths(loaded.config.num_hidden_layers)
        flat, weights, splits = flatten(apply_packing(head, packing, in_place=True))
        weights = placed(weights, splits, grid, are_in_order=True)
        return EagleDrafter(flat, head_layout, paths, head.config.hidden_size, loaded.dtype, window), weights
    dtype = "float32" if loaded.dtype == jnp.float32 else "bfloat16"
    draft = load_model(resolve_model_dir(name), dtype, None, {}, grid)
    check_draft(draft, loaded, args.max_model_len, name)
    draft_layout = plan_layout(draft.model.kv_cache_specs(), layout.dtype, grid.num_devices)
    allowed = "a model without recurrent layers, whose states keep rejected draft tokens"
    check(not draft_layout.states, "speculative_config['model']", name, allowed)
    check_groups(draft_layout, layout, name)
    flat, weights, splits = flatten(apply_packing(draft.model, packing, in_place=True))
    weights = placed(weights, splits, grid, are_in_order=True)
    return DraftModel(flat, draft_layout), weights


def _widest(layout: KVCacheLayout) -> tuple[int | None, int]:
    """Returns the window and the index of the self-attention cache group with the largest window.

    The window is None for full attention.
    """
    for group, found in enumerate(layout.groups):
        if found.window is None and not found.is_cross:
            return None, group
    return max((found.window or 0, group) for group, found in enumerate(layout.groups))
