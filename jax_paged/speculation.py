"""Settings of speculative decoding, and the sizes of its steps."""

import dataclasses
from typing import Literal

from jax_paged.errors import check_choice, check_int, check_number


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How drafts are made, and what they cost.

    Args:
        method: "ngram": what followed the last tokens where they stood before. "draft_model": what another
            model draws, on the device. "eagle3": what a head draws that continues the model's hidden states.
        num_tokens: Most drafts of a sequence in one step.
        min_match: Of "ngram", how many tokens have to be equal.
        max_match: Of "ngram", how many are compared.
        num_free_rows: Token rows whose products take as long as reading the weights: until its time is known,
            a step of n token rows is taken to cost num_free_rows + n.
        model_cost: What a pass of the draft model is taken to cost until then, as a share of a pass of the
            model.
        is_adaptive: Whether sequences whose drafts do not pay get none; False verifies all that there are.

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
        """Returns the token rows of the largest step with drafts: larger ones would never pay."""
        most = 16 * max(1, self.num_free_rows) if self.is_adaptive else max_num_batched_tokens
        return min(max_num_batched_tokens, most)


def sizes_up_to(max_tokens: int) -> list[int]:
    """Returns the token rows that steps with drafts are padded to: they double."""
    return [2**i for i in range(1, max_tokens.bit_length()) if 2**i < max_tokens] + [max_tokens]
