"""The few shapes that steps are padded to, so that each is compiled once."""

import dataclasses
import functools
from typing import NamedTuple

from jax_paged.config.engine_args import EngineConfig
from jax_paged.speculation import sizes_up_to

# XLA compiles what surrounds the products of fewer rows in another way.
MIN_INVARIANT_ROWS = 16


class StepVariant(NamedTuple):
    """What the program of a step depends on beside its size; programs differ between variants.

    Args:
        is_decode: Whether every row has one token.
        num_steps: Decode steps in one program; 1 without multi-step decoding.
        num_drafts: Maximum number of drafts of a row; 0 in steps that verify none.
        has_adapters: Whether rows may have an adapter.
        has_embeds: Whether token rows may have vectors in place of tokens.
    """

    is_decode: bool
    num_steps: int = 1
    num_drafts: int = 0
    has_adapters: bool = False
    has_embeds: bool = False


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A shape that a step is padded to.

    Args:
        is_decode: Whether every row has just one token, and row b is token row b.
        num_tokens: Token rows.
        num_seqs: Rows, and as many rows of logits, unless there are drafts.
        num_steps: Decode steps that are done in one; 1 without multi-step decoding.
        num_drafts: Most drafts of a row; 0 unless it serves speculation. Then there is a row of logits for
            each token row.
        has_adapters: Whether rows may have an adapter.
        has_embeds: Whether token rows may have vectors of their own in place of tokens.
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
        """Rows of logits."""
        return self.num_tokens if self.num_drafts else self.num_seqs

    @functools.cached_property
    def variant(self) -> StepVariant:
        """Everything except the size."""
        return StepVariant(
            self.is_decode, self.num_steps, self.num_drafts, self.has_adapters, self.has_embeds
        )

    def __str__(self) -> str:
        more = "embeds-" * self.has_embeds + "lora-" * self.has_adapters
        if self.num_drafts:
            return f"{more}verify {self.num_tokens}x{self.num_seqs}"
        if self.num_steps > 1:
            return f"{more}burst {self.num_steps}x{self.num_seqs}"
        size = f"decode {self.num_seqs}" if self.is_decode else f"mixed {self.num_tokens}x{self.num_seqs}"
        return more + size


def plan_buckets(
    max_num_seqs: int, max_num_batched_tokens: int, *, is_fine: bool = False, min_rows: int = 1
) -> list[Bucket]:
    """Returns the few shapes that serve every step, the largest of each kind last.

    Decode steps double from 1 to max_num_seqs. Mixed steps (prefill chunks and decodes together) go in
    steps of four to a quarter of the token budget, then double: small prompts stay quick, and large steps
    are nearly full anyway.

    Args:
        max_num_seqs: Maximum rows of a step.
        max_num_batched_tokens: Maximum tokens of a step.
        is_fine: Whether a padded row costs as much as a live one, as on a CPU. Then decode steps go on in
            eighths of max_num_seqs, but not fewer than 8 rows, and mixed steps double to a quarter of the
            token budget, and go on in quarters.
        min_rows: Rows of the smallest step, where the device has the tokens for it.
    """
    min_rows = min(min_rows, max_num_batched_tokens)
    max_num_seqs = max(max_num_seqs, min_rows)
    max_rows = min(max_num_seqs, max_num_batched_tokens)
    doubled = [2**i for i in range(max_num_batched_tokens.bit_length())]
    decode, mixed = {n for n in doubled if n < max_rows}, {max_num_batched_tokens}
    if is_fine:
        apart = max(8, max_rows // 8)
        decode = {n for n in decode if n <= 2 * apart} | set(range(2 * apart, max_rows, apart))
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
    max_num_seqs: int, max_num_batched_tokens: int, *, has_invariant_products: bool
) -> list[Bucket]:
    """Returns one shape for decode steps and one for the others, in which a token gets the same sums.

    Args:
        max_num_seqs: As `plan_buckets` takes it, and so is max_num_batched_tokens.
        has_invariant_products: Whether a product adds up a row in the same order however many rows it has.
            Otherwise both shapes have as many.
    """
    rows = max(max_num_seqs, MIN_INVARIANT_ROWS) if has_invariant_products else max_num_batched_tokens
    buckets = plan_buckets(max_num_seqs, max_num_batched_tokens, min_rows=rows)
    return list({bucket.is_decode: bucket for bucket in buckets}.values())


def plan_multi_step(buckets: list[Bucket], num_steps: int) -> list[Bucket]:
    """Returns the shapes of multi-step decoding, in ascending order: those of decode steps, none for 1."""
    decode = [b for b in buckets if b.is_decode and not b.has_embeds and num_steps > 1]
    return [dataclasses.replace(bucket, num_steps=num_steps) for bucket in decode]


def plan_verifying(config: EngineConfig) -> list[Bucket]:
    """Returns the shapes of steps with drafts, in ascending order: they double, as rows are short or long."""
    speculation = config.speculation
    if speculation is None:
        return []
    sizes = sizes_up_to(speculation.max_rows(config.max_num_batched_tokens))
    num_drafts = speculation.num_tokens
    return [Bucket(False, n, min(n, config.max_num_seqs), num_drafts=num_drafts) for n in sizes]


def plan_variants(
    buckets: list[Bucket], has_adapters: bool, has_embeds: bool, *, is_invariant: bool
) -> list[Bucket]:
    """Returns shapes, and those of the steps that need more than others, each kind in ascending order.

    Steps without adapters and vectors of their own are what they are in an engine that knows neither. Vectors
    are in prompts, so that mixed steps alone bring them, if there are any.

    Args:
        buckets: Of `plan_buckets`.
        has_adapters: Whether requests may have adapters.
        has_embeds: Whether prompts may have vectors of their own.
        is_invariant: Whether one program has to serve all steps of a kind.
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
    kinds = {b.is_decode for b in embedded}
    return [*(b for b in (adapted or buckets) if b.is_decode not in kinds), *embedded]
