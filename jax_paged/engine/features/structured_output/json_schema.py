"""JSON schemas with what llguidance rejects removed, so that it enforces the rest."""

import re
from typing import Any

# Keywords whose values are data: what looks like a schema there is none.
_DATA = frozenset(("const", "default", "enum", "example", "examples", "x-guidance"))
# Keywords whose values are objects of schemas: their keys are names, not keywords.
_OBJECTS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
# An escaped character, what opens a group or a class, what closes one, or any other character.
_PATTERN_TOKEN = re.compile(r"\\.|\(\?<?[=!]|\(\?P=|\[\^?\]?|.", re.DOTALL)
_LOOK_AROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
_EMPTY = "(?:)"


class RelaxedSchema:
    """A JSON schema without the constraints that no grammar of llguidance can express.

    These are assertions of width zero in patterns (look-ahead, look-behind, word boundaries), patterns with
    back-references, and numbers of properties that repeated keys could make up. What remains allows all that
    the schema allows, and more.

    Args:
        schema: The schema; not changed.

    Attributes:
        schema: What remains of it.
        warnings: A sentence for each constraint that was removed.
    """

    def __init__(self, schema: Any) -> None:
        self._warnings: dict[str, None] = {}
        self.schema = self._relaxed(schema)
        self.warnings = tuple(self._warnings)

    def _relaxed(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._relaxed(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        relaxed: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _DATA:
                relaxed[key] = value
            elif key == "pattern" and isinstance(value, str):
                pattern = self._relaxed_pattern(value)
                relaxed |= {} if pattern is None else {key: pattern}
            elif key in _OBJECTS and isinstance(value, dict):
                inner = {name: self._relaxed(item) for name, item in value.items()}
                relaxed[key] = self._relaxed_names(inner) if key == "patternProperties" else inner
            else:
                relaxed[key] = self._relaxed(value)
        self._relax_min_properties(relaxed)
        return relaxed

    def _relaxed_names(self, schemas: dict[str, Any]) -> dict[str, Any]:
        patterns = {name: self._relaxed_pattern(name) for name in schemas}
        return {pattern: schemas[name] for name, pattern in patterns.items() if pattern is not None}

    def _relaxed_pattern(self, pattern: str) -> str | None:
        relaxed = without_assertions(pattern)
        if relaxed is None:
            self._warn(f"pattern {pattern} is not enforced, as it has back-references")
        elif relaxed != pattern:
            self._warn(f"pattern {pattern} is enforced without its look-around and word boundaries")
        return relaxed

    def _relax_min_properties(self, schema: dict[str, Any]) -> None:
        """Lowers minProperties to what llguidance counts correctly.

        It counts a repeated key each time, and only keys that the schema does not name.
        """
        least, required, named = (schema.get(key) for key in ("minProperties", "required", "properties"))
        if not isinstance(least, int | float):
            return
        names = set(map(str, required)) if isinstance(required, list) else set()
        if isinstance(named, dict) and not named.keys() <= names:
            if least > len(names):
                self._warn(f"minProperties {least} is not enforced, as some of the properties are optional")
            del schema["minProperties"]
        elif least > len(names) + 1:
            most = schema["minProperties"] = len(names) + 1
            self._warn(f"minProperties {least} is enforced as {most}, as a repeated key would count twice")

    def _warn(self, text: str) -> None:
        self._warnings[text] = None


def without_assertions(pattern: str) -> str | None:
    """Returns a regular expression without its assertions of width zero, except "^" and "$".

    An assertion only rejects texts, so the result matches all that the pattern matches.

    Args:
        pattern: As JSON schemas have it.

    Returns:
        The pattern; None if it has back-references, which no regular language has.
    """
    parts: list[str] = []
    depth = 0  # of groups within a look-around, itself included
    in_class = False
    for token in _PATTERN_TOKEN.findall(pattern):
        if in_class:
            in_class = token != "]"
        elif token.startswith("["):
            in_class = True
        elif re.fullmatch(r"\\[1-9k]|\(\?P=", token) and not depth:
            return None
        elif token in _LOOK_AROUNDS and not depth:
            parts.append(_EMPTY)
            depth = 1
            continue
        elif depth:
            depth += token.startswith("(") - (token == ")")
            continue
        elif token in (r"\b", r"\B"):
            token = _EMPTY
        if not depth:
            parts.append(token)
    return "".join(parts)
