"""StructuredOutputsParams: what form an output has."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from jax_paged.arguments.ignored import ANY, ignores
from jax_paged.arguments.plain_values import make_plain
from jax_paged.errors import ArgumentError, check

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Of a schema, a regular expression, a grammar, or all choices together.
MAX_FORM_CHARACTERS = 128 * 1024
MAX_SCHEMA_DEPTH = 60
# How JSON is written, in llguidance's terms. Between its tokens a model that is unsure would write whitespace
# forever; and with one way to write each key, none that the schema names passes for another. Constraints that
# a grammar can't express, such as uniqueItems, are warnings.
JSON_WRITING: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "json_allowed_escapes": '"\\bfnrt',
    "lenient": True,
}

# Arguments of vLLM's that leave open what is always so here, or choose what is not built.
_IGNORED = {
    "disable_additional_properties": (False,),
    "disable_any_whitespace": ANY,  # JSON has no whitespace between its tokens
    "disable_fallback": ANY,  # there is one library
    "whitespace_pattern": (None,),
}


@ignores(_IGNORED)
@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of a request's outputs; the names are vLLM's. One of the first six is given.

    Args:
        json: A JSON schema, as a dict or as text. The output is compact JSON.
        regex: A regular expression of the whole output, in the syntax of Rust's regex crate.
        choice: The texts that the output can be.
        grammar: A context-free grammar in llguidance's variant of Lark, with a rule `start`.
        json_object: True for any JSON object.
        structural_tag: Text in which tags hold JSON: {"structures": [{"begin", "schema", "end"}, ...],
            "triggers": [...]}, as a dict or as text. Where a trigger has been written, one of the tags that
            begin with it follows.
        starts_after: Text that the form follows, such as the tag that closes a model's reasoning. Nothing
            before it is constrained. None if the form begins with the output. An output may also be the form
            alone, without this text.
        reasoning_tag: Text with which an output begins that has `starts_after`. An output that does not begin
            with it has the form from the start. None if no text tells them apart: the output is then not
            constrained before `starts_after`, and it may end there only where it is the form.

    Raises:
        ValueError: If none or several are given, or one is too large, too deep or no value of its kind.
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
        check(
            len(given) == 1, "structured_outputs", given or None, f"given exactly one of {', '.join(names)}"
        )
        after = self.starts_after
        check(after is None or (isinstance(after, str) and after), "starts_after", after, "None or a string")  # pyright: ignore
        tag = self.reasoning_tag
        ok = tag is None or (isinstance(tag, str) and bool(tag) and after is not None)  # pyright: ignore
        check(ok, "reasoning_tag", tag, "None, or a non-empty string with starts_after")
        _CHECKS[given[0]](given[0], getattr(self, given[0]))

    @property
    def kind(self) -> str:
        """The name of the form that is given."""
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
            raise ArgumentError(name, depth, allowed, aspect="the number of nested levels of")
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
    if num_characters > MAX_FORM_CHARACTERS:
        allowed = f"at most {MAX_FORM_CHARACTERS} characters"
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
