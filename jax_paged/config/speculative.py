"""How an engine speculates, as users say it; the names are vLLM's."""

import dataclasses
from typing import Any, Literal, Self

from jax_paged.arguments.plain_values import make_plain
from jax_paged.arguments.suggestions import field_names, suggestions, suggests_fields
from jax_paged.errors import Problems, check, check_choice, check_int

# Most drafts of a sequence in one step; a text that repeats itself is often right for that long.
_NUM_TOKENS = {"ngram": 15, "draft_model": 4, "eagle3": 4}


@suggests_fields
@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """Where drafts of tokens come from, and how many there are.

    Args:
        method: "ngram" looks the last tokens up in the text before them and drafts what followed there;
            "draft_model" draws from a smaller model of the same vocabulary; "eagle3" from an EAGLE-3 head
            that was trained for the model. None takes "draft_model" if there is a model, else "ngram".
        model: Of "draft_model" and "eagle3": as EngineArgs.model; a head has to lie in a local folder.
        num_speculative_tokens: Most drafts of a sequence in one step; None takes 15 for "ngram", and 4 for
            the others.
        prompt_lookup_min: Of "ngram", how many of the last tokens have to be found.
        prompt_lookup_max: Of "ngram", how many are compared.
        adaptive: Whether sequences whose drafts do not pay get fewer or none; False always verifies all.

    Raises:
        ValueError: If a value is not allowed; the message names all of these.
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
        if self.kind in ("draft_model", "eagle3"):
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
    def kind(self) -> Literal["ngram", "draft_model", "eagle3"]:
        """The method."""
        return self.method or ("ngram" if self.model is None else "draft_model")

    @property
    def num_tokens(self) -> int:
        """Most drafts of a sequence in one step."""
        return self.num_speculative_tokens or _NUM_TOKENS[self.kind]

    @classmethod
    def of(cls, given: Any) -> Self | None:
        """Returns what EngineArgs.speculative_config says.

        Raises:
            ValueError: If it is none of None, a SpeculativeConfig, and a dict of its fields.
        """
        if given is None or isinstance(given, cls):
            return given
        names = field_names(cls)
        ok = isinstance(given, dict) and given.keys() <= set(names)
        close = suggestions(given, names) if isinstance(given, dict) else ""
        allowed = f"None or a dict with some of the keys {', '.join(names)}"
        check(ok, "speculative_config", given, allowed, remedy=close)
        return cls(**given)
