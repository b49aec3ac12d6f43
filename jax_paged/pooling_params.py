"""Parameters of pooling requests, and pooling settings of an engine; the names are vLLM's."""

import dataclasses
from typing import Any, Literal, Self

from jax_paged.arguments.ignored import ANY, ignores
from jax_paged.arguments.plain_values import make_plain
from jax_paged.arguments.suggestions import field_names, suggestions, suggests_fields
from jax_paged.errors import Problems, check, check_choice, check_int

PoolingTask = Literal["embed", "classify", "score", "token_embed"]


@ignores({"output_kind": ANY, "step_tag_id": (None,), "returned_token_ids": (None,)})
@dataclasses.dataclass
class PoolingParams:
    """Parameters of a pooling request, such as an embedding.

    Example:
        >>> llm.embed("a long text", pooling_params=PoolingParams(truncate_prompt_tokens=64))

    Args:
        truncate_prompt_tokens: Number of tokens to keep of a longer text: the last tokens for a decoder, the
            first tokens for an encoder. -1 keeps as many tokens as the model accepts. None keeps all tokens,
            unless the checkpoint defines a limit (docs/pooling.md).
        dimensions: Number of leading components to keep of an embedding, for models trained for it
            (Matryoshka embeddings); None keeps all.
        use_activation: Whether to apply softmax or sigmoid to the logits of a classifier, and to normalize
            embeddings to length 1. None uses the model's default.
        normalize: Another name of use_activation; takes precedence if both are set.
        skip_reading_prefix_cache: Whether to compute the whole text instead of reading cached prefixes. None
            means True, unless only the hidden state of the last token is pooled: cached tokens have no hidden
            states.
        task: "embed", "classify", "score" or "token_embed"; None uses the task of the called method.
        extra_kwargs: {"compressed_token_type_ids": n} if the second text of a pair starts at token n, for
            encoders that distinguish the two texts.

    Raises:
        ValueError: If a value is out of range; the message names the argument, the value and the range.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    task: PoolingTask | None = None
    extra_kwargs: dict[str, int] | None = None

    def __post_init__(self) -> None:
        self.validate()

    def clone(self) -> Self:
        """Returns a copy."""
        return dataclasses.replace(self)

    def validate(self) -> None:
        """Converts all values to plain Python values and checks them, as the constructor does.

        Raises:
            ValueError: If a value is out of range; the message lists every problem.
        """
        make_plain(self)
        problems = Problems()
        if self.truncate_prompt_tokens is not None:
            problems.note(
                check,
                self.truncate_prompt_tokens != 0,
                "truncate_prompt_tokens",
                0,
                "-1 or an integer of at least 1",
            )
            problems.note(check_int, "truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        if self.dimensions is not None:
            problems.note(check_int, "dimensions", self.dimensions, 1)
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            problems.note(check_choice, name, getattr(self, name), (None, True, False))
        tasks = (None, "embed", "classify", "score", "token_embed")
        problems.note(check_choice, "task", self.task, tasks)
        problems.note(self._check_extra)
        problems.raise_if_any()

    @property
    def second_text(self) -> int | None:
        """Index of the token at which the second text of a pair starts; None for a single text."""
        return (self.extra_kwargs or {}).get("compressed_token_type_ids")

    def _check_extra(self) -> None:
        extra, name = self.extra_kwargs, "compressed_token_type_ids"
        ok = extra is None or (isinstance(extra, dict) and extra.keys() <= {name})
        close = suggestions(extra, [name]) if isinstance(extra, dict) else ""
        check(ok, "extra_kwargs", extra, f"None or a dict with the key {name!r}", remedy=close)
        if extra:
            check_int(f"extra_kwargs[{name!r}]", extra[name], 0)


@suggests_fields
@dataclasses.dataclass(frozen=True)
class PoolerConfig:
    """Pooling settings of an engine, which override the checkpoint's settings.

    Example:
        >>> LLM(runner="pooling", pooler_config=PoolerConfig(pooling_type="MEAN"))

    Args:
        pooling_type: "LAST" or "CLS" for the last hidden state of the last or first token, "MEAN" for the
            mean over all tokens; None uses the checkpoint's setting.
        use_activation: Whether to normalize embeddings to length 1; None uses the checkpoint's setting.
        normalize: Another name of use_activation; takes precedence if both are set.

    Raises:
        ValueError: If a value is not allowed.
    """

    pooling_type: Literal["LAST", "MEAN", "CLS"] | None = None
    use_activation: bool | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        check_choice("pooling_type", self.pooling_type, (None, "LAST", "MEAN", "CLS"))
        for name in ("use_activation", "normalize"):
            check_choice(name, getattr(self, name), (None, True, False))

    @classmethod
    def of(cls, given: Any) -> Self:
        """Returns the PoolerConfig for the value of EngineArgs.pooler_config.

        Args:
            given: A PoolerConfig, a dict of its fields, or None for the defaults.

        Raises:
            ValueError: If the value has another type or unknown fields.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        names = field_names(cls)
        ok = isinstance(given, dict) and given.keys() <= set(names)
        close = suggestions(given, names) if isinstance(given, dict) else ""
        allowed = f"None, a PoolerConfig, or a dict with some of the keys {', '.join(names)}"
        check(ok, "pooler_config", given, allowed, remedy=close)
        return cls(**given)
