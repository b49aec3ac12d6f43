"""StructuredOutputsParams, the constraint that the output of a request has to satisfy."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from jax_paged.arguments.ignored import ANY, ignores
from jax_paged.arguments.plain_values import make_plain
from jax_paged.errors import ArgumentError, check

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Maximum size of a schema, a regular expression or a grammar, or of all choices together.
MAX_CONSTRAINT_CHARACTERS = 128 * 1024
MAX_SCHEMA_DEPTH = 60
# Options of llguidance for JSON. Whitespace between tokens is not allowed, because an uncertain model would
# generate it forever. Escapes by code, such as \u0061, are not allowed either: the grammar compares keys as
# they are spelled, so a key that the schema names would count as an additional key if it were spelled with an
# escape. With "lenient", keywords that a grammar can't enforce, such as uniqueItems, cause a warning instead
# of an error.
JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "json_allowed_escapes": '"\\bfnrt',
    "lenient": True,
}

# Arguments of vLLM for which this engine has a fixed behavior, and arguments of unsupported features.
_IGNORED = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": ANY,  # JSON output never has whitespace between its tokens
    "disable_fallback": ANY,  # llguidance is the only backend
    "whitespace_pattern": (None,),
}


@ignores(_IGNORED)
@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """Constraint on the outputs of a request; the names are vLLM's.

    Exactly one of the arguments json, regex, choice, grammar, json_object and structural_tag has to be set.

    Example:
        >>> params = StructuredOutputsParams(choice=["yes", "no"])
        >>> llm.generate("Is 7 a prime?", SamplingParams(structured_outputs=params))

    Args:
        json: A JSON schema, as a dict or as text. The output is JSON without whitespace between its tokens.
        regex: A regular expression that the whole output has to match, in the syntax of Rust's regex crate.
        choice: The texts that the output can be.
        grammar: A context-free grammar with a rule `start`, in llguidance's variant of Lark.
        json_object: If True, the output is any JSON object.
        structural_tag: A dict or text {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}.
            The output is free text until it contains one of the triggers. From there on, it has to be a
            structure whose "begin" starts with that trigger: the text "begin", JSON that matches "schema",
            and the text "end". Free text may follow.
        starts_after: Text after which the constraint applies, such as the closing tag of a model's reasoning.
            The output before it is not constrained. An output that ends without this text has to satisfy the
            constraint as a whole. None applies the constraint from the start of the output.
        reasoning_tag: Text with which the unconstrained part of an output begins, such as the opening tag of
            the reasoning. An output that begins differently is constrained from its start. None leaves every
            output unconstrained up to `starts_after`.

    Raises:
        ValueError: If none or several of the constraints are set, or a value is too large, nested too deeply,
            or of the wrong type.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    starts_after: str | None = None
    reasoning_tag: str | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        allowed = f"a constraint with exactly one of {', '.join(names)}"
        check(len(given) == 1, "structured_outputs", given or None, allowed)
        after = self.starts_after
        ok = after is None or (isinstance(after, str) and bool(after))  # pyright: ignore
        check(ok, "starts_after", after, "None or a non-empty string")
        tag = self.reasoning_tag
        ok = tag is None or (isinstance(tag, str) and bool(tag) and after is not None)  # pyright: ignore
        check(ok, "reasoning_tag", tag, "None, or a non-empty string together with starts_after")
        _CHECKS[given[0]](given[0], getattr(self, given[0]))

    @property
    def constraint_name(self) -> str:
        """The name of the constraint that is set, such as "json"."""
        return next(name for name in _CHECKS if getattr(self, name) not in (None, False))


def _check_schema(name: str, value: Any) -> None:
    parsed = value
    if isinstance(value, str):
        _check_text(name, value)
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(name, value, f"JSON ({error})") from error
    check(isinstance(parsed, dict), name, value, "a JSON object, as a dict or as a string")
    _check_depth(name, parsed)
    try:
        text = json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(name, value, f"a JSON object ({error})") from error
    _check_size(name, len(text))


def _check_depth(name: str, value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            allowed = f"at most {MAX_SCHEMA_DEPTH}"
            raise ArgumentError(name, depth, allowed, aspect="the nesting depth of")
        inner = [list(x.values()) if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [item for items in inner for item in items]


def _check_text(name: str, value: Any) -> None:
    check(isinstance(value, str) and bool(value), name, value, "a non-empty string")
    _check_size(name, len(value))


def _check_choice(name: str, value: Any) -> None:
    ok = isinstance(value, list | tuple) and bool(value) and all(isinstance(text, str) for text in value)
    check(ok and any(value), name, value, "a list of strings, at least one of them not empty")
    _check_size(name, sum(map(len, value)))


def _check_size(name: str, num_characters: int) -> None:
    if num_characters > MAX_CONSTRAINT_CHARACTERS:
        allowed = f"at most {MAX_CONSTRAINT_CHARACTERS} characters"
        raise ArgumentError(name, num_characters, allowed, aspect="the length of")


def _check_true(name: str, value: Any) -> None:
    check(value is True, name, value, "True, False or None")


_CHECKS = {
    "json": _check_schema,
    "regex": _check_text,
    "choice": _check_choice,
    "grammar": _check_text,
    "json_object": _check_true,
    "structural_tag": _check_schema,
}
