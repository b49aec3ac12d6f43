"""Logits to tokens, on the device: one pure function of the logits and each row's parameters."""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

GREEDY_BELOW = 1e-5
# The bit of a token count that says whether the token stands in the prompt; those below count the output.
IN_PROMPT = 1 << 30

# Tokens per group in the two-stage draw.
_GROUP = 128
# The bits of float32 infinity, read as an integer.
_INF_BITS = 0x7F800000


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """What the sampler needs of each of B rows of logits; a padding row has temperature 0 and no effects.

    Args:
        temperature: [B] float32; below 1e-5 is greedy.
        top_p: [B] float32 in (0, 1]; 1 is off.
        top_k: [B] int32; 0 or less is off.
        min_p: [B] float32 in [0, 1]; 0 is off.
        presence_penalty: [B] float32; 0 is off.
        frequency_penalty: [B] float32; 0 is off.
        repetition_penalty: [B] float32, positive; 1 is off.
        logprob_temperature: [B] float32, positive; divides the logits before anything else. Beams are ranked
            by log-probabilities at a temperature; 1 for all others.
        seed: [B, 2] uint32, the sequence's seed in two words.
        position: [B] int32, where in its sequence the token to choose will stand.
        wants_logprobs: [B] bool, whether rank and most likely tokens are asked for.
        count_slots: [B] int32, the row of token_counts that belongs to a row with penalties; S for others.
        token_counts: [S, V] int32, how often each token stands in the output so far, plus IN_PROMPT if it
            stands in the prompt. Only rows with penalties read it.
        has_token_mask: [B] bool, whether token_mask restricts the row.
        token_mask: [B, ceil(V / 32)] int32, bit i % 32 of word i // 32 is 1 if token i may be chosen; read
            where has_token_mask is True.
        keeps_draw: [B] bool, whether a token that is drawn without the mask, and that it allows, stays.
        bias_ids: [B, N] int32, the tokens of bias_values, padded with vocab_size.
        bias_values: [B, N] float32, finite or -inf.
        drafts: [B, K] int32, of rows with penalties the tokens that token_counts does not count yet, padded
            with vocab_size; None if there are none.
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
    """The chosen token of each of B rows; log-probabilities are those of the raw or the processed logits.

    Args:
        token_ids: [B] int32.
        logprob: [B] float32 of the chosen token.
        rank: [B] int32, 1 + the number of tokens more likely than the chosen one; 0 where not wanted.
        top_token_ids: [B, max_logprobs] int32, most likely first; 0 where not wanted.
        top_logprobs: [B, max_logprobs] float32 of them; 0 where not wanted.
        is_finite: [B] bool; False where the logits held NaN or +inf, or nothing but -inf. Such a row's
            token is 0 and its other values mean nothing.
        has_choice: [B] bool; False where the logits are finite, but mask and bias together leave no token
            to choose. Such a row's token is 0, which may be forbidden and must not be used.
    """

    token_ids: Int[Array, " b"]
    logprob: Float[Array, " b"]
    rank: Int[Array, " b"]
    top_token_ids: Int[Array, "b k"]
    top_logprobs: Float[Array, "b k"]
    is_finite: Bool[Array, " b"]
    has_choice: Bool[Array, " b"]


class Sampler(Protocol):
    """A choice of tokens of one's own, traced into the step: a pure function of arrays."""

    def __call__(self, logits: Float[Array, "b v"], batch: SamplingBatch) -> Int[Array, " b"]:
        """Returns a token id per row, of logits after mask, bias and penalties; of greedy rows too.

        Whoever draws at random makes keys of batch.seed and batch.position, so that a request gets the same
        tokens in any batch. A row whose id is no token ends its request, which says so.
        """
        ...


@dataclasses.dataclass(frozen=True)
class SamplerOptions:
    """How every step of an engine draws tokens.

    Args:
        max_logprobs: Most likely tokens that are reported.
        is_processed: Whether log-probabilities are those of the distribution that is drawn from. Of greedy
            rows, that is the one before temperature, min_p, top_k and top_p.
        custom: Chooses in place of temperature, min_p, top_k, top_p and the draw; None for these.
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
        """Chooses one token per row: bias, penalties, mask, temperature, min_p, top_k, top_p, then the draw.

        A random row that keeps_draw gets what it would get without its mask, where that is allowed; if not,
        it is drawn again. Without filters, each allowed token has its share of the probability of all of
        them then.

        A row's result depends on its own logits and parameters only, and the draw on (seed, position): not on
        the row's index, its neighbours or B. What no row asks for is not computed.

        Args:
            logits: [B, V] float32; -inf is a token that can't be.
            batch: The rows' parameters.
            processed: float32, the logits to choose from, if others have changed them; they count as `logits`
                do, which stay those whose log-probabilities are reported.
            forced: int32, the token to choose whatever is drawn, -1 for none. Nothing else changes.

        Returns:
            The chosen tokens and their log-probabilities.

        Source: the order and the meaning of each parameter are those of vLLM 1's sampler, except that
        the bounds of top_k and top_p keep all tokens tied at the bound.
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
        # One logit per row tells: the largest is -inf only where all are.
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
            logits = lax.cond(jnp.any(is_random), _drawn_from, lambda x, *_: x, adjusted, batch, is_random)
        logprobs = token_logprobs(logits, token_ids, batch.wants_logprobs, max_logprobs=self.max_logprobs)
        return SampledTokens(token_ids, *logprobs, is_finite, has_choice)


def token_logprobs(
    logits: Float[Array, "b v"],
    token_ids: Int[Array, " b"],
    wanted: Bool[Array, " b"],
    *,
    max_logprobs: int,
) -> tuple[Float[Array, " b"], Int[Array, " b"], Int[Array, "b k"], Float[Array, "b k"]]:
    """Returns logprob, rank, top_token_ids and top_logprobs of given tokens, as in SampledTokens.

    Args:
        logits: [B, V] float32.
        token_ids: [B] int32 in [0, V).
        wanted: [B] bool; all but logprob is 0 where False, and costs nothing if all are False.
        max_logprobs: Most likely tokens to report; static, at most V. The lower id wins a tie.
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

    The mask comes last because a row that keeps_draw is drawn before it, with draws_before_mask (static). For
    other rows its place changes nothing: -inf stays -inf.
    """
    has_count_penalty = (batch.frequency_penalty != 0) | (batch.presence_penalty != 0)
    steps = (
        (_add_bias, jnp.any(batch.bias_ids < logits.shape[1])),
        (_penalise_repetition, jnp.any(batch.repetition_penalty != 1)),
        (_penalise_counts, jnp.any(has_count_penalty)),
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
    """Masks tokens; leaves rows that keep their draw only that, if it is allowed."""
    is_random = batch.temperature >= GREEDY_BELOW
    drawn = _draw(x, batch, is_random, _keys(batch, again=False))[:, None]
    masked = _mask_tokens(x, batch)
    is_kept = (is_random & batch.keeps_draw)[:, None]
    is_kept &= jnp.take_along_axis(masked, drawn, axis=-1) != -jnp.inf
    return jnp.where(is_kept & (jnp.arange(x.shape[1]) != drawn), -jnp.inf, masked)


def _add_bias(x: Float[Array, "b v"], batch: SamplingBatch) -> Float[Array, "b v"]:
    return x.at[jnp.arange(len(x))[:, None], batch.bias_ids].add(batch.bias_values, mode="drop")


def _penalise_repetition(x: Float[Array, "b v"], batch: SamplingBatch) -> Float[Array, "b v"]:
    seen = _token_counts(batch) != 0
    penalty = batch.repetition_penalty[:, None]
    return jnp.where(seen, jnp.where(x > 0, x / penalty, x * penalty), x)


def _penalise_counts(x: Float[Array, "b v"], batch: SamplingBatch) -> Float[Array, "b v"]:
    counts = _token_counts(batch) & (IN_PROMPT - 1)
    x = x - batch.frequency_penalty[:, None] * counts
    return x - batch.presence_penalty[:, None] * (counts > 0)


def _token_counts(batch: SamplingBatch) -> Int[Array, "b v"]:
    """Returns the token counts of the rows with penalties; those of the other rows are of no effect."""
    counts = batch.token_counts.at[batch.count_slots].get(mode="clip")
    if batch.drafts is None:
        return counts
    return counts.at[jnp.arange(len(counts))[:, None], batch.drafts].add(1, mode="drop")


def _argmax(x: Float[Array, "b v"]) -> Int[Array, " b"]:
    """The first index of each row's maximum. On a CPU this takes a third of the time of jnp.argmax."""
    index = jnp.arange(x.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), index, x.shape[1] - 1), axis=-1)


def _draw(
    logits: Float[Array, "b v"], batch: SamplingBatch, is_random: Bool[Array, " b"], keys: Array
) -> Int[Array, " b"]:
    """Draws a token per row after temperature, min_p, top_k and top_p; greedy rows get any token."""
    gap, limit = _gap_and_limit(logits, batch, is_random)
    return _inverse_cdf(_weights(gap, limit), keys)


def _keys(batch: SamplingBatch, *, again: bool = True) -> Array:
    """Returns a key per row, of (seed, position); another one if a row that keeps_draw is drawn `again`."""
    keys = jax.random.wrap_key_data(batch.seed, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, batch.position)
    if not again:
        return keys
    # What was refused says where the first number lay: it is not random any more.
    return jnp.where(batch.keeps_draw, jax.vmap(jax.random.fold_in, (0, None))(keys, 1), keys)


def _drawn_from(
    logits: Float[Array, "b v"], batch: SamplingBatch, is_random: Bool[Array, " b"]
) -> Float[Array, "b v"]:
    """Returns the logits of the distribution that _draw draws from; those of greedy rows as they are."""
    gap, limit = _gap_and_limit(logits, batch, is_random)
    return jnp.where(is_random[:, None], jnp.where(gap <= limit[:, None], -gap, -jnp.inf), logits)


def _gap_and_limit(
    logits: Float[Array, "b v"], batch: SamplingBatch, is_random: Bool[Array, " b"]
) -> tuple[Float[Array, "b v"], Float[Array, " b"]]:
    """Returns the gap of each token, and the limit up to which min_p, top_k and top_p keep a row's tokens.

    All three filters keep the tokens whose gap (how far the scaled logit lies below the row's largest) is
    at most some limit, so they meet in one number per row, found without a sort.
    """
    temperature = jnp.where(is_random, batch.temperature, 1.0)[:, None]
    gap = (jnp.max(logits, axis=-1, keepdims=True) - logits) / temperature
    limit = jnp.abs(jnp.log(batch.min_p))  # of a probability up to 1, so this is -log, without -0
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
    """Probabilities of the tokens with gap <= limit, as integers that sum to about 2**29 to 2**30 per row.

    Sums of integers are the same in any order, so no result depends on how a reduction is split for some
    B. The scale is a power of two for the same reason. A probability is off by at most 2**-30: one below
    2**-31 is never drawn.
    """
    p = jnp.where(gap <= limit[:, None], jnp.exp(-gap), 0.0)
    _, exponent = jnp.frexp(jnp.sum(p, axis=-1, keepdims=True))
    return jnp.round(p * jnp.ldexp(jnp.float32(1), 30 - exponent)).astype(jnp.int32)


def _smallest_limit(
    gap: Float[Array, "b v"], weights: Int[Array, "..."], target: Int[Array, " b"]
) -> Float[Array, " b"]:
    """Returns a limit whose set {gap <= limit} is the smallest with weights of at least target.

    It is inf where even all weights are less than target, and 0 where target is 0. Bisects over the bits
    of the limit, as floats that are not negative order as their bits do, until every row has its set.
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
    """Draws an index per row in proportion to integer weights: first a group of indices, then one of it."""
    rows, size = weights.shape
    groups = jnp.pad(weights, ((0, 0), (0, -size % _GROUP))).reshape(rows, -1, _GROUP)
    group_weights = jnp.sum(groups, axis=-1, dtype=jnp.int32)
    total = jnp.sum(group_weights, axis=-1, dtype=jnp.int32)
    group, rest = _find(group_weights, _integers_below(total, keys))
    chosen = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    index, _ = _find(chosen, rest)
    return jnp.minimum(group * _GROUP + index, size - 1)


def _integers_below(limit: Int[Array, " b"], keys: Array) -> Int[Array, " b"]:
    """Draws floor(limit * u) per row, u uniform in [0, 1) with 30 bits, in 15-bit digits that fit 32 bits.

    jax.random.randint is no choice: for limits this large it visibly favours the lower numbers.
    """
    bits = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(keys)
    u1, u0 = bits >> 17, (bits >> 2) & 0x7FFF
    n1, n0 = limit.astype(jnp.uint32) >> 15, limit.astype(jnp.uint32) & 0x7FFF
    return (u1 * n1 + ((u1 * n0 + u0 * n1 + (u0 * n0 >> 15)) >> 15)).astype(jnp.int32)


def _find(weights: Int[Array, "b n"], value: Int[Array, " b"]) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """Returns the index whose stretch of the running sum holds value, and how far into it value lies."""
    ends = jnp.cumsum(weights, axis=-1, dtype=jnp.int32)
    index = jnp.sum(ends <= value[:, None], axis=-1, dtype=jnp.int32)
    index = jnp.minimum(index, weights.shape[1] - 1)
    start = jnp.take_along_axis(ends - weights, index[:, None], axis=-1)[:, 0]
    return index, value - start
