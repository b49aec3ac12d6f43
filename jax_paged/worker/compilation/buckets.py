"""Buckets: the shapes that steps are padded to, so that only a few programs have to be compiled."""

import dataclasses
import functools
from typing import NamedTuple

from jax_paged.config.engine_config import EngineConfig
from jax_paged.speculation import sizes_up_to

# Minimum number of rows with batch_invariant. For fewer rows, XLA compiles the operations around matrix
# products differently.
MIN_INVARIANT_ROWS = 16


class StepVariant(NamedTuple):
    """Properties of a step, other than its size, that determine its program.

    Args:
        is_decode: Whether every sequence has exactly one token.
        num_steps: Number of decode steps in the program; 1 without multi-step decoding.
        num_drafts: Maximum number of drafts per sequence; 0 in steps that verify no drafts.
        has_adapters: Whether sequences may have an adapter.
        has_embeds: Whether embeddings may replace tokens.
    """

    is_decode: bool
    num_steps: int = 1
    num_drafts: int = 0
    has_adapters: bool = False
    has_embeds: bool = False


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A shape that steps are padded to.

    Args:
        is_decode: Whether every sequence has exactly one token, so that sequence b is token row b.
        num_tokens: Number of token rows.
        num_seqs: Number of scheduled sequences.
        num_steps: Number of decode steps in the program; 1 without multi-step decoding.
        num_drafts: Maximum number of drafts per sequence; 0 in buckets for steps that verify no drafts.
        has_adapters: Whether sequences may have an adapter.
        has_embeds: Whether embeddings may replace tokens.
    """

    is_decode: bool
    num_tokens: int
    num_seqs: int
    num_steps: int = 1
    num_drafts: int = 0
    has_adapters: bool = False
    has_embeds: bool = False

    @functools.cached_property
    def num_logits(self) -> int:
        """The number of logits rows: one per token row if the bucket is for drafts, else one per sequence."""
        return self.num_tokens if self.num_drafts else self.num_seqs

    @functools.cached_property
    def variant(self) -> StepVariant:
        """All properties except the size."""
        return StepVariant(
            self.is_decode, self.num_steps, self.num_drafts, self.has_adapters, self.has_embeds
        )

    def __str__(self) -> str:
        prefix = "embeds-" * self.has_embeds + "lora-" * self.has_adapters
        if self.num_drafts:
            return f"{prefix}verify {self.num_tokens}x{self.num_seqs}"
        if self.num_steps > 1:
            return f"{prefix}multi-step {self.num_steps}x{self.num_seqs}"
        size = f"decode {self.num_seqs}" if self.is_decode else f"mixed {self.num_tokens}x{self.num_seqs}"
        return prefix + size


def plan_buckets(
    max_num_seqs: int, max_num_batched_tokens: int, *, minimizes_padding: bool = False, min_rows: int = 1
) -> list[Bucket]:
    """Returns the decode buckets and the mixed buckets, each in ascending order.

    The sizes of decode buckets double from 1 to max_num_seqs. Mixed buckets are for steps with prefill chunks
    and decodes. Their numbers of tokens are max_num_batched_tokens, a half and a quarter of it, and a 16th, a
    64th and so on, as long as the number is at least 16. The small buckets keep short prompts fast.

    Args:
        max_num_seqs: Maximum number of sequences in a step.
        max_num_batched_tokens: Maximum number of tokens in a step.
        minimizes_padding: Whether to plan more buckets, because a padded row costs as much as a used one, as
            on a CPU. Decode buckets then double only up to a quarter of max_num_seqs, and grow by an eighth
            of it (at least 8) after that. Mixed buckets double from 32 to a quarter of
            max_num_batched_tokens, and grow by quarters after that.
        min_rows: Minimum size of a decode bucket, if max_num_batched_tokens is not smaller.
    """
    min_rows = min(min_rows, max_num_batched_tokens)
    max_num_seqs = max(max_num_seqs, min_rows)
    max_rows = min(max_num_seqs, max_num_batched_tokens)
    doubled = [2**i for i in range(max_num_batched_tokens.bit_length())]
    decode, mixed = {n for n in doubled if n < max_rows}, {max_num_batched_tokens}
    if minimizes_padding:
        step = max(8, max_rows // 8)
        decode = {n for n in decode if n <= 2 * step} | set(range(2 * step, max_rows, step))
        quarter = max_num_batched_tokens // 4
        mixed |= {n for n in doubled if 32 <= n < quarter} | {quarter, 2 * quarter, 3 * quarter}
    else:
        mixed |= {max_num_batched_tokens // 2, max_num_batched_tokens // 4}
        size = max_num_batched_tokens // 16
        while size >= 16:
            mixed.add(size)
            size //= 4
    decode = {n for n in decode if n >= min_rows} | {max_rows}
    buckets = [Bucket(True, n, n) for n in sorted(decode)]
    return buckets + [Bucket(False, t, min(t, max_num_seqs)) for t in sorted(mixed) if t > 1]


def plan_invariant_buckets(
    max_num_seqs: int, max_num_batched_tokens: int, *, has_invariant_matmuls: bool
) -> list[Bucket]:
    """Returns one decode bucket and one mixed bucket, in which a token has bitwise equal results.

    Args:
        max_num_seqs: See plan_buckets.
        max_num_batched_tokens: See plan_buckets.
        has_invariant_matmuls: Whether matrix products sum up a row in the same order for any number of rows.
            If not, both buckets get the same number of rows.
    """
    rows = max(max_num_seqs, MIN_INVARIANT_ROWS) if has_invariant_matmuls else max_num_batched_tokens
    buckets = plan_buckets(max_num_seqs, max_num_batched_tokens, min_rows=rows)
    return list({bucket.is_decode: bucket for bucket in buckets}.values())


def plan_multi_step(buckets: list[Bucket], num_steps: int) -> list[Bucket]:
    """Returns the buckets of multi-step decoding in ascending order; none if num_steps is 1."""
    decode = [b for b in buckets if b.is_decode and not b.has_embeds and num_steps > 1]
    return [dataclasses.replace(bucket, num_steps=num_steps) for bucket in decode]


def plan_verifying(config: EngineConfig) -> list[Bucket]:
    """Returns the buckets for steps with drafts in ascending order. Their sizes double."""
    speculation = config.speculation
    if speculation is None:
        return []
    sizes = sizes_up_to(speculation.max_rows(config.max_num_batched_tokens))
    num_drafts = speculation.num_tokens
    return [Bucket(False, n, min(n, config.max_num_seqs), num_drafts=num_drafts) for n in sizes]


def plan_variants(
    buckets: list[Bucket], has_adapters: bool, has_embeds: bool, *, is_invariant: bool
) -> list[Bucket]:
    """Returns buckets and their variants with adapters and embeddings, each type in ascending order.

    Steps without adapters and embeddings use the same programs as in an engine without these features.
    Embeddings occur in prompts. Therefore only mixed buckets get a variant with embeddings, if there are
    mixed buckets.

    Args:
        buckets: The buckets from plan_buckets and plan_verifying.
        has_adapters: Whether requests may have adapters.
        has_embeds: Whether prompts may contain embeddings.
        is_invariant: Whether all decode steps, and all mixed steps, have to use the same program. Only the
            variant with the most features is then returned.
    """
    adapted = [dataclasses.replace(b, has_adapters=True) for b in buckets] if has_adapters else []
    has_mixed = not all(b.is_decode for b in buckets)
    embedded = [
        dataclasses.replace(b, has_embeds=True)
        for b in (adapted or buckets)
        if has_embeds and not b.num_drafts and not (b.is_decode and has_mixed)
    ]
    if not is_invariant:
        return [*buckets, *adapted, *embedded]
    types = {b.is_decode for b in embedded}
    return [*(b for b in (adapted or buckets) if b.is_decode not in types), *embedded]
