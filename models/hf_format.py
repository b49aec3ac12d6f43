"""Hugging Face's checkpoint format, as far as all families share it: config.json's fields, weights' keys."""

import dataclasses
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jax_paged.arguments.shown_values import one_of, shown

_REQUIRED: Any = object()


class ConfigReader:
    """Reads fields of a config.json and collects everything that is wrong with them.

    Reading a bad value notes the problem and returns a placeholder, so that one pass finds all problems;
    `finish` then raises. As in transformers, null means absent.

    Args:
        config: The parsed config.json, or an object inside it.
        prefix: Put before the names in messages.
        problems: Problems noted so far, by name; a nested reader shares its parent's.
        max_model_len: Maximum tokens of a text that the user asks for; None leaves it to the model. Only
            rotary positions that depend on the length of the text ask for it.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        prefix: str = "",
        problems: dict[str, str] | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self._config = config
        self._prefix = prefix
        self._problems: dict[str, str] = {} if problems is None else problems

    def get(self, name: str, default: Any) -> Any:
        """Returns a value of any kind."""
        value = self._config.get(name)
        return default if value is None else value

    def integer(self, name: str, default: Any = _REQUIRED, low: int = 1) -> int:
        """Returns an integer of at least `low`."""
        value = self.get(name, default)
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
        self.check(ok, name, value, f"an integer of at least {low}")
        return value if ok else low

    def number(
        self, name: str, default: Any = _REQUIRED, low: float = 0.0, *, low_open: bool = True
    ) -> float:
        """Returns a finite number above `low`, or at least `low` if not `low_open`."""
        value = self.get(name, default)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ok = ok and (value > low if low_open else value >= low)
        self.check(ok, name, value, f"a finite number {'above' if low_open else 'of at least'} {low}")
        return float(value) if ok else low + 1

    def choice(self, name: str, default: Any, choices: tuple[Any, ...]) -> Any:
        """Returns a value that is one of `choices`; False and True don't count as 0 and 1."""
        value = self.get(name, default)
        ok = any(value == c and isinstance(value, bool) == isinstance(c, bool) for c in choices)
        self.check(ok, name, value, one_of(choices))
        return value if ok else choices[0]

    def num_labels(self) -> int:
        """Returns the classes of a classifier, 2 if nothing says it; 0 of any other model."""
        names = self.get("architectures", None)
        if not isinstance(names, list) or not any("Classification" in str(name) for name in names):
            return 0
        return self.integer("num_labels", len(self.table("id2label")) or 2)

    def table(self, name: str) -> dict[str, Any]:
        """Returns an object; an empty one if the value is absent."""
        value = self.get(name, {})
        return value if self.check(isinstance(value, dict), name, value, "an object or null") else {}

    def windows(
        self, num_layers: int, default_types: Sequence[str], window: int | None
    ) -> tuple[int | None, ...]:
        """Returns the window of each layer by `layer_types`, None for a layer that attends to all tokens.

        Args:
            num_layers: Number of layers.
            default_types: Stands in for `layer_types` if config.json leaves it out.
            window: Of layers of type "sliding_attention"; None if that type is not allowed.
        """
        types = self.get("layer_types", list(default_types))
        choices = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
        ok = isinstance(types, list) and len(types) == num_layers and all(t in choices for t in types)
        allowed = f"a list of {num_layers} items (num_hidden_layers), each {' or '.join(map(repr, choices))}"
        if not self.check(ok, "layer_types", types, allowed, also_needs=("num_hidden_layers",)):
            return ()
        return tuple(window if t == "sliding_attention" else None for t in types)

    def layer_types(self, num_layers: int, default: Sequence[str], other: str) -> list[str]:
        """Returns `layer_types`, each "full_attention", which at least one has, or another type."""
        types = self.get("layer_types", list(default))
        ok = isinstance(types, list) and len(types) == num_layers
        ok = ok and set(types) <= {"full_attention", other} and "full_attention" in types
        allowed = (
            f"a list of {num_layers} items (num_hidden_layers), each 'full_attention' or '{other}', with "
        )
        return (
            types if self.check(ok, "layer_types", types, f"{allowed}at least one 'full_attention'") else []
        )

    def nested(self, name: str, values: Mapping[str, Any]) -> "ConfigReader":
        """Returns a reader of the values under `name`; it notes its problems in this reader."""
        return ConfigReader(values, f"{self._prefix}{name}.", self._problems, self.max_model_len)

    def check(
        self, ok: bool, name: str, value: Any, allowed: str, *, also_needs: tuple[str, ...] = ()
    ) -> bool:
        """Notes a problem with `name` unless `ok`, and returns `ok`.

        Args:
            ok: Whether the value is allowed.
            name: Name of the field.
            value: Its value.
            allowed: What is allowed, for the message.
            also_needs: Other fields that `ok` depends on. If one of them has a problem of its own, its value
                is a placeholder, and nothing is noted.
        """
        name = self._prefix + name
        if not ok and not any(n in self._problems for n in (name, *also_needs)):
            found = "but it is missing" if value is _REQUIRED else f"got {shown(value)}"
            self._problems[name] = f"`{name}` must be {allowed}, {found}"
        return ok

    def finish(self) -> None:
        """Raises a ValueError that lists all problems, if any were noted."""
        if self._problems:
            lines = "".join(f"\n  {problem}" for problem in self._problems.values())
            raise ValueError(f"config.json does not describe a supported model:{lines}")


# What the checkpoint calls the last part of a path, without one of the model's own.
_ENDS = {
    "kernel": ".weight",
    "scale": ".weight",
    "embedding": ".weight",
    "weight": ".weight",
    "bias": ".bias",
}


@dataclasses.dataclass(frozen=True)
class WeightTable:
    """The names of a family's weights in a checkpoint.

    The weights of a module, such as `layers.0.norm.scale`, have the module's name in the checkpoint, with
    "weight" or "bias" at the end: `model.layers.0.norm.weight`. A weight with another last name is its own
    module.

    Args:
        names: (regular expression that matches the whole NNX path of a module, joined by dots; template of
            its name in the checkpoint). The first match counts; other modules have their path, after `start`.
            If the name contains {}, the checkpoint holds one weight per index of the first dimension.
        tied: Keys of weights that a tied model shares, each with the key of the weight that is kept.
        ignored: Regular expression that matches whole keys of older checkpoints which no model reads.
        unused: Regular expression that matches whole keys of weights for other tasks, which this model has no
            place for. They are ignored with a warning.
        prefix: Start of all keys except the tied ones; older checkpoints leave it out.
        start: Start of the names of modules that `names` does not have; the prefix if it is None.
        renamed: Starts that keys of older checkpoints have, each with what they start with now.
        transposed: Regular expression that matches the whole NNX path of each weight that is stored
            transposed.
    """

    names: tuple[tuple[str, str], ...]
    tied: Mapping[str, str]
    ignored: str
    prefix: str = ""
    start: str | None = None
    renamed: Mapping[str, str] = types.MappingProxyType({})
    unused: str = "(?!)"
    transposed: str = r".*\.kernel|.*\.experts\.\w+"

    def hf_key(self, path: str) -> tuple[str, bool]:
        """Returns the Hugging Face key of the weight at an NNX path, and whether it is stored transposed."""
        module, _, last = path.rpartition(".")
        end = _ENDS.get(last, "")
        module = module if end else path
        matches = ((re.fullmatch(pattern, module), name) for pattern, name in self.names)
        start = self.prefix if self.start is None else self.start
        key = next((match.expand(name) for match, name in matches if match), start + module)
        return key + end, re.fullmatch(self.transposed, path) is not None

    def with_names(self, *names: tuple[str, str], **changes: Any) -> "WeightTable":
        """Returns a table with more names, which go before the others, and with other changes."""
        return dataclasses.replace(self, names=(*names, *self.names), **changes)


def text_values(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the text model, of the config.json of a model that reads more than texts.

    Raises:
        ValueError: If there are none.
    """
    text = hf_config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"`text_config` of config.json must be an object, got {shown(text)}")
    outer = {name: hf_config.get(name) for name in ("quantization_config", "tie_word_embeddings")}
    return text | {name: value for name, value in outer.items() if value is not None}


def of_text_model(table: WeightTable, others: Sequence[str]) -> WeightTable:
    """Returns the table of a model that has a text model, given that of the text model alone.

    Args:
        table: Its keys begin with "model.", except for that of the head.
        others: Names of the parts that are not read.
    """
    name = "model.language_model."

    def moved(key: str) -> str:
        return name + key.removeprefix("model.") if key.startswith("model.") else key

    return WeightTable(
        names=tuple((path, moved(key)) for path, key in table.names),
        tied={key: moved(kept) for key, kept in table.tied.items()},
        ignored=rf"model\.language_model\.{table.ignored.removeprefix(r'model\.')}|(model\.)?({'|'.join(others)})\..*",
        prefix=table.prefix,
        start=name,
        renamed={"language_model.model.": name, "language_model.lm_head.": "lm_head."},
    )
