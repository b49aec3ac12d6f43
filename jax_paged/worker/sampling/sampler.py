"""The sampler: a pure function from logits and sampling parameters to tokens, traced into the step."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

GREEDY_BELOW = 1e-5
# Bit of a token count that is set if the token occurs in the prompt. The lower bits count its occurrences in
# the output.
IN_PROMPT = 1 << 30

# Number of tokens per group in the two-stage draw.
_GROUP = 128
# Bits of float32 infinity as an integer.
_INF_BITS = 0x7F800000


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of B logits rows. Padding rows have temperature 0 and no other effects.

    Args:
        temperature: [B] float32; below 1e-5 the row is greedy.
        top_p: [B] float32 in (0, 1]; 1 is off.
        top_k: [B] int32; 0 or less is off.
        min_p: [B] float32 in [0, 1]; 0 is off.
        presence_penalty: [B] float32; 0 is off.
        frequency_penalty: [B] float32; 0 is off.
        repetition_penalty: [B] float32, positive; 1 is off.
        logprob_temperature: [B] float32, positive; divides the logits before anything else. Beam search uses
            it to rank hypotheses by log-probabilities at a temperature; 1 otherwise.
        seed: [B, 2] uint32, the sequence's seed in two words.
        position: [B] int32, the position of the token to choose in its sequence.
        wants_logprobs: [B] bool, whether the rank and the most likely tokens are requested.
        count_slots: [B] int32, the row of token_counts that a row with penalties reads; S for rows without
            penalties.
        token_counts: [S, V] int32, the number of occurrences of each token in the output so far, plus
            IN_PROMPT if it occurs in the prompt. Only rows with penalties read it.
        has_token_mask: [B] bool, whether token_mask restricts the row.
        token_mask: [B, ceil(V / 32)] int32, bit i % 32 of word i // 32 is 1 if token i is allowed. It is only
            read for rows with has_token_mask.
        keeps_draw: [B] bool, whether the row first draws without its mask, and keeps the token if the mask
            allows it.
        bias_ids: [B, N] int32, the tokens of bias_values, padded with vocab_size.
        bias_values: [B, N] float32, finite or -inf.
        drafts: [B, K] int32, tokens of rows with penalties that token_counts does not contain yet, padded
            with vocab_size; None for none.
    """

    temperature: Float[Array, " b"]
    top_p: Float[Array, " b"]
    top_k: Int[Array, " b"]
    min_p: Float[Array, " b"]
    presence_penalty: Float[Array, " b"]
    frequency_penalty: Float[Array, " b"]
    repetition_penalty: Float[Array, " b"]
    logprob_temperature: Float[Array, " b"]
    seed: UInt32[Array, "b 2"]
    position: Int[Array, " b"]
    wants_logprobs: Bool[Array, " b"]
    count_slots: Int[Array, " b"]
    token_counts: Int[Array, "s v"]
    has_token_mask: Bool[Array, " b"]
    token_mask: Int[Array, "b w"]
    keeps_draw: Bool[Array, " b"]
    bias_ids: Int[Array, "b n"]
    bias_values: Float[Array, "b n"]
    drafts: Int[Array, "b k"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """The chosen token of each of B logits rows, and its log-probability.

    Log-probabilities refer to the raw or the processed logits, see SamplerOptions.is_processed.

    Args:
        token_ids: [B] int32.
        logprob: [B] float32, log-probability of the chosen token.
        rank: [B] int32, 1 + the number of tokens more likely than the chosen one; 0 if not requested.
        top_token_ids: [B, max_logprobs] int32, most likely first; 0 if not requested.
        top_logprobs: [B, max_logprobs] float32, log-probabilities of top_token_ids; 0 if not requested.
        is_finite: [B] bool; False if the logits contain NaN or +inf, or only -inf. The token of such a row is
            0, and its other values are meaningless.
        has_choice: [B] bool; False if the logits are finite, but logits processors, bias and mask together
            forbid every token, or the token id of a custom sampler is out of range. The token of such a row
            is 0 and must not be used, because it may be forbidden. Always True for a forced token.
    """

    token_ids: Int[Array, " b"]
    logprob: Float[Array, " b"]
    rank: Int[Array, " b"]
    top_token_ids: Int[Array, "b k"]
    top_logprobs: Float[Array, "b k"]
    is_finite: Bool[Array, " b"]
    has_choice: Bool[Array, " b"]


class Sampler(Protocol):
    """Interface of a custom sampler: a pure function of arrays that is traced into the step."""

    def __call__(self, logits: Float[Array, "b v"], batch: SamplingBatch) -> Int[Array, " b"]:
        """Returns a token id for every row, including greedy rows.

        A custom sampler that draws at random should derive its keys from batch.seed and batch.position, so
        that a request gets the same tokens in any batch. If an id is out of range, the request of the row
        ends with an error.

        Args:
            logits: [B, V] float32, logits after mask, bias and penalties.
            batch: The parameters of the rows.
        """
        ...


@dataclasses.dataclass(frozen=True)
class SamplerOptions:
    """Sampling options that are the same for all steps of an engine.

    Args:
        max_logprobs: Number of most likely tokens to report.
        is_processed: Whether log-probabilities refer to the distribution from which tokens are drawn. For
            greedy rows, they then refer to the logits before temperature, min_p, top_k and top_p.
        custom: Custom sampler that replaces temperature, min_p, top_k, top_p and the draw; None for none.
    """

    max_logprobs: int
    is_processed: bool = False
    custom: Sampler | None = None

    def sample(
        self,
        logits: Float[Array, "b v"],
        batch: SamplingBatch,
        *,
        forced: Int[Array, " b"] | None = None,
        processed: Float[Array, "b v"] | None = None,
    ) -> SampledTokens:
        """Chooses one token per row.

        The order is: bias, penalties, mask, temperature, min_p, top_k, top_p, and then the draw. A row's
        result depends only on its own logits and parameters, and its random numbers only on (seed, position).
        It does not depend on the row's index, on other rows or on B. Work that no row needs is skipped.

        A random row with keeps_draw is first drawn without its mask. If the mask forbids the token, the row
        is drawn again with the mask. Without min_p, top_k and top_p, the token then has the same distribution
        as a single draw with the mask.

        Args:
            logits: [B, V] float32; -inf for impossible tokens.
            batch: The parameters of the rows.
            forced: int32 [B], tokens to choose instead of the drawn ones; -1 for none. Log-probabilities are
                computed for the forced tokens.
            processed: [B, V] float32, the logits after logits processors; None without processors. Tokens are
                chosen from these. Log-probabilities refer to `logits` unless is_processed is True.

        Returns:
            The chosen tokens and their log-probabilities.

        Source: order and meaning of the parameters are those of the sampler in vLLM V1, except that top_k and
        top_p keep all tokens tied at the bound.
        """
        logits = lax.cond(
            jnp.any(batch.logprob_temperature != 1),
            lambda: logits / batch.logprob_temperature[:, None],
            lambda: logits,
        )
        is_finite = jnp.isfinite(jax.nn.logsumexp(logits, axis=-1))
        if processed is None:
            processed = logits
        else:
            is_finite &= ~jnp.any(jnp.isnan(processed) | (processed == jnp.inf), axis=-1)
        adjusted = _adjust(processed, batch, draws_before_mask=self.custom is None)
        greedy = _argmax(adjusted)
        # The largest logit of a row is -inf only if all of its tokens are forbidden.
        largest = jnp.take_along_axis(adjusted, greedy[:, None], axis=-1)[:, 0]
        has_choice = ~is_finite | (largest != -jnp.inf)
        is_random = batch.temperature >= GREEDY_BELOW
        if self.custom is None:
            token_ids = lax.cond(
                jnp.any(is_random),
                lambda: jnp.where(is_random, _draw(adjusted, batch, is_random, _keys(batch)), greedy),
                lambda: greedy,
            )
        else:
            token_ids = self.custom(adjusted, batch).astype(jnp.int32)
            has_choice &= (token_ids >= 0) & (token_ids < logits.shape[1])
        token_ids = jnp.where(is_finite & has_choice, token_ids, 0)
        if forced is not None:
            token_ids = jnp.where(forced >= 0, forced, token_ids)
            has_choice |= forced >= 0
        if self.is_processed:
            adjusted = _adjust(processed, batch, draws_before_mask=False)
            logits = lax.cond(jnp.any(is_random), _draw_logits, lambda x, *_: x, adjusted, batch, is_random)
        logprobs = token_logprobs(logits, token_ids, batch.wants_logprobs, max_logprobs=self.max_logprobs)
        return SampledTokens(token_ids, *logprobs, is_finite, has_choice)


def token_logprobs(
    logits: Float[Array, "b v"],
    token_ids: Int[Array, " b"],
    wanted: Bool[Array, " b"],
    *,
    max_logprobs: int,
) -> tuple[Float[Array, " b"], Int[Array, " b"], Int[Array, "b k"], Float[Array, "b k"]]:
    """Returns logprob, rank, top_token_ids and top_logprobs of tokens, as in SampledTokens.

    Args:
        logits: [B, V] float32.
        token_ids: [B] int32 in [0, V).
        wanted: [B] bool; if False, all values of a row except logprob are 0. If all are False, these values
            are not computed.
        max_logprobs: Number of most likely tokens to report; static, at most V. Ties are ordered by token id.
    """
    log_total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)

    def details() -> tuple[Array, Array, Array]:
        rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
        top_logits, top_ids = lax.top_k(logits, max_logprobs)
        return (
            jnp.where(wanted, rank, 0),
            jnp.where(wanted[:, None], top_ids, 0),
            jnp.where(wanted[:, None], top_logits - log_total[:, None], 0.0),
        )

    rows = logits.shape[0]

    def nothing() -> tuple[Array, Array, Array]:
        zeros = jnp.zeros((rows, max_logprobs), jnp.float32)
        return jnp.zeros(rows, jnp.int32), zeros.astype(jnp.int32), zeros

    return chosen[:, 0] - log_total, *lax.cond(jnp.any(wanted), details, nothing)


def _adjust(
    logits: Float[Array, "b v"], batch: SamplingBatch, *, draws_before_mask: bool
) -> Float[Array, "b v"]:
    """Applies bias, penalties and mask, in this order.

    With draws_before_mask (static), rows with keeps_draw are drawn before the mask is applied, so the mask
    must come last. For other rows the order of the mask does not matter, because -inf stays -inf.
    """
    has_count_penalty = (batch.frequency_penalty != 0) | (batch.presence_penalty != 0)
    steps = (
        (_add_bias, jnp.any(batch.bias_ids < logits.shape[1])),
        (_penalize_repetition, jnp.any(batch.repetition_penalty != 1)),
        (_penalize_counts, jnp.any(has_count_penalty)),
        (_keep_draws if draws_before_mask else _mask_tokens, jnp.any(batch.has_token_mask)),
    )

    def apply(x: Array) -> Array:
        for step, needed in steps:
            x = lax.cond(needed, step, lambda x, batch: x, x, batch)
        return x

    return lax.cond(jnp.any(jnp.stack([needed for _, needed in steps])), apply, lambda x: x, logits)


def _mask_tokens(x: Float[Array, "b v"], batch: SamplingBatch) -> Float[Array, "b v"]:
    bits = (batch.token_mask[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    is_allowed = bits.reshape(len(x), -1)[:, : x.shape[1]] != 0
    return jnp.where(is_allowed | ~batch.has_token_mask[:, None], x, -jnp.inf)


def _keep_draws(x: Float[Array, "b v"], batch: SamplingBatch) -> Float[Array, "b v"]:
    """Masks tokens. If the unmasked draw of a row with keeps_draw is allowed, masks all other tokens."""
    is_random = batch.temperature >= GREEDY_BELOW
    drawn = _draw(x, batch, is_random, _keys(batch, again=False))[:, None]
    masked = _mask_tokens(x, batch)
    is_kept = (is_random & batch.keeps_draw)[:, None]
    is_kept &= jnp.take_along_axis(masked, drawn, axis=-1) != -jnp.inf
    return jnp.where(is_kept & (jnp.arange(x.shape[1]) != drawn), -jnp.inf, masked)


def _add_bias(x: Float[Array, "b v"], batch: SamplingBatch) -> Float[Array, "b v"]:
    return x.at[jnp.arange(len(x))[:, None], batch.bias_ids].add(batch.bias_values, mode="drop")


def _penalize_repetition(x: Float[Array, "b v"], batch: SamplingBatch) -> Float[Array, "b v"]:
    seen = _token_counts(batch) != 0
    penalty = batch.repetition_penalty[:, None]
    return jnp.where(seen, jnp.where(x > 0, x / penalty, x * penalty), x)


def _penalize_counts(x: Float[Array, "b v"], batch: SamplingBatch) -> Float[Array, "b v"]:
    counts = _token_counts(batch) & (IN_PROMPT - 1)
    x = x - batch.frequency_penalty[:, None] * counts
    return x - batch.presence_penalty[:, None] * (counts > 0)


def _token_counts(batch: SamplingBatch) -> Int[Array, "b v"]:
    """Returns the token counts of the rows with penalties. Counts of other rows have no effect."""
    counts = batch.token_counts.at[batch.count_slots].get(mode="clip")
    if batch.drafts is None:
        return counts
    return counts.at[jnp.arange(len(counts))[:, None], batch.drafts].add(1, mode="drop")


def _argmax(x: Float[Array, "b v"]) -> Int[Array, " b"]:
    """Returns the first index of each row's maximum. On a CPU, this is three times as fast as jnp.argmax."""
    index = jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), index, x.shape[1] - 1), axis=-1)


def _draw(
    logits: Float[Array, "b v"], batch: SamplingBatch, is_random: Bool[Array, " b"], keys: Array
) -> Int[Array, " b"]:
    """Draws a token per row after temperature, min_p, top_k and top_p; greedy rows get any token."""
    gap, limit = _gap_and_limit(logits, batch, is_random)
    return _inverse_cdf(_weights(gap, limit), keys)


def _keys(batch: SamplingBatch, *, again: bool = True) -> Array:
    """Returns a random key per row, derived from (seed, position).

    If `again` is True, rows with keeps_draw get another key than in their draw without the mask.
    """
    keys = jax.random.wrap_key_data(batch.seed, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, batch.position)
    if not again:
        return keys
    # The second draw happens only if the mask forbids the first token. Given that, the first random number is
    # no longer uniformly distributed, so it must not be used again.
    return jnp.where(batch.keeps_draw, jax.vmap(jax.random.fold_in, (0, None))(keys, 1), keys)


def _draw_logits(
    logits: Float[Array, "b v"], batch: SamplingBatch, is_random: Bool[Array, " b"]
) -> Float[Array, "b v"]:
    """Returns the logits of the distribution that _draw uses; logits of greedy rows are unchanged."""
    gap, limit = _gap_and_limit(logits, batch, is_random)
    return jnp.where(is_random[:, None], jnp.where(gap <= limit[:, None], -gap, -jnp.inf), logits)


def _gap_and_limit(
    logits: Float[Array, "b v"], batch: SamplingBatch, is_random: Bool[Array, " b"]
) -> tuple[Float[Array, "b v"], Float[Array, " b"]]:
    """Returns the gap of each token, and the limit up to which min_p, top_k and top_p keep tokens.

    The gap of a token is the difference between the row's largest scaled logit and the token's. Each of the
    three filters keeps the tokens whose gap is at most some limit. So together they are one limit per row,
    which is found without sorting.
    """
    temperature = jnp.where(is_random, batch.temperature, 1.0)[:, None]
    gap = (jnp.max(logits, axis=-1, keepdims=True) - logits) / temperature
    limit = jnp.abs(jnp.log(batch.min_p))  # -log(min_p), without a negative zero
    has_top_k, has_top_p = is_random & (batch.top_k > 0), is_random & (batch.top_p < 1)

    def top_k(limit: Array) -> Array:
        bound = _smallest_limit(gap, jnp.ones((), jnp.int32), jnp.where(has_top_k, batch.top_k, 0))
        return jnp.where(has_top_k, jnp.minimum(limit, bound), limit)

    def top_p(limit: Array) -> Array:
        weights = _weights(gap, limit)
        total = jnp.sum(weights, axis=-1, dtype=jnp.int32)
        target = jnp.ceil(batch.top_p * total).astype(jnp.int32)
        bound = _smallest_limit(gap, weights, jnp.where(has_top_p, jnp.clip(target, 1, total), 0))
        return jnp.where(has_top_p, jnp.minimum(limit, bound), limit)

    limit = lax.cond(jnp.any(has_top_k), top_k, lambda x: x, limit)
    return gap, lax.cond(jnp.any(has_top_p), top_p, lambda x: x, limit)


def _weights(gap: Float[Array, "b v"], limit: Float[Array, " b"]) -> Int[Array, "b v"]:
    """Returns the probabilities of tokens with gap <= limit as integers.

    The integers of a row sum to about 2**29 to 2**30. A sum of integers is the same in any order, so results
    do not depend on how XLA divides the sum for some B. The sum of the float probabilities does depend on it,
    but the scale is rounded to a power of two, which removes the difference. The error of a probability is at
    most 2**-30. Probabilities below 2**-31 become 0, so these tokens are never drawn.
    """
    p = jnp.where(gap <= limit[:, None], jnp.exp(-gap), 0.0)
    _, exponent = jnp.frexp(jnp.sum(p, axis=-1, keepdims=True))
    return jnp.round(p * jnp.ldexp(jnp.float32(1), 30 - exponent)).astype(jnp.int32)


def _smallest_limit(
    gap: Float[Array, "b v"], weights: Int[Array, "..."], target: Int[Array, " b"]
) -> Float[Array, " b"]:
    """Returns a limit whose set {gap <= limit} is the smallest with a total weight of at least target.

    The limit is inf if the sum of all weights is less than target, and 0 if target is 0. It is found by
    bisection over the bits of the limit, because non-negative floats have the same order as their bits. The
    bisection ends when all rows are done.
    """
    key = lax.bitcast_convert_type(gap, jnp.int32)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        mass = jnp.sum(jnp.where(key <= middle[:, None], weights, 0), axis=-1, dtype=jnp.int32)
        high = jnp.where(mass >= target, middle, high)
        low = jnp.where(mass > target, low, jnp.where(mass == target, middle, middle + 1))
        return low, high

    low, high = jnp.zeros_like(target), jnp.where(target > 0, _INF_BITS, 0)
    _, high = lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))
    return lax.bitcast_convert_type(high, jnp.float32)


def _inverse_cdf(weights: Int[Array, "b v"], keys: Array) -> Int[Array, " b"]:
    """Draws an index per row in proportion to integer weights.

    It first finds the group of indices and then the index in the group.
    """
    rows, size = weights.shape
    groups = jnp.pad(weights, ((0, 0), (0, -size % _GROUP))).reshape(rows, -1, _GROUP)
    group_weights = jnp.sum(groups, axis=-1, dtype=jnp.int32)
    total = jnp.sum(group_weights, axis=-1, dtype=jnp.int32)
    group, rest = _find(group_weights, _integers_below(total, keys))
    chosen = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    index, _ = _find(chosen, rest)
    return jnp.minimum(group * _GROUP + index, size - 1)


def _integers_below(limit: Int[Array, " b"], keys: Array) -> Int[Array, " b"]:
    """Draws floor(limit * u) per row, where u is uniform in [0, 1) with 30 bits.

    The product is computed in 15-bit digits that fit into 32 bits. jax.random.randint cannot be used: for
    such large limits it noticeably favors small numbers.
    """
    bits = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(keys)
    u1, u0 = bits >> 17, (bits >> 2) & 0x7FFF
    n1, n0 = limit.astype(jnp.uint32) >> 15, limit.astype(jnp.uint32) & 0x7FFF
    return (u1 * n1 + ((u1 * n0 + u0 * n1 + (u0 * n0 >> 15)) >> 15)).astype(jnp.int32)


def _find(weights: Int[Array, "b n"], value: Int[Array, " b"]) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """Returns the index whose interval in the running sum of weights contains value, and the offset in it."""
    ends = jnp.cumsum(weights, axis=-1, dtype=jnp.int32)
    index = jnp.sum(ends <= value[:, None], axis=-1, dtype=jnp.int32)
    index = jnp.minimum(index, weights.shape[1] - 1)
    start = jnp.take_along_axis(ends - weights, index[:, None], axis=-1)[:, 0]
    return index, value - start
