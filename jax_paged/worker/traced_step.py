"""The step as it is traced: weights, pool, the seats' arrays and one packed buffer in; drawn tokens out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_paged.core.model_runner_output import NO_TOKEN
from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.features.hooks import num_columns, reading
from jax_paged.models.features.lora.layers import RowFunction, row_functions, unchanged
from jax_paged.sampling_params import MAX_BIAS_IDS
from jax_paged.worker.block_tables import tables_of, write_changes
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.programs import Program, SeatArrays, TraceContext, packed_results
from jax_paged.worker.features.speculation.drafter import LastRows, TracedModels
from jax_paged.worker.features.user_functions import logits_processors
from jax_paged.worker.packed_buffer import attention_metadata, layout, sampling_batch, unpack
from jax_paged.worker.sampling.sampler import SampledTokens, SamplingBatch, sample
from jax_paged.worker.sampling.token_counts import add_tokens


def known_tokens(fields: dict[str, Array], last_tokens: Int[Array, " s"]) -> Int[Array, " t"]:
    """Returns the tokens of a step, with the last drawn token of a seat in place of its NO_TOKEN."""
    tokens, first, seats = fields["tokens"], fields["query_start_loc"], fields["seats"]
    rows = jnp.where(first[1:] > first[:-1], first[1:] - 1, len(tokens))  # rows that are not used: none
    last = tokens.at[rows].get(mode="clip")
    drawn = last_tokens.at[seats].get(mode="clip")
    return tokens.at[rows].set(jnp.where(last == NO_TOKEN, drawn, last), mode="drop")


def metadata_of(
    context: TraceContext, bucket: Bucket, fields: dict[str, Array], tables: Int[Array, "g b m"]
) -> AttentionMetadata:
    """Returns what models read of a step, of the fields of its buffer and the block tables of its rows."""
    how = context.backend, context.layout.places, context.batch_invariant, context.attend, context.grid
    metadata = attention_metadata(fields, tables, bucket, *how, context.shares_prefixes)
    names = [*["state_slots"] * bool(context.layout.states), *["mrope_positions"] * context.has_mrope]
    return dataclasses.replace(metadata, **{name: fields[name] for name in names})


def drafts_before(
    fields: dict[str, Array], tokens: Int[Array, " t"], bucket: Bucket, vocab_size: int
) -> Int[Array, "l k"]:
    """Returns the drafts that each row of logits stands behind, padded with vocab_size."""
    back = jnp.arange(bucket.num_drafts)
    rows = jnp.maximum(fields["logits_rows"][:, None] - back, 0)
    return jnp.where(back < fields["num_drafts"][:, None], tokens.at[rows].get(mode="clip"), vocab_size)


def accepted(
    fields: dict[str, Array], tokens: Int[Array, " t"], drawn: Int[Array, " l"]
) -> tuple[Bool[Array, " l"], Bool[Array, " l"]]:
    """Returns which rows of logits count, and which of them is the last of its sequence.

    A row counts if every draft that it stands behind was drawn in its place. Rows of one sequence stand
    together, so the row before that of a draft has drawn what is compared with it.
    """
    behind = fields["num_drafts"]
    drafts = tokens[fields["logits_rows"]]
    is_wrong = (behind > 0) & (jnp.roll(drawn, 1) != drafts)
    num_wrong = jnp.cumsum(is_wrong.astype(jnp.int32))
    first = jnp.maximum(jnp.arange(len(behind)) - behind, 0)
    counts = num_wrong == num_wrong[first]
    has_successor = jnp.concatenate([((behind > 0) & counts)[1:], jnp.zeros(1, bool)])
    return counts, counts & ~has_successor


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """One step of a bucket while it is traced: what its tokens are computed with.

    Args:
        context: Model and limits.
        bucket: The shape.
        weights: Of the model.
        fields: Of the packed buffer.
        tables: Block tables of the rows, int32 [G, B, M].
        bias_ids: Of SamplingBatch; so are the two that follow.
        adapters: The arrays of all slots; none if bucket.has_adapters is not.
        embeds: Vectors of the token rows that have some; None if bucket.has_embeds is not.
        before: Hidden states that the stage before has made of the tokens; None in a first stage.
    """

    context: TraceContext
    bucket: Bucket
    weights: list[Array]
    fields: dict[str, Array]
    tables: Int[Array, "g b m"]
    bias_ids: Array
    bias_values: Array
    token_mask: Array
    adapters: list[Array] = dataclasses.field(default_factory=list)
    embeds: Float[Array, "t e"] | None = None
    before: Float[Array, "t e"] | None = None

    def run(
        self,
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        token_counts: Int[Array, "s v"],
        states: list[Array],
        draft_states: list[Array],
        **moved: Array,
    ) -> tuple[SampledTokens, Array, dict[str, Array], list[Array], Array, list[Array], list[Array]]:
        """Computes tokens and draws from every row of logits.

        Args:
            tokens: Of all token rows.
            kv_cache: The pool.
            token_counts: Of all seats.
            states: Of logits processors, of all seats.
            draft_states: Of what drafts, of all seats.
            **moved: Fields in place of the buffer's.

        Returns:
            What is drawn, the hidden states of all token rows, what hooks capture of these, the pool, the
            token counts, the states and those of what drafts.
        """
        context, fields = self.context, self.fields | moved
        model = context.merge(self.weights)
        metadata = self.metadata(fields)
        own = kv_cache[: context.layout.num_arrays]
        captured: dict[str, Array] = {}
        hooks = context.hooks_at(self.weights, self.hook_columns(), captured) if context.hooks else {}
        read: dict[str, Array] = {}
        if context.draft is not None:
            hooks = reading(context.draft.paths, hooks, read)
        given = tokens if self.before is None else self.before
        hidden, own = model.paged(given, own, metadata, hooks, self.changes())
        kv_cache = [*own, *kv_cache[context.layout.num_arrays :]]
        logits = context.logits(model, hidden[fields["logits_rows"]])
        batch = self.sampling_batch(fields, tokens, token_counts)
        processed = None
        if context.processors:
            columns = lax.bitcast_convert_type(fields["processor_args"], jnp.float32)
            last, seats = tokens[fields["logits_rows"]], fields["sample_seats"]
            processed, states = logits_processors.process(
                context.processors, logits, states, columns, seats, last, batch.position
            )
        drawn = sample(
            logits,
            batch,
            processed=processed,
            max_logprobs=context.max_logprobs,
            forced=fields["forced_tokens"][:, 0],
            is_processed=context.is_processed,
            own=context.sampler,
        )
        count_seats = batch.count_seats
        last = LastRows(fields["seats"], fields["query_start_loc"][1:] - 1)
        if self.bucket.num_drafts:
            is_accepted, is_last = accepted(fields, tokens, drawn.token_ids)
            count_seats = jnp.where(is_accepted, count_seats, len(token_counts))
            seats = jnp.where(is_last, fields["sample_seats"], len(token_counts))
            last = LastRows(seats, fields["logits_rows"])
        token_counts = add_tokens(token_counts, count_seats, drawn.token_ids)
        if context.draft is not None:
            drafting = dataclasses.replace(metadata, mrope_positions=None)  # it reads a text
            traced = TracedModels(self.weights, model, drafting, fields["seats"])
            outputs = [read[path] for path in context.draft.paths]
            has_drafted = self.bucket.num_drafts > 0
            kv_cache, draft_states = context.draft.follow(
                traced, tokens, outputs, kv_cache, draft_states, last, has_drafted=has_drafted
            )
        return drawn, hidden, captured, kv_cache, token_counts, states, draft_states

    def draft(
        self,
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        token_counts: Int[Array, "s v"],
        draft_states: list[Array],
    ) -> tuple[Int[Array, " t"], list[Array]]:
        """Puts drafts behind the first token of every row; returns tokens and pool."""
        context, fields = self.context, self.fields
        assert context.draft is not None, "something drafts"
        batch = self.sampling_batch(fields, tokens, token_counts)
        how = {"max_logprobs": 1, "own": context.sampler}
        model = context.merge(self.weights)
        metadata = dataclasses.replace(self.metadata(fields), mrope_positions=None)
        traced = TracedModels(self.weights, model, metadata, fields["seats"])
        return context.draft.draft(traced, tokens, kv_cache, draft_states, batch, how)

    def metadata(self, fields: dict[str, Array]) -> AttentionMetadata:
        """Returns what the models read of a step."""
        return metadata_of(self.context, self.bucket, fields, self.tables)

    def sampling_batch(
        self, fields: dict[str, Array], tokens: Int[Array, " t"], token_counts: Int[Array, "s v"]
    ) -> SamplingBatch:
        """Returns the parameters of all rows of logits, behind the drafts among the tokens."""
        drafts = None
        if self.bucket.num_drafts:
            drafts = drafts_before(fields, tokens, self.bucket, token_counts.shape[1])
        return sampling_batch(fields, token_counts, self.bias_ids, self.bias_values, self.token_mask, drafts)

    def hook_columns(self) -> Float[Array, "t columns"]:
        """Returns which hooks are on for each token row, and with which arguments; in padding none is."""
        return self._by_token(lax.bitcast_convert_type(self.fields["hook_args"], jnp.float32))

    def changes(self) -> dict[str, RowFunction]:
        """Returns what adapters, and vectors in place of tokens, make of the outputs of modules."""
        changes: dict[str, RowFunction] = {}
        if self.bucket.has_adapters:
            assert self.context.lora is not None, "only an engine with adapters has such steps"
            slots = self._by_token(self.fields["adapter_slots"])
            changes |= row_functions(self.context.lora, self.adapters, slots)
        elif self.context.lora is not None and self.context.dtype == jnp.float32:
            # As in steps with adapters, so that a row of the model alone is the same in both, to the bit.
            changes |= unchanged(self.context.lora)
        if self.embeds is not None:
            is_own, num_parts = self.fields["has_embeds"][:, None] != 0, 1 + len(self.context.added_paths)
            embeds, *added = jnp.split(self.embeds, num_parts, axis=1)
            changes[self.context.embed_path] = lambda x, y: jnp.where(is_own, embeds.astype(y.dtype), y)
            for path, part in zip(self.context.added_paths, added, strict=True):  # zeros where there is none
                changes[path] = lambda x, y, part=part: y + part.astype(y.dtype)
        return changes

    def _by_token(self, rows: Array) -> Array:
        """Returns for each token row what its row has; 0 in padding."""
        if self.bucket.is_decode:
            return rows
        token = jnp.arange(self.bucket.num_tokens)[:, None]
        row = jnp.sum(token >= self.fields["query_start_loc"][1:], axis=1)
        return rows.at[row].get(mode="fill", fill_value=0)

    def burst(
        self,
        tokens: Int[Array, " b"],
        kv_cache: list[Array],
        token_counts: Int[Array, "s v"],
        states: list[Array],
        draft_states: list[Array],
    ) -> tuple[Array, Array, Array, dict[str, Array], list[Array], Array, list[Array], list[Array]]:
        """Does decode steps until every row has drawn its end token, or as many tokens as it may.

        A row that is done writes nothing, attends to nothing and counts nothing. One whose token ends its
        sequence is done from the start: the host did not know it yet when it scheduled the burst.

        Returns:
            The results and details of all steps (int32 [K, 5, B] and [K, B, 1 + 2N], the fifth row of
            results says whether a row was not done), the last token of each row, what hooks have captured
            ([K, B, ...]), pool, token counts, states of logits processors and those of what drafts.
        """
        fields, k, has_mrope = self.fields, self.bucket.num_steps, self.context.has_mrope
        groups, num_seats = self.context.layout.groups, len(token_counts)
        is_cross = jnp.array([group.is_cross for group in groups])[:, None]
        size, no_slot = self.context.block_size, kv_cache[0].shape[0] * self.context.block_size

        def ends(tokens: Array) -> Array:
            return jnp.any(tokens[:, None] == fields["end_tokens"], axis=1)

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            i, is_live, tokens, kv_cache, token_counts, states, draft_states, *outputs = state
            results, details, captured = outputs
            positions = fields["positions"] + i
            lens = fields["context_lens"] + jnp.where(is_cross, 0, i)
            places = jnp.maximum(lens - 1, 0)
            blocks = jnp.take_along_axis(self.tables, (places // size)[:, :, None], axis=2)[:, :, 0]
            slots = jnp.where(is_live & ~is_cross, blocks * size + places % size, no_slot)
            drawn, _, new_captured, kv_cache, token_counts, states, draft_states = self.run(
                tokens,
                kv_cache,
                token_counts,
                states,
                draft_states,
                seats=jnp.where(is_live, fields["seats"], num_seats),
                positions=jnp.where(is_live, positions, 0),
                slot_mapping=slots,
                state_slots=jnp.where(is_live, fields["state_slots"], self.context.num_state_slots),
                context_lens=jnp.where(is_live, lens, 0),
                sample_positions=fields["sample_positions"] + i,
                count_seats=jnp.where(is_live, fields["count_seats"], num_seats),
                forced_tokens=lax.dynamic_slice_in_dim(fields["forced_tokens"], i, 1, axis=1),
                **({"mrope_positions": fields["mrope_positions"] + i} if has_mrope else {}),
            )
            new_results, new_details = packed_results(drawn)
            new_results = jnp.concatenate([new_results, is_live.astype(jnp.int32)[None]])
            tokens = jnp.where(is_live, drawn.token_ids, tokens)
            goes_on = (i + 1 < fields["max_draws"]) & ~ends(tokens) & drawn.is_finite & drawn.has_choice
            results, details = results.at[i].set(new_results), details.at[i].set(new_details)
            captured = {name: captured[name].at[i].set(new) for name, new in new_captured.items()}
            is_live &= goes_on
            kept = kv_cache, token_counts, states, draft_states
            return i + 1, is_live, tokens, *kept, results, details, captured

        b, columns = self.bucket.num_seqs, 1 + 2 * self.context.max_logprobs
        results, details = jnp.zeros((k, 5, b), jnp.int32), jnp.zeros((k, b, columns), jnp.int32)
        is_live = (fields["max_draws"] > 0) & ~ends(tokens)
        captured = {name: jnp.zeros((k, b, *shape)) for name, shape in self.context.captured.items()}
        kept = kv_cache, token_counts, states, draft_states
        state = (jnp.int32(0), is_live, tokens, *kept, results, details, captured)
        state = lax.while_loop(lambda state: (state[0] < k) & jnp.any(state[1]), step, state)
        _, _, tokens, kv_cache, token_counts, states, draft_states, results, details, captured = state
        return results, details, tokens, captured, kv_cache, token_counts, states, draft_states


def columns_of(context: TraceContext) -> tuple[int, int, bool, bool]:
    """Returns how many columns a step's buffer has for hooks and processors; if it has states, and M-RoPE."""
    columns = num_columns(context.hooks), logits_processors.num_columns(context.processors)
    return *columns, len(context.layout.states) > 0, context.has_mrope


@dataclasses.dataclass(frozen=True)
class StepProgram(Program):
    """The step of one bucket: it runs the model on all rows, and draws a token from every row of logits.

    Its arguments are weights, pool, SeatArrays (these two are donated), and the arrays of StepInputs; then,
    if the bucket says so, those of all adapters, and the vectors of token rows; in the last stage of a
    pipeline, the hidden states of token rows that the stage before returns. It returns:
        int32 [4, L]: token ids, bits of their log-probabilities, whether the logits were finite, whether any
            token could be chosen.
        int32 [L, 1 + 2N]: rank, most likely token ids, bits of their log-probabilities.
        The hidden states of all token rows, padded to those of the largest step if the step is mixed.
        The pool.
        The SeatArrays.
        What hooks capture of all token rows, float32 [T, ...] or [K, B, ...] of a burst, by name.
    Where drafts are made on the device, the first has a fifth row: the tokens that the rows of logits stand
    behind. Of a burst, the first two are those of TracedStep.burst, and there are no hidden states.
    """

    bucket: Bucket

    def __str__(self) -> str:
        return str(self.bucket)

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        bucket, num_groups = self.bucket, len(context.layout.groups)
        columns = columns_of(context)

        def step(
            weights: list[Array],
            kv_cache: list[Array],
            seat_arrays: SeatArrays[Array],
            packed: Array,
            bias_ids: Array,
            bias_values: Array,
            token_mask: Array,
            *more: Any,
        ) -> tuple[Array, Array, Array | None, list[Array], SeatArrays[Array], dict[str, Array]]:
            fields = unpack(packed, bucket, num_groups, *columns)
            token_counts, block_tables, last_tokens, states, draft_states = seat_arrays
            block_tables = write_changes(block_tables, fields["table_changes"])
            tables = tables_of(block_tables, fields["seats"])
            adapters = more[0] if bucket.has_adapters else []
            embeds = more[-1] if bucket.has_embeds else None
            before = more[-1] if context.before_size else None
            given = bias_ids, bias_values, token_mask, adapters, embeds, before
            traced = TracedStep(context, bucket, weights, fields, tables, *given)
            tokens = known_tokens(fields, last_tokens)
            if bucket.num_steps > 1:
                burst = traced.burst(tokens, kv_cache, token_counts, states, draft_states)
                results, details, last, captured, kv_cache, token_counts, states, draft_states = burst
                hidden = None
            else:
                if context.draft is not None and bucket.num_drafts:
                    tokens, kv_cache = traced.draft(tokens, kv_cache, token_counts, draft_states)
                run = traced.run(tokens, kv_cache, token_counts, states, draft_states)
                drawn, hidden, captured, kv_cache, token_counts, states, draft_states = run
                results, details = packed_results(drawn)
                last = drawn.token_ids
                if context.draft is not None and bucket.num_drafts:
                    results = jnp.concatenate([results, tokens[None, fields["logits_rows"]]])
                if bucket.num_drafts:
                    _, is_last = accepted(fields, tokens, drawn.token_ids)
                    seats = jnp.where(is_last, fields["sample_seats"], context.max_num_seqs)
                    fields["sample_seats"] = seats
                padding = 0 if bucket.is_decode else context.max_num_batched_tokens - bucket.num_tokens
                hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
            last_tokens = last_tokens.at[fields["sample_seats"]].set(last, mode="drop")
            seat_arrays = SeatArrays(token_counts, block_tables, last_tokens, states, draft_states)
            return results, details, hidden, kv_cache, seat_arrays, captured

        pool, num_logits = context.kv_cache(), bucket.num_logits
        _, size = layout(bucket, num_groups, *columns)
        inputs = [
            context.shape((size,), jnp.int32),
            context.shape((num_logits, MAX_BIAS_IDS), jnp.int32),
            context.shape((num_logits, MAX_BIAS_IDS), jnp.float32),
            context.shape((num_logits, context.num_mask_words), jnp.int32),
        ]
        more: list[Any] = [context.lora_arrays()] if bucket.has_adapters else []
        if bucket.has_embeds:
            more.append(context.shape((bucket.num_tokens, context.embeds_size), jnp.float32))
        if context.before_size:
            more.append(context.shape((bucket.num_tokens, context.before_size), context.dtype))
        replicated = context.replicated
        out_shardings = (*[replicated] * 3, [context.pool_sharding] * len(pool), *[replicated] * 2)
        jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings)
        return jitted.trace(context.weights, pool, context.seat_arrays(), *inputs, *more)
