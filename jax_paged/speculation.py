"""Settings of speculative decoding, and the sizes of steps that verify draft tokens."""

import dataclasses
from typing import Literal

from jax_paged.errors import check_choice, check_int, check_number


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Resolved settings of speculative decoding, with estimates of its cost.

    Until the engine has measured a step with n token rows, its time is estimated to be proportional to
    num_free_rows + n: reading the weights takes as long as computing num_free_rows rows.

    Args:
        method: Source of the draft tokens. "ngram": an earlier occurrence of the last tokens in the text; the
            tokens that followed there are the draft. "draft_model": a smaller model. "eagle3": an EAGLE-3
            head on the model's hidden states.
        num_tokens: Maximum number of draft tokens per sequence and step.
        min_match: For "ngram", the minimum number of last tokens that have to match.
        max_match: For "ngram", the maximum number of last tokens to compare.
        num_free_rows: Time to read the weights, expressed as the number of token rows that take as long to
            compute.
        model_cost: Estimated time of one pass of the draft model, as a fraction of one pass of the model;
            used until it is measured.
        is_adaptive: Whether sequences get fewer or no drafts if verifying drafts does not save time for them.
            False verifies all drafts.

    Raises:
        ValueError: If a value is out of range.
    """

    method: Literal["ngram", "draft_model", "eagle3"]
    num_tokens: int
    min_match: int = 2
    max_match: int = 4
    num_free_rows: int = 16
    model_cost: float = 0.0
    is_adaptive: bool = True

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("ngram", "draft_model", "eagle3"))
        check_int("num_tokens", self.num_tokens, 1)
        check_int("min_match", self.min_match, 1)
        check_int("max_match", self.max_match, self.min_match)
        check_int("num_free_rows", self.num_free_rows, 0)
        check_number("model_cost", self.model_cost, 0, 1)
        check_choice("is_adaptive", self.is_adaptive, (False, True))

    def max_rows(self, max_num_batched_tokens: int) -> int:
        """Returns the maximum number of token rows in a step with drafts.

        With is_adaptive, steps are limited to a size above which more rows hardly save time.

        Args:
            max_num_batched_tokens: Token budget of a step.
        """
        # In a step of this size, reading the weights takes about 1/17 of the time; more rows save little.
        most = 16 * max(1, self.num_free_rows) if self.is_adaptive else max_num_batched_tokens
        return min(max_num_batched_tokens, most)


def sizes_up_to(max_tokens: int) -> list[int]:
    """Returns the numbers of token rows that steps with drafts are padded to: powers of 2, and max_tokens."""
    return [2**i for i in range(1, max_tokens.bit_length()) if 2**i < max_tokens] + [max_tokens]
