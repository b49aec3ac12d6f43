"""Read access to the KV cache of running sequences, and their attention and logits. Nothing is changed."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_paged.core.kv_cache.block_pool import NULL_BLOCK
from jax_paged.core.scheduler_output import BlockTables, InspectionInput
from jax_paged.errors import check, check_int
from jax_paged.models.attention import AttentionMetadata, KVCacheSpec, window_of
from jax_paged.models.kv_location import NO_GROUP
from jax_paged.pallas_kernels.quantization import dequantize, rows_of
from jax_paged.worker.compilation.programs import Program, TraceContext


@dataclasses.dataclass(frozen=True)
class InspectProgram(Program):
    """Program that computes tokens of one sequence on a contiguous copy of its blocks.

    Its arguments are the weights, the KV cache, int32 [1 + G * M] (ids of the blocks to copy, the null block
    first), the tokens, and the AttentionMetadata of one sequence over the copy. It returns the logits after
    the last token, float32 [V], and the attention probabilities by layer, float32 [H, T, M * block_size].

    Args:
        num_tokens: Token rows, T.
        num_blocks: Columns of the block tables, M.
        layers: Layers whose attention is returned.
    """

    num_tokens: int
    num_blocks: int
    layers: tuple[int, ...]

    def __str__(self) -> str:
        return f"inspect {self.num_tokens}x{self.num_blocks}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""
        num_groups, layout = len(context.layout.groups), context.layout

        def inspect(
            weights: list[Array], kv_cache: list[Array], blocks: Array, tokens: Array, metadata: Any
        ) -> tuple[Array, dict[int, Array]]:
            model = context.merge(weights)
            pool = [x[blocks] for x in kv_cache]
            specs, found = model.kv_cache_specs(), {}
            paged = model.paged_context(pool, metadata)

            def attend(layer: int, q: Array, k: Array | None, v: Array | None, **options: Any) -> Array:
                out = paged.attend(layer, q, k, v, **options)
                # A layer that reuses the keys of another layer passes that layer's index and no keys. It is
                # not recorded.
                if layer in self.layers and k is not None:
                    array, group, view = layout.locations[layer]
                    pages = pool[array][metadata.block_tables[group, 0]]
                    if view is not None:
                        pages = view.pages(pages, layout.num_devices)[view.part :: view.num_parts]
                    keys = dequantize(rows_of(pages[:, 0]), q.dtype)
                    first_slot = metadata.context_lens[group, 0] - metadata.query_start_loc[1]
                    query_slots = first_slot + jnp.arange(self.num_tokens)
                    found[layer] = probabilities(specs[layer], q, keys, query_slots, **options)
                return out

            hidden = model.hidden(tokens, dataclasses.replace(paged, attend=attend))
            return context.logits(model, hidden[metadata.query_start_loc[1] - 1]), found

        t, m = self.num_tokens, self.num_blocks
        shapes = ((t,), (num_groups, t), (num_groups, 1, m), (num_groups, 1), (2,))
        metadata = self.metadata([context.shape(shape, np.int32) for shape in shapes], context)
        inputs = context.shape((1 + num_groups * m,), np.int32), context.shape((t,), np.int32), metadata
        return jax.jit(inspect).trace(context.weights, context.pool(), *inputs)

    def metadata(self, arrays: Iterable[Any], context: TraceContext) -> AttentionMetadata:
        """Returns the metadata of one sequence.

        Args:
            arrays: Arrays or shapes, in the order of the first fields of AttentionMetadata.
            context: The model, and the devices.
        """
        static = {
            "is_decode": self.num_tokens == 1,
            "backend": context.backend,
            "kv_locations": context.layout.locations,
            "attend": context.attend,
            "grid": context.grid,
        }
        return AttentionMetadata(*arrays, **static)


def probabilities(
    spec: KVCacheSpec,
    q: Float[Array, "t h d"],
    keys: Float[Array, "m k s d"],
    query_slots: Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    distance_bias: Array | None = None,
) -> Float[Array, "h t n"]:
    """Returns the attention probabilities of all queries. With sinks, their sum per query is less than 1.

    Args:
        spec: Cache specification of the layer.
        q: Queries.
        keys: Pages of keys, in the order of the block table.
        query_slots: int32 [T], slot of each query's own token within these pages.
        scale: Factor of the scores.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
        sinks: One logit per head that is added to the softmax denominator; None for no sinks.
        distance_bias: Bias of the scores by distance, as for dense_attention; None for no bias.
    """
    keys = jnp.repeat(
        keys.transpose(0, 2, 1, 3).reshape(-1, *keys.shape[1::2]), q.shape[1] // keys.shape[1], 1
    )
    scores = jnp.einsum("thd,nhd->htn", q, keys, preferred_element_type=jnp.float32) * scale
    distance = query_slots[:, None] - jnp.arange(len(keys))
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    if distance_bias is not None:
        scores += distance_bias[:, jnp.clip(distance, 0, distance_bias.shape[1] - 1)]
    window = window_of(spec)
    live = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    scores = jnp.where(live, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    return jnp.where(live, jax.nn.softmax(scores)[..., : len(keys)], 0)


class Inspector:
    """Implementation of the Executor methods `read_kv` and `inspect`. Programs are compiled on first use.

    The methods take the runner's context, its arrays by name, and the arguments of the Executor's method.
    """

    def __init__(self) -> None:
        self._compiled: dict[Program, jax.stages.Compiled] = {}

    def read_kv(
        self,
        context: TraceContext,
        arrays: Mapping[str, list[Array]],
        layer: int,
        block_tables: BlockTables,
        num_tokens: list[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cached keys and values of a sequence; see Executor.read_kv."""
        layout = context.layout
        check_int("layer", layer, 0, len(layout.locations) - 1)
        array, group, view = layout.locations[layer]
        allowed = "an attention layer, not a layer with a recurrent state"
        check(group != NO_GROUP, "layer", layer, allowed)
        table, n = block_tables[group], num_tokens[group]
        blocks = _padded(table, _power_of_two(len(table)))
        pages = np.asarray(_gather(arrays["kv_cache"][array], blocks, context.dtype))[: len(table)]
        if view is not None:
            pages = np.asarray(view.pages(pages, layout.num_devices))[view.part :: view.num_parts]
        kv = pages.transpose(1, 0, 3, 2, 4).reshape(pages.shape[1], -1, *pages.shape[2::2])
        is_cached = np.repeat(np.array(table) != NULL_BLOCK, context.block_size)[:n]
        return kv[0, :n][is_cached], kv[-1, :n, :, : layout.value_dim][is_cached]

    def inspect(
        self, context: TraceContext, arrays: Mapping[str, list[Array]], query: InspectionInput
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Recomputes tokens from the KV cache; see Executor.inspect."""
        n, groups = len(query.token_ids), context.layout.groups
        # Layers with cross-attention are not counted in query.layers.
        layers = [i for i, place in enumerate(context.layout.locations) if not groups[place.group].is_cross]
        ok = context.attend is None or not query.layers
        check(ok, "layers", query.layers, "empty with a custom `attend`, whose probabilities are unknown")
        for layer in query.layers:
            check_int("layers", layer, 0, len(layers) - 1)
        size = context.block_size
        num_slots = query.start + n - query.num_dropped_tokens
        t = _power_of_two(n)
        m = _power_of_two(-(-max(num_slots, query.num_encoder_tokens) // size))
        positions = np.arange(query.start, query.start + n)
        # Block i of group g is block 1 + g * m + i of the copy.
        tables = 1 + np.arange(len(groups) * m).reshape(len(groups), 1, m)
        # Only keys and values of tokens that are not computed yet are written. Cached ones stay as they are.
        slots = np.where(
            positions < query.num_computed_tokens,
            (1 + len(groups) * m) * size,
            tables[:, :, 0] * size + positions - query.num_dropped_tokens,
        )
        lens = [query.num_encoder_tokens if group.is_cross else num_slots for group in groups]
        blocks = np.concatenate([[NULL_BLOCK], *(_padded(table[:m], m) for table in query.block_tables)])
        program = InspectProgram(t, m, tuple(layers[layer] for layer in query.layers))
        fields = (
            _padded(positions, t),
            np.stack([_padded(row, t, (1 + len(groups) * m) * size) for row in slots]),
            tables.astype(np.int32),
            np.array(lens, np.int32)[:, None],
            np.array([0, n], np.int32),
        )
        inputs = blocks.astype(np.int32), _padded(query.token_ids, t), program.metadata(fields, context)
        if program not in self._compiled:
            self._compiled[program] = program.lower(context).compile()
        logits, found = self._compiled[program](arrays["weights"], arrays["kv_cache"], *inputs)
        attention = {layer: np.asarray(found[layers[layer]])[:, :n, :num_slots] for layer in query.layers}
        return np.asarray(logits), attention


@functools.partial(jax.jit, static_argnums=2)
def _gather(pool: Array, blocks: Array, dtype: jnp.dtype) -> Array:
    """Returns the contents of blocks, dequantized."""
    return dequantize(rows_of(pool[blocks]), dtype)


def _power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def _padded(values: Any, length: int, value: int = 0) -> np.ndarray:
    """Returns values as int32, padded to `length`."""
    padded = np.full(length, value, np.int32)
    padded[: len(values)] = values
    return padded
