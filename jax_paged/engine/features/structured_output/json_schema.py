"""Removal of JSON schema constraints that llguidance rejects, so that it enforces the remaining ones."""

import re
from typing import Any

# Keywords whose values are data, which may look like schemas but are not.
_DATA = frozenset(("const", "default", "enum", "example", "examples", "x-guidance"))
# Keywords whose values map names to schemas. Their keys are not keywords.
_OBJECTS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
# Matches an escaped character, the start of a look-around, a named back-reference or a character class, or
# any other single character.
_PATTERN_TOKEN = re.compile(r"\\.|\(\?<?[=!]|\(\?P=|\[\^?\]?|.", re.DOTALL)
_LOOK_AROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
_EMPTY = "(?:)"


class RelaxedSchema:
    """A JSON schema without the constraints that llguidance can't express as a grammar.

    Removed are zero-width assertions in patterns (look-ahead, look-behind, word boundaries), patterns with
    back-references, and values of minProperties that llguidance counts wrongly. The result allows everything
    that the schema allows, and more.

    Args:
        schema: The original schema; not modified.

    Attributes:
        schema: The relaxed schema.
        warnings: One sentence for each removed constraint.
    """

    def __init__(self, schema: Any) -> None:
        self._warnings: dict[str, None] = {}
        self.schema = self._relaxed(schema)
        self.warnings = tuple(self._warnings)

    def _relaxed(self, schema: Any) -> Any:
        """Returns a relaxed copy of a schema, or of a list of schemas."""
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
        """Returns the schemas of patternProperties by relaxed pattern; drops unsupported patterns."""
        patterns = {name: self._relaxed_pattern(name) for name in schemas}
        return {pattern: schemas[name] for name, pattern in patterns.items() if pattern is not None}

    def _relaxed_pattern(self, pattern: str) -> str | None:
        """Returns a pattern without zero-width assertions; None if it is not supported. Adds warnings."""
        relaxed = without_assertions(pattern)
        if relaxed is None:
            self._warn(f"pattern {pattern} is not enforced because it has back-references")
        elif relaxed != pattern:
            self._warn(f"pattern {pattern} is enforced without look-around and word boundaries")
        return relaxed

    def _relax_min_properties(self, schema: dict[str, Any]) -> None:
        """Lowers minProperties to a value that llguidance counts correctly.

        llguidance counts required keys and keys that the schema does not name, but not optional keys that it
        names. It counts a repeated key each time, so only one key in addition to the required ones is safe.
        """
        least, required, named = (schema.get(key) for key in ("minProperties", "required", "properties"))
        if not isinstance(least, int | float):
            return
        names = set(map(str, required)) if isinstance(required, list) else set()
        if isinstance(named, dict) and not named.keys() <= names:
            if least > len(names):
                self._warn(f"minProperties {least} is not enforced because some properties are optional")
            del schema["minProperties"]
        elif least > len(names) + 1:
            most = schema["minProperties"] = len(names) + 1
            self._warn(f"minProperties {least} is enforced as {most} because repeated keys count twice")

    def _warn(self, text: str) -> None:
        self._warnings[text] = None


def without_assertions(pattern: str) -> str | None:
    """Returns a regular expression without its zero-width assertions, except for "^" and "$".

    Assertions only reject texts. The result therefore matches all texts that the pattern matches.

    Args:
        pattern: A pattern in the syntax of JSON schemas.

    Returns:
        The pattern; None if it contains back-references, which no regular language can express.
    """
    parts: list[str] = []
    depth = 0  # nesting depth of groups within a look-around, including itself
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
