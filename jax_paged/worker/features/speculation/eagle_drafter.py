"""EAGLE-3 drafter: a head with one layer that drafts tokens inside the step that verifies them.

The head's input at position p is a pair: the embedding of token p + 1, and the feature g_p, which is computed
from hidden states of the target model at position p. Its output h_p is used to draw token p + 2. It also
replaces the feature g_(p+1) while that is not known. The head stores one entry, a key and a value, in the KV
slot of position p. If x_n is the last known token, drafting works as follows:

    position of the entry    n - 1              n                n + 1
    input                    (x_n, g_(n-1))     (d_1, h_(n-1))   (d_2, h_n)
    output                   h_(n-1)            h_n              h_(n+1)
    draft token              d_1                d_2              d_3

After the target model's pass, the entries for all tokens of the step are computed from the true features.
They overwrite the entries that drafting has computed from outputs of the head.

The feature of the last token of each sequence is kept by batch slot until the next token is known. It is lost
with the batch slot. The entry that needs it is then computed from zeros, even if it is in a block that other
sequences share. This may lower the acceptance rate but never affects the output.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.families.eagle import EagleHead
from jax_paged.models.families.llama import LlamaForCausalLM
from jax_paged.models.forward_context import ForwardContext
from jax_paged.models.kv_location import KVLocation
from jax_paged.models.paged_attention import PagedKVCache, paged_attention, write_kv
from jax_paged.worker.features.speculation.drafter import LastRows, TracedModels, draw_drafts
from jax_paged.worker.kv_cache import KVCacheLayout
from jax_paged.worker.loading.weights import FlatModel
from jax_paged.worker.sampling.sampler import SamplerOptions, SamplingBatch


class _Rows(NamedTuple):
    """The sequence of each token row, and the location of the head's entry that belongs to its token.

    Args:
        seq: int32 [T], index of the sequence; B in padding.
        positions: int32 [T], position of the entry, which is one before the token; -1 for the first token of
            a text.
        table_slots: int32 [T], slot of the entry within the sequence's block table; negative without one.
    """

    seq: Int[Array, " t"]
    positions: Int[Array, " t"]
    table_slots: Int[Array, " t"]


@dataclasses.dataclass(frozen=True, eq=False)
class EagleDrafter:
    """A Drafter that continues the hidden states of the target model with an EAGLE-3 head.

    Args:
        head: The head without its weights, which are the last ones in the list of all weights.
        layout: Layout of its KV cache array.
        paths: Paths of the target model's modules whose outputs it reads.
        size: Size of a feature.
        dtype: Dtype of a feature.
        window: Sliding window of its layer (tokens); None for full attention.
    """

    head: FlatModel[EagleHead]
    layout: KVCacheLayout
    paths: tuple[str, ...]
    size: int
    dtype: jnp.dtype
    window: int | None

    @property
    def group(self) -> int:
        """The index of the cache group whose block tables it uses."""
        return self.layout.locations[0].group

    def states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
        """Returns shapes and dtypes of the saved arrays: features of the last tokens, and their positions."""
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
        """Draws draft tokens with the head; see Drafter.draft."""
        metadata, head = traced.metadata, self._merge(traced.weights)
        first, rows = metadata.query_start_loc[:-1], self._rows(metadata)
        seqs = jnp.arange(first.shape[0])
        # Values of unused sequences are arbitrary: `is_live` is always False for them.
        positions, table_slots = (x.at[first].get(mode="clip") for x in (rows.positions, rows.table_slots))

        def one_pass(
            i: Array, token_rows: Array, is_live: Array, token_ids: Array, carry: tuple[Array, Array]
        ) -> tuple[Array, tuple[Array, Array]]:
            """Runs the head on one token of each sequence."""
            pool, features = carry
            is_live &= table_slots >= 0
            slots = self._slots(metadata, pool, seqs, jnp.where(is_live, table_slots + i, -1))
            slots = _each_once(slots, pool)
            pools = [pool]
            pass_metadata = dataclasses.replace(
                metadata,
                positions=jnp.where(is_live, positions + i, 0),
                slot_mapping=slots[None],
                block_tables=metadata.block_tables[self.group][None],
                context_lens=jnp.where(is_live, table_slots + i + 1, 0)[None],
                query_start_loc=jnp.arange(first.shape[0] + 1),
                is_decode=True,
                kv_locations=(KVLocation(0, 0),),
                attend=None,
                shared_blocks=None,
            )
            context = self._context(head, pass_metadata, pools)
            hidden = head.hidden(self._embed(head, traced, token_ids, context), features, context)
            return head.logits(hidden, context), (pools[0], _finite(hidden))

        carry = kv_cache[-1], self._saved_features(traced, states, positions)
        tokens, (pool, _) = draw_drafts(metadata, tokens, batch, options, one_pass, carry, caches_last=False)
        return tokens, [*kv_cache[:-1], pool]

    def observe(
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
        """Computes the entries of the step's tokens, and saves the last features; see Drafter.observe."""
        metadata, head, pool = traced.metadata, self._merge(traced.weights), kv_cache[-1]
        rows = self._rows(metadata)
        context = head.context(jnp.maximum(rows.positions, 0), _no_attention, metadata.grid)
        features = _finite(head.features(outputs, context))
        first = metadata.query_start_loc[:-1]
        saved = self._saved_features(traced, states, rows.positions.at[first].get(mode="clip"))
        # An entry needs the feature at the position before its token: the feature of the previous token row,
        # or, for the first token row of a sequence, the saved feature.
        is_first = jnp.arange(tokens.shape[0]) == first.at[rows.seq].get(mode="clip")
        before = jnp.where(
            is_first[:, None], saved.at[rows.seq].get(mode="clip"), jnp.roll(features, 1, axis=0)
        )
        key, value = head.key_and_value(self._embed(head, traced, tokens, context), before, context)
        slots = self._slots(metadata, pool, rows.seq, rows.table_slots)
        # Only the entries of first tokens may have equal slots, see _each_once.
        firsts = _each_once(slots.at[first].get(mode="clip"), pool)
        slots = jnp.where(is_first, firsts.at[rows.seq].get(mode="clip"), slots)
        pool = write_kv(pool, key, value, slots, backend=metadata.backend, grid=metadata.grid)
        last_rows = jnp.maximum(last.rows, 0)
        saved_features = states[0].at[last.batch_slots].set(features[last_rows], mode="drop")
        saved_positions = states[1].at[last.batch_slots].set(metadata.positions[last_rows], mode="drop")
        return [*kv_cache[:-1], pool], [saved_features, saved_positions]

    def _merge(self, weights: list[Array]) -> EagleHead:
        """Returns the head with its weights."""
        return self.head.merge(weights[len(weights) - self.head.num_weights :])

    def _embed(
        self, head: EagleHead, traced: TracedModels, tokens: Int[Array, " t"], context: ForwardContext
    ) -> Float[Array, "t e"]:
        """Returns the embeddings of tokens, from the head's or the target model's embedding table."""
        assert isinstance(traced.target, LlamaForCausalLM), "load_head only accepts Llama models as targets"
        return head.embed(tokens, traced.target.embed_tokens, context)

    def _context(self, head: EagleHead, metadata: AttentionMetadata, pools: list[Array]) -> ForwardContext:
        """Returns the context of a forward pass of the head that updates `pools`, a list with one array."""
        cache = PagedKVCache([head.kv_cache_spec(self.window)], pools, metadata)

        def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> Array:
            return paged_attention(cache, 0, q, k, v, **options)

        return head.context(metadata.positions, attend, metadata.grid)

    def _saved_features(
        self, traced: TracedModels, states: list[Array], positions: Int[Array, " b"]
    ) -> Float[Array, "b e"]:
        """Returns the saved features that belong to the given positions; zeros for other positions.

        A new sequence may get the feature of the batch slot's previous sequence, if the position is the same.
        Like zeros, this only affects the acceptance rate.
        """
        features, saved_positions = (x.at[traced.batch_slots].get(mode="fill", fill_value=0) for x in states)
        return jnp.where((saved_positions == positions)[:, None], features, 0)

    def _rows(self, metadata: AttentionMetadata) -> _Rows:
        """Returns the sequence of each token row and the location of its entry."""
        lens, num_rows = metadata.context_lens[self.group], metadata.positions.shape[0]
        rows, stops = jnp.arange(num_rows), metadata.query_start_loc[1:]
        seq = rows if metadata.is_decode else jnp.sum(rows[:, None] >= stops, axis=1)
        num_left = stops.at[seq].get(mode="clip") - rows
        lens = lens.at[seq].get(mode="fill", fill_value=0)
        return _Rows(seq, metadata.positions - 1, jnp.where(lens > 0, lens - num_left - 1, -1))

    def _slots(
        self, metadata: AttentionMetadata, pool: Array, seq: Int[Array, " t"], table_slots: Int[Array, " t"]
    ) -> Int[Array, " t"]:
        """Returns KV slots.

        Args:
            metadata: Attention metadata of the step.
            pool: The head's KV cache array.
            seq: Sequence of each entry.
            table_slots: Slot of each entry within the sequence's block table. Negative values yield a slot
                that does not exist.
        """
        size = pool.shape[3]
        slots = jnp.maximum(table_slots, 0)
        tables = metadata.block_tables[self.group]
        blocks = tables.at[seq, slots // size].get(mode="fill", fill_value=0)
        return jnp.where((table_slots >= 0) & (blocks > 0), blocks * size + slots % size, _no_slot(pool))


def _no_slot(pool: Array) -> int:
    """Returns a slot that does not exist, so that nothing is written to it."""
    return pool.shape[0] * pool.shape[3]


def _each_once(slots: Int[Array, " b"], pool: Array) -> Int[Array, " b"]:
    """Returns the given slots, with repeated ones replaced by a slot that does not exist.

    The first tokens of sequences that share a block may write to the same slot: the last entry of a shared
    block depends on the token after the block, which differs between the sequences.
    """
    index = jnp.arange(slots.shape[0])
    is_taken = jnp.any((slots[:, None] == slots) & (index[:, None] > index), axis=1)
    return jnp.where(is_taken, _no_slot(pool), slots)


def _finite(rows: Float[Array, "t e"]) -> Float[Array, "t e"]:
    """Replaces rows with non-finite values by zeros. They are padding or belong to requests that end."""
    return jnp.where(jnp.all(jnp.isfinite(rows), axis=1, keepdims=True), rows, 0)


def _no_attention(layer: int, q: Array, k: Array | None, v: Array | None, **options: Any) -> Array:
    """Raises AssertionError, because computing keys and values needs no attention."""
    raise AssertionError("attention is not available while only keys and values are computed")
