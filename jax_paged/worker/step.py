"""The step as it is traced: weights, pool, the seats' arrays and one packed buffer in; drawn tokens out."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_paged.core.runner_output import NO_TOKEN
from jax_paged.sampling_params import MAX_BIAS_IDS
from jax_paged.worker.block_tables import tables_of, write_changes
from jax_paged.worker.buckets import Bucket
from jax_paged.worker.packed_batch import attention_metadata, layout, sampling_batch, unpack
from jax_paged.worker.programs import Program, SeatArrays, TraceContext, bits
from jax_paged.worker.sampler import sample
from jax_paged.worker.token_counts import add_tokens


def known_tokens(fields: dict[str, Array], last_tokens: Int[Array, " s"]) -> Int[Array, " t"]:
    """Returns the tokens of a step, with the last drawn token of a seat in place of its NO_TOKEN."""
    tokens, first, seats = fields["tokens"], fields["query_start_loc"], fields["seats"]
    rows = jnp.where(first[1:] > first[:-1], first[1:] - 1, len(tokens))  # rows that are not used: none
    last = tokens.at[rows].get(mode="clip")
    drawn = last_tokens.at[seats].get(mode="clip")
    return tokens.at[rows].set(jnp.where(last == NO_TOKEN, drawn, last), mode="drop")


@dataclasses.dataclass(frozen=True)
class StepProgram(Program):
    """The step of one bucket: it runs the model on all rows, and draws a token from every row of logits.

    Its arguments are weights, pool, SeatArrays (these two are donated), and the arrays of StepInputs. It
    returns:
        int32 [4, B]: token ids, bits of their log-probabilities, whether the logits were finite, whether any
            token could be chosen.
        int32 [B, 1 + 2N]: rank, most likely token ids, bits of their log-probabilities.
        The hidden states of all token rows, padded to those of the largest step if the step is mixed.
        The pool.
        The SeatArrays.
    """

    bucket: Bucket

    def __str__(self) -> str:
        return str(self.bucket)

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        bucket, num_groups = self.bucket, len(context.layout.groups)

        def step(
            weights: list[Array],
            kv_cache: list[Array],
            seat_arrays: SeatArrays[Array],
            packed: Array,
            bias_ids: Array,
            bias_values: Array,
            token_mask: Array,
        ) -> tuple[Array, Array, Array, list[Array], SeatArrays[Array]]:
            fields = unpack(packed, bucket, num_groups)
            model = context.merge(weights)
            block_tables = write_changes(seat_arrays.block_tables, fields["table_changes"])
            tables = tables_of(block_tables, fields["seats"])
            metadata = attention_metadata(fields, tables, bucket, context.backend, context.layout.places)
            tokens = known_tokens(fields, seat_arrays.last_tokens)
            hidden, kv_cache = model.paged(tokens, kv_cache, metadata)
            logits = model.logits(hidden[fields["logits_rows"]])
            batch = sampling_batch(fields, seat_arrays.token_counts, bias_ids, bias_values, token_mask)
            drawn = sample(logits, batch, max_logprobs=context.max_logprobs)
            token_counts = add_tokens(seat_arrays.token_counts, batch.count_seats, drawn.token_ids)
            flags = [drawn.is_finite.astype(jnp.int32), drawn.has_choice.astype(jnp.int32)]
            results = jnp.stack([drawn.token_ids, bits(drawn.logprob), *flags])
            columns = [drawn.rank[:, None], drawn.top_token_ids, bits(drawn.top_logprobs)]
            padding = 0 if bucket.is_decode else context.max_num_batched_tokens - bucket.num_tokens
            hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
            last_tokens = seat_arrays.last_tokens.at[fields["sample_seats"]].set(drawn.token_ids, mode="drop")
            seat_arrays = SeatArrays(token_counts, block_tables, last_tokens)
            return results, jnp.concatenate(columns, axis=1), hidden, kv_cache, seat_arrays

        pool, b = context.pool(), bucket.num_seqs
        _, size = layout(bucket, num_groups)
        inputs = [
            context.shape((size,), jnp.int32),
            context.shape((b, MAX_BIAS_IDS), jnp.int32),
            context.shape((b, MAX_BIAS_IDS), jnp.float32),
            context.shape((b, context.num_mask_words), jnp.int32),
        ]
        replicated = context.replicated
        out_shardings = (*[replicated] * 3, [context.pool_sharding] * len(pool), replicated)
        jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings)
        return jitted.trace(context.weights, pool, context.seat_arrays(), *inputs)
