"""User settings of speculative decoding; the names are vLLM's."""

import dataclasses
from typing import Any, Literal, Self

from jax_paged.arguments.plain_values import make_plain
from jax_paged.arguments.suggestions import field_names, suggestions, suggests_fields
from jax_paged.errors import Problems, check, check_choice, check_int

# Default maximum number of draft tokens per sequence and step. "ngram" drafts cost little, and long drafts
# are often right in repetitive text.
_NUM_TOKENS = {"ngram": 15, "draft_model": 4, "eagle3": 4}


@suggests_fields
@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of speculative decoding, for EngineArgs.speculative_config.

    Example:
        >>> llm = LLM(speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=8))

    Args:
        method: Source of the draft tokens. "ngram" searches the text for an earlier occurrence of its last
            tokens and drafts the tokens that followed there. "draft_model" uses a smaller model with the same
            vocabulary. "eagle3" uses an EAGLE-3 head trained for the model. None means "draft_model" if
            `model` is set, else "ngram".
        model: For "draft_model", the local folder or Hub id of the model. For "eagle3", the local folder of
            the head. Must be None for "ngram".
        num_speculative_tokens: Maximum number of draft tokens per sequence and step; None means 15 for
            "ngram" and 4 for the other methods.
        prompt_lookup_min: For "ngram", the minimum number of last tokens that have to match.
        prompt_lookup_max: For "ngram", the maximum number of last tokens to compare.
        adaptive: Whether sequences get fewer or no drafts if verifying drafts does not save time for them.
            False verifies all drafts.

    Raises:
        ValueError: If a value is not allowed; the message lists every problem.
    """

    method: Literal["ngram", "draft_model", "eagle3"] | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    adaptive: bool = True

    def __post_init__(self) -> None:
        make_plain(self)
        problems = Problems()
        note = problems.note
        note(check_choice, "method", self.method, (None, *_NUM_TOKENS))
        is_name = isinstance(self.model, str) and bool(self.model)
        if self.resolved_method in ("draft_model", "eagle3"):
            note(check, is_name, "model", self.model, "the name or folder of a draft model")
        else:
            note(check, self.model is None, "model", self.model, "None with method='ngram'")
        if self.num_speculative_tokens is not None:
            note(check_int, "num_speculative_tokens", self.num_speculative_tokens, 1, 64)
        note(check_int, "prompt_lookup_min", self.prompt_lookup_min, 1)
        note(check_int, "prompt_lookup_max", self.prompt_lookup_max, 1)
        if isinstance(self.prompt_lookup_min, int) and isinstance(self.prompt_lookup_max, int):
            ok = self.prompt_lookup_min <= self.prompt_lookup_max
            allowed = f"at least prompt_lookup_min, which is {self.prompt_lookup_min}"
            note(check, ok, "prompt_lookup_max", self.prompt_lookup_max, allowed)
        note(check_choice, "adaptive", self.adaptive, (False, True))
        problems.raise_if_any()

    @property
    def resolved_method(self) -> Literal["ngram", "draft_model", "eagle3"]:
        """The source of the draft tokens."""
        return self.method or ("ngram" if self.model is None else "draft_model")

    @property
    def num_tokens(self) -> int:
        """The maximum number of draft tokens per sequence and step."""
        return self.num_speculative_tokens or _NUM_TOKENS[self.resolved_method]

    @classmethod
    def of(cls, given: Any) -> Self | None:
        """Returns the SpeculativeConfig for the value of EngineArgs.speculative_config.

        Args:
            given: A SpeculativeConfig, a dict of its fields, or None.

        Raises:
            ValueError: If the value has another type or unknown fields.
        """
        if given is None or isinstance(given, cls):
            return given
        names = field_names(cls)
        ok = isinstance(given, dict) and given.keys() <= set(names)
        close = suggestions(given, names) if isinstance(given, dict) else ""
        allowed = f"None or a dict with some of the keys {', '.join(names)}"
        check(ok, "speculative_config", given, allowed, remedy=close)
        return cls(**given)
