"""Random JSON schemas in the style of JSONSchemaBench, with the keywords that llguidance documents."""

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ["id", "name", "Größe", "unit price", "is_open", "tags", "x-y", "$ref", "a.b", "items", "日本", "e"]
# Formats that jsonschema can check by itself or that have a pattern here.
FORMATS = ["date", "time", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname", "duration", "uri"]
PATTERNS = [
    "^[a-z]{2,5}$",
    "^(yes|no)$",
    r"^\d{3}-\d{2}$",
    "^[A-Z][a-z]*( [A-Z][a-z]*){0,2}$",
    "^a",
    "[0-9]$",
]


class SchemaMaker:
    """Makes schemas whose texts are short, so that random ones end.

    Args:
        seed: The same seed makes the same schemas.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def schema(self) -> Schema:
        """Returns a schema of an object, an array or, rarely, of something smaller."""
        rng = self._rng
        kinds = [self._object, self._open_object, self._array, self._with_definitions, self._value]
        kind = rng.choices(kinds, [8, 3, 2, 2, 1])[0]
        schema = kind(rng.randint(1, 3))
        if rng.random() < 0.3:
            schema |= {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "title": "T",
                "description": "d",
            }
        return schema

    def _value(self, depth: int) -> Schema:
        rng = self._rng
        leaves = [self._string, self._integer, self._number, self._enum, self._const, self._plain]
        inner = [
            self._object,
            self._open_object,
            self._array,
            self._tuple,
            self._any_of,
            self._all_of,
            self._nullable,
            self._one_of,
        ]
        return rng.choice(leaves if depth <= 0 else leaves + inner)(depth - 1)

    def _string(self, depth: int) -> Schema:
        rng = self._rng
        kind = rng.randrange(4)
        if kind == 0:
            return {"type": "string", "format": rng.choice(FORMATS)}
        if kind == 1:
            # An open pattern would be followed by anything.
            return {"type": "string", "pattern": rng.choice(PATTERNS[:4])}
        if kind == 2:
            return {"type": "string", "pattern": rng.choice(PATTERNS[4:]), "maxLength": 6}
        low = rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}

    def _integer(self, depth: int) -> Schema:
        rng = self._rng
        low = rng.randint(-200, 200)
        schema: Schema = {"type": "integer", rng.choice(["minimum", "exclusiveMinimum"]): low}
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(2, 400)
        if rng.random() < 0.2:
            return {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice([2, 5, 10])}
        return schema

    def _number(self, depth: int) -> Schema:
        rng = self._rng
        low = round(rng.uniform(-10, 10), 2)
        return {"type": "number", "minimum": low, "maximum": round(low + rng.choice([0.5, 3, 100]), 2)}

    def _enum(self, depth: int) -> Schema:
        rng = self._rng
        values = [
            "a",
            "b c",
            'quote"',
            "back\\slash",
            "ß",
            "",
            1,
            -2.5,
            None,
            True,
            False,
            [1, "x"],
            {"k": [1]},
        ]
        return {"enum": rng.sample(values, rng.randint(1, 5))}

    def _const(self, depth: int) -> Schema:
        return {"const": self._rng.choice(["only", 7, None, True, {"a": 1}, [1, 2], "tab\t"])}

    def _plain(self, depth: int) -> Schema:
        return {"type": self._rng.choice(["boolean", "null"])}

    def _nullable(self, depth: int) -> Schema:
        return (
            {"type": ["integer", "null"], "minimum": 0, "maximum": 9}
            if self._rng.random() < 0.5
            else {"type": ["boolean", "string"], "maxLength": 3}
        )

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(0, 4))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._value(depth) for name in names},
            "additionalProperties": False,
        }
        if names and rng.random() < 0.8:
            schema["required"] = rng.sample(names, rng.randint(1, len(names)))
        if rng.random() < 0.15:
            schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
            schema |= {"maxProperties": len(names) + rng.randint(0, 2), "required": names}
        elif rng.random() < 0.1:
            return {
                "type": "object",
                "patternProperties": {"^x_[a-c]{1,2}$": self._value(0)},
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 2,
            }
        return schema

    def _open_object(self, depth: int) -> Schema:
        """Returns one with keys that it does not name, so short that they often come again."""
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(0, 3))
        named: Schema = {"type": "object", "properties": {name: self._value(depth) for name in names}}
        kind = rng.randrange(4)
        if kind == 0:  # as pydantic writes a model
            return {**named, "required": rng.sample(names, rng.randint(0, len(names)))}
        more = len(names) + rng.randint(0, 2)
        named |= {
            "required": names,
            "maxProperties": more,
            "minProperties": rng.randint(0, min(more, len(names) + 1)),
        }
        if kind == 1:
            return named | {"additionalProperties": self._value(0)}
        named |= {"patternProperties": {"^[ab]?$": self._value(0), "^[cd]{1,2}$": self._value(0)}}
        return named | {"additionalProperties": False if kind == 2 else {"type": "boolean"}}

    def _array(self, depth: int) -> Schema:
        rng = self._rng
        low = rng.randint(0, 2)
        return {
            "type": "array",
            "items": self._value(depth),
            "minItems": low,
            "maxItems": low + rng.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Schema:
        items = [self._value(depth) for _ in range(self._rng.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._value(depth) for _ in range(self._rng.randint(1, 3))]}

    def _one_of(self, depth: int) -> Schema:
        tags = self._rng.sample(["cat", "dog", "bird"], 2)
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": tag}, "v": self._value(0)},
                    "required": ["kind"],
                    "additionalProperties": False,
                }
                for tag in tags
            ]
        }

    def _all_of(self, depth: int) -> Schema:
        rng = self._rng
        low = rng.randint(0, 50)
        return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + rng.randint(1, 50)}]}

    def _with_definitions(self, depth: int) -> Schema:
        where = self._rng.choice(["$defs", "definitions"])
        return {
            where: {
                "leaf": self._value(0),
                "tree": {
                    "type": "object",
                    "properties": {
                        "value": {"$ref": f"#/{where}/leaf"},
                        "next": {"anyOf": [{"$ref": f"#/{where}/tree"}, {"type": "null"}]},
                    },
                    "required": ["value", "next"],
                    "additionalProperties": False,
                },
            },
            "$ref": f"#/{where}/tree",
        }
