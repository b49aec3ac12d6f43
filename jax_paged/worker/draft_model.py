"""A smaller model that drafts tokens, inside the step that verifies them.

    the known token -> draft model, k + 1 passes: k drafts, keys and values of all -> model: verifies k drafts

Its keys and values lie in arrays of their own, behind the model's, under the same block tables: what is
shared, copied or swapped of one is so of the other. Every step runs it on the tokens that the model computes.
It draws with the seeds, positions and parameters that the model draws with: where their distributions are
alike, they draw the same token, at any temperature.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jax_paged.checks import check
from jax_paged.config import EngineArgs
from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.causal_lm import CausalLM, LanguageModel
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.weights import LoadedModel, load_model
from jax_paged.worker.kv_cache import KVCacheLayout, plan_layout
from jax_paged.worker.sampler import SamplingBatch, sample
from jax_paged.worker.weights import FlatModel, flatten, packed


@dataclasses.dataclass(frozen=True, eq=False)
class DraftModel:
    """What programs have to know of the draft model.

    Args:
        model: Without its weights, which lie behind all others.
        layout: Of its arrays of the pool, which lie behind the model's.
    """

    model: FlatModel
    layout: KVCacheLayout

    def merge(self, weights: list[Array]) -> LanguageModel:
        """Returns the model, of all arrays that a program gets as weights."""
        return self.model.merge(weights[len(weights) - self.model.num_weights :])

    def run(
        self,
        weights: list[Array],
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        metadata: AttentionMetadata,
    ) -> tuple[Array, list[Array]]:
        """Computes tokens; returns their hidden states, and the whole pool, of which its own part is new."""
        first = len(kv_cache) - self.layout.num_pools
        metadata = dataclasses.replace(metadata, places=self.layout.places, attend=None)
        hidden, own = self.merge(weights).paged(tokens, kv_cache[first:], metadata)
        return hidden, [*kv_cache[:first], *own]

    def draft(
        self,
        weights: list[Array],
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        metadata: AttentionMetadata,
        batch: SamplingBatch,
        how: dict[str, Any],
    ) -> tuple[Int[Array, " t"], list[Array]]:
        """Puts drafts behind the first token of every row.

        Args:
            weights: Of all models.
            tokens: Of all token rows; those behind the first of a row are replaced.
            kv_cache: The pool.
            metadata: Of the step that verifies: its token rows are the rows of logits.
            batch: Of the rows of logits; a padding row has no effects.
            how: Options of the sampler.

        Returns:
            The tokens, and the pool.
        """
        first, num_tokens = metadata.query_start_loc[:-1], tokens.shape[0]
        num_drafts = metadata.query_start_loc[1:] - first - 1  # -1 of rows that are not used
        num_rows = jnp.arange(first.shape[0] + 1)

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            i, tokens, kv_cache = state
            is_live = i <= num_drafts
            at = jnp.where(is_live, first + i, num_tokens)
            moved = dataclasses.replace(
                metadata,
                positions=metadata.positions.at[at].get(mode="fill", fill_value=0),
                slot_mapping=metadata.slot_mapping.at[:, at].get(
                    mode="fill", fill_value=jnp.iinfo(jnp.int32).max
                ),
                context_lens=jnp.where(is_live, metadata.context_lens - num_drafts + i, 0),
                query_start_loc=num_rows,
                is_decode=True,
                shared_blocks=None,
            )
            hidden, kv_cache = self.run(
                weights, tokens.at[at].get(mode="fill", fill_value=0), kv_cache, moved
            )
            rows = jnp.minimum(at, num_tokens - 1)
            own = _rows_of(batch, rows, tokens, i)
            drawn = sample(self.merge(weights).logits(hidden), own, **how)
            goes_on = jnp.where(i < num_drafts, at + 1, num_tokens)
            return i + 1, tokens.at[goes_on].set(drawn.token_ids, mode="drop"), kv_cache

        state = lax.while_loop(
            lambda state: state[0] <= jnp.max(num_drafts), step, (jnp.int32(0), tokens, kv_cache)
        )
        return state[1], state[2]


def _rows_of(
    batch: SamplingBatch, rows: Int[Array, " b"], tokens: Int[Array, " t"], num_drafts: Int[Array, ""]
) -> SamplingBatch:
    """Returns the parameters of some rows of logits, behind so many drafts each."""
    shared = ("token_counts", "drafts")
    values = {
        field.name: getattr(batch, field.name)[rows]
        for field in dataclasses.fields(batch)
        if field.name not in shared
    }
    assert batch.drafts is not None, "the step verifies drafts"
    back = jnp.arange(batch.drafts.shape[1])
    behind = tokens[jnp.maximum(rows[:, None] - back, 0)]
    drafts = jnp.where(back < num_drafts, behind, batch.token_counts.shape[1])
    off = jnp.zeros(rows.shape, bool)
    values |= {"drafts": drafts, "token_counts": batch.token_counts, "wants_logprobs": off}
    return SamplingBatch(**values)


def _check_draft(draft: LoadedModel, model: LoadedModel, max_model_len: int | None, name: str) -> None:
    """Checks that a model can draft for another.

    Raises:
        ValueError: If it can't; the message names all that is wrong.
    """
    problems = []
    for ok, what in (
        (isinstance(draft.model, CausalLM), "is no decoder"),
        (isinstance(model.model, CausalLM), "would draft for a model that is no decoder"),
        (
            draft.vocab_size == model.vocab_size,
            f"has {draft.vocab_size} tokens in its vocabulary, the model that is served {model.vocab_size}",
        ),
        (
            draft.max_model_len >= (max_model_len or model.max_model_len),
            f"takes {draft.max_model_len} tokens, max_model_len is {max_model_len or model.max_model_len}",
        ),
    ):
        if not ok:
            problems.append(what)
    allowed = "a decoder with the vocabulary and at least the length of the model that is served"
    check(not problems, "speculative_config['model']", name, f"{allowed}; this one {', and '.join(problems)}")


def load_draft(
    args: EngineArgs, loaded: LoadedModel, layout: KVCacheLayout, mesh: Mesh, *, packs: bool
) -> tuple[DraftModel | None, list[Array]]:
    """Loads the model that drafts, in the type of the one that is served.

    Args:
        args: Name it.
        loaded: The model that is served.
        layout: Of its pool.
        mesh: Where its weights lie.
        packs: Whether oneDNN multiplies.

    Returns:
        The model and its weights; None and none if no model drafts.

    Raises:
        ValueError: If there is no such model, or it can't draft for the one that is served.
    """
    if args.speculative is None or args.speculative.model is None:
        return None, []
    name = args.speculative.model
    dtype = "float32" if loaded.dtype == jnp.float32 else "bfloat16"
    draft = load_model(resolve_model_dir(name), dtype, None, {})
    _check_draft(draft, loaded, args.max_model_len, name)
    own = plan_layout(draft.model.kv_cache_specs(), layout.dtype)
    allowed = (
        f"one whose layers cache as those of the model that is served: {layout.groups}, not {own.groups}"
    )
    check(own.groups == layout.groups, "speculative_config['model']", name, allowed)
    flat, weights, shardings = flatten(packed(draft.model, in_place=True) if packs else draft.model, mesh)
    return DraftModel(flat, own), jax.device_put(weights, shardings)
