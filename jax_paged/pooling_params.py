"""What a pooling request returns, and how an engine pools; the names are vLLM's."""

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
    """What a pooling request returns.

    Args:
        truncate_prompt_tokens: Number of tokens that are kept of a longer text: the last of a decoder, the
            first of an encoder; -1 keeps as many as the model takes. None keeps all, unless the checkpoint
            names a number (docs/pooling.md).
        dimensions: Numbers of an embedding, for models that were trained to be cut (matryoshka); None for
            all.
        use_activation: Whether scores are made of logits, and embeddings scaled to length 1; None does what
            the model does.
        normalize: Another name of use_activation, for embeddings.
        skip_reading_prefix_cache: Whether to compute the whole text. None does so for all but the last
            token's hidden state, as cached tokens have none.
        task: "embed", "classify", "score" or "token_embed"; None is that of the method that is called.
        extra_kwargs: {"compressed_token_type_ids": n} says that the second text of a pair begins at token n,
            for encoders that tell the two apart.

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
        """Converts all values to plain Python values and checks them, as construction does.

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
        """Where the second text of a pair begins, in tokens; None if there is none."""
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
    """How an engine pools, in place of what its checkpoint says.

    Args:
        pooling_type: "LAST", "MEAN" or "CLS": of which token the last hidden state is taken, or their mean.
        use_activation: Whether embeddings are scaled to length 1.
        normalize: Another name of use_activation.
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
        """Returns what EngineArgs.pooler_config says.

        Raises:
            ValueError: If it is none of None, a PoolerConfig, and a dict of its fields.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        names = field_names(cls)
        ok = isinstance(given, dict) and given.keys() <= set(names)
        close = suggestions(given, names) if isinstance(given, dict) else ""
        allowed = f"None, a PoolerConfig, or a dict with some of the keys {', '.join(names)}"
        check(ok, "pooler_config", given, allowed, remedy=close)
        return cls(**given)
