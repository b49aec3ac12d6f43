"""A head of EAGLE-3 that drafts tokens, inside the step that verifies them.

    position        n - 2       n - 1            n                n + 1
    token           x           x                x_n, known       -
    entry at it     known       (x_n, g_(n-1))   (d_1, h_0)       (d_2, h_1)
                                -> h_0, d_1      -> h_1, d_2      -> h_2, d_3

The entry at a position, its key and its value in the slot of that position, is made of the token behind it
and of the feature g of the model at it. Every step writes the entries of the tokens that the model has
computed, each at the position before its token; they take the place of those that drafting has made of its
own hidden states h. Of a sequence's last token the feature is kept by batch slot, until the token behind is
known. It is lost with the batch slot, and its entry, which other sequences may share, is made of zeros then:
that may cost accepted drafts, and nothing else.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.families.eagle import EagleHead
from jax_paged.models.families.llama import LlamaForCausalLM
from jax_paged.models.forward_context import ForwardContext
from jax_paged.models.kv_location import Place
from jax_paged.models.paged_attention import PagedKVCache, paged_attention, write_kv
from jax_paged.worker.features.speculation.drafter import LastRows, TracedModels, draw_drafts
from jax_paged.worker.kv_cache import KVCacheLayout
from jax_paged.worker.loading.weights import FlatModel
from jax_paged.worker.sampling.sampler import SamplerOptions, SamplingBatch


class _Rows(NamedTuple):
    """Where token rows stand: the row of their sequence, and the position and slot of the entry before each.

    Args:
        seq: int32 [T]; B in padding.
        positions: int32 [T], -1 of the first token of a text.
        places: int32 [T], how many slots of the sequence stand before that of the entry; negative where there
            is none.
    """

    seq: Int[Array, " t"]
    positions: Int[Array, " t"]
    places: Int[Array, " t"]


@dataclasses.dataclass(frozen=True, eq=False)
class EagleDrafter:
    """A Drafter that continues the hidden states of the model.

    Args:
        head: Without its weights, which lie behind all others.
        layout: Of its array of the pool.
        paths: The modules of the model whose outputs it reads.
        size: Of a feature.
        dtype: Of a feature.
        window: Tokens that its layer attends to; None for all.
    """

    head: FlatModel[EagleHead]
    layout: KVCacheLayout
    paths: tuple[str, ...]
    size: int
    dtype: jnp.dtype
    window: int | None

    @property
    def group(self) -> int:
        """The cache group whose block tables it uses."""
        return self.layout.places[0].group

    def states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
        """The feature of each sequence's last token, and the position of that."""
        return [((num_batch_slots, self.size), self.dtype), ((num_batch_slots,), jnp.int32)]

    def draft(
        self,
        traced: TracedModels,
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        states: list[Array],
        batch: SamplingBatch,
        options: SamplerOptions,
    ) -> tuple[Int[Array, " t"], list[Array]]:
        metadata, head = traced.metadata, self._merge(traced.weights)
        first, rows = metadata.query_start_loc[:-1], self._rows(metadata)
        seqs = jnp.arange(first.shape[0])
        # Those of rows that are not used are never live.
        positions, places = (x.at[first].get(mode="clip") for x in (rows.positions, rows.places))

        def one_pass(
            i: Array, at: Array, is_live: Array, token_ids: Array, carry: tuple[Array, Array]
        ) -> tuple[Array, tuple[Array, Array]]:
            pool, features = carry
            is_live &= places >= 0
            slots = _each_once(self._slots(metadata, pool, seqs, jnp.where(is_live, places + i, -1)), pool)
            pools = [pool]
            moved = dataclasses.replace(
                metadata,
                positions=jnp.where(is_live, positions + i, 0),
                slot_mapping=slots[None],
                block_tables=metadata.block_tables[self.group][None],
                context_lens=jnp.where(is_live, places + i + 1, 0)[None],
                query_start_loc=jnp.arange(first.shape[0] + 1),
                is_decode=True,
                places=(Place(0, 0),),
                attend=None,
                shared_blocks=None,
            )
            context = self._context(head, moved, pools)
            hidden = head.hidden(self._embed(head, traced, token_ids, context), features, context)
            return head.logits(hidden, context), (pools[0], _finite(hidden))

        carry = kv_cache[-1], self._kept(traced, states, positions)
        tokens, (pool, _) = draw_drafts(metadata, tokens, batch, options, one_pass, carry, sees_last=False)
        return tokens, [*kv_cache[:-1], pool]

    def follow(
        self,
        traced: TracedModels,
        tokens: Int[Array, " t"],
        outputs: list[Float[Array, "t e"]],
        kv_cache: list[Array],
        states: list[Array],
        last: LastRows,
        *,
        has_drafted: bool,
    ) -> tuple[list[Array], list[Array]]:
        metadata, head, pool = traced.metadata, self._merge(traced.weights), kv_cache[-1]
        rows = self._rows(metadata)
        context = head.context(jnp.maximum(rows.positions, 0), _never, metadata.grid)
        features = _finite(head.features(outputs, context))
        first = metadata.query_start_loc[:-1]
        kept = self._kept(traced, states, rows.positions.at[first].get(mode="clip"))
        is_first = jnp.arange(tokens.shape[0]) == first.at[rows.seq].get(mode="clip")
        before = jnp.where(
            is_first[:, None], kept.at[rows.seq].get(mode="clip"), jnp.roll(features, 1, axis=0)
        )
        key, value = head.key_and_value(self._embed(head, traced, tokens, context), before, context)
        slots = self._slots(metadata, pool, rows.seq, rows.places)
        firsts = _each_once(slots.at[first].get(mode="clip"), pool)
        slots = jnp.where(is_first, firsts.at[rows.seq].get(mode="clip"), slots)
        pool = write_kv(pool, key, value, slots, backend=metadata.backend, grid=metadata.grid)
        at = jnp.maximum(last.rows, 0)
        kept_features = states[0].at[last.batch_slots].set(features[at], mode="drop")
        kept_positions = states[1].at[last.batch_slots].set(metadata.positions[at], mode="drop")
        return [*kv_cache[:-1], pool], [kept_features, kept_positions]

    def _merge(self, weights: list[Array]) -> EagleHead:
        return self.head.merge(weights[len(weights) - self.head.num_weights :])

    def _embed(
        self, head: EagleHead, traced: TracedModels, tokens: Int[Array, " t"], context: ForwardContext
    ) -> Float[Array, "t e"]:
        assert isinstance(traced.target, LlamaForCausalLM), "load_head has checked it"
        return head.embed(tokens, traced.target.embed_tokens, context)

    def _context(self, head: EagleHead, metadata: AttentionMetadata, pools: list[Array]) -> ForwardContext:
        """Returns the context of a pass that writes to `pools`, a list of one."""
        cache = PagedKVCache([head.kv_cache_spec(self.window)], pools, metadata)

        def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> Array:
            return paged_attention(cache, 0, q, k, v, **options)

        return head.context(metadata.positions, attend, metadata.grid)

    def _kept(
        self, traced: TracedModels, states: list[Array], positions: Int[Array, " b"]
    ) -> Float[Array, "b e"]:
        """Returns the features at the positions before the first tokens of rows; zeros where not known.

        A new sequence may get one that the last in its batch slot has left at the same position: it is as
        wrong as zeros, and as harmless.
        """
        features, kept_positions = (x.at[traced.batch_slots].get(mode="fill", fill_value=0) for x in states)
        return jnp.where((kept_positions == positions)[:, None], features, 0)

    def _rows(self, metadata: AttentionMetadata) -> _Rows:
        lens, num_rows = metadata.context_lens[self.group], metadata.positions.shape[0]
        rows, stops = jnp.arange(num_rows), metadata.query_start_loc[1:]
        seq = rows if metadata.is_decode else jnp.sum(rows[:, None] >= stops, axis=1)
        behind = stops.at[seq].get(mode="clip") - rows
        lens = lens.at[seq].get(mode="fill", fill_value=0)
        return _Rows(seq, metadata.positions - 1, jnp.where(lens > 0, lens - behind - 1, -1))

    def _slots(
        self, metadata: AttentionMetadata, pool: Array, seq: Int[Array, " t"], places: Int[Array, " t"]
    ) -> Int[Array, " t"]:
        """Returns the slots at places of sequences; one that is not there where the place is not."""
        size = pool.shape[3]
        at = jnp.maximum(places, 0)
        tables = metadata.block_tables[self.group]
        blocks = tables.at[seq, at // size].get(mode="fill", fill_value=0)
        return jnp.where((places >= 0) & (blocks > 0), blocks * size + at % size, _no_slot(pool))


def _no_slot(pool: Array) -> int:
    """Returns a slot that is not written."""
    return pool.shape[0] * pool.shape[3]


def _each_once(slots: Int[Array, " b"], pool: Array) -> Int[Array, " b"]:
    """Returns slots of the first rows of sequences, those that another one before has got replaced.

    Sequences that share a block, whose last entry depends on the token behind it, would all write that.
    """
    index = jnp.arange(slots.shape[0])
    is_taken = jnp.any((slots[:, None] == slots) & (index[:, None] > index), axis=1)
    return jnp.where(is_taken, _no_slot(pool), slots)


def _finite(rows: Float[Array, "t e"]) -> Float[Array, "t e"]:
    """Returns rows, zeros where a value is not finite: of a request that ends, or of padding."""
    return jnp.where(jnp.all(jnp.isfinite(rows), axis=1, keepdims=True), rows, 0)


def _never(layer: int, q: Array, k: Array | None, v: Array | None, **options: Any) -> Array:
    raise AssertionError("keys and values need no attention")
