"""Hugging Face's checkpoint format: reading fields of config.json, and names of weights."""

import dataclasses
import math
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any

from jax_paged.arguments.shown_values import one_of, shown

_REQUIRED: Any = object()


class ConfigReader:
    """Reader of a config.json that collects all problems with its fields.

    If a field has a wrong value, the reader notes the problem and returns a placeholder. One pass therefore
    finds all problems, and `finish` raises an error that lists them. As in transformers, null means that a
    field is missing.

    Args:
        config: The parsed config.json, or an object inside it.
        prefix: Prefix of the field names in messages.
        problems: Problems noted so far, by field name. A nested reader shares the dict of its parent.
        max_model_len: The maximum sequence length that the user requests (tokens); None for the default. It
            only affects rotary positions that depend on the sequence length.
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
        """Returns a value of any type.

        Args:
            name: Name of the field.
            default: The result if the field is missing.
        """
        value = self._config.get(name)
        return default if value is None else value

    def integer(self, name: str, default: Any = _REQUIRED, low: int = 1) -> int:
        """Returns an integer of at least `low`.

        Args:
            name: Name of the field.
            default: The result if the field is missing. Without a default, a missing field is a problem.
            low: The smallest allowed value.
        """
        value = self.get(name, default)
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
        self.check(ok, name, value, f"an integer of at least {low}")
        return value if ok else low

    def number(
        self, name: str, default: Any = _REQUIRED, low: float = 0.0, *, low_open: bool = True
    ) -> float:
        """Returns a finite number.

        Args:
            name: Name of the field.
            default: The result if the field is missing. Without a default, a missing field is a problem.
            low: The lower bound of the allowed values.
            low_open: Whether `low` itself is not allowed.
        """
        value = self.get(name, default)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ok = ok and (value > low if low_open else value >= low)
        self.check(ok, name, value, f"a finite number {'above' if low_open else 'of at least'} {low}")
        return float(value) if ok else low + 1

    def choice(self, name: str, default: Any, choices: tuple[Any, ...]) -> Any:
        """Returns a value that is one of `choices`. False and True are not equal to 0 and 1.

        Args:
            name: Name of the field.
            default: The value if the field is missing.
            choices: The allowed values.
        """
        value = self.get(name, default)
        ok = any(value == c and isinstance(value, bool) == isinstance(c, bool) for c in choices)
        self.check(ok, name, value, one_of(choices))
        return value if ok else choices[0]

    def num_labels(self) -> int:
        """Returns the number of classes of a classifier; 0 if the model is not a classifier.

        The default is the number of entries in id2label, or 2.
        """
        names = self.get("architectures", None)
        if not isinstance(names, list) or not any("Classification" in str(name) for name in names):
            return 0
        return self.integer("num_labels", len(self.table("id2label")) or 2)

    def table(self, name: str) -> dict[str, Any]:
        """Returns an object as a dict; an empty dict if the field is missing.

        Args:
            name: Name of the field.
        """
        value = self.get(name, {})
        return value if self.check(isinstance(value, dict), name, value, "an object or null") else {}

    def windows(
        self, num_layers: int, default_types: Sequence[str], window: int | None
    ) -> tuple[int | None, ...]:
        """Returns the sliding window of each layer (tokens) by `layer_types`; None for full attention.

        Args:
            num_layers: Number of layers.
            default_types: The value of `layer_types` if the field is missing.
            window: The window of layers of type "sliding_attention"; None if this type is not allowed.
        """
        types = self.get("layer_types", list(default_types))
        choices = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
        ok = isinstance(types, list) and len(types) == num_layers and all(t in choices for t in types)
        allowed = f"a list of {num_layers} items (num_hidden_layers), each {' or '.join(map(repr, choices))}"
        if not self.check(ok, "layer_types", types, allowed, also_needs=("num_hidden_layers",)):
            return ()
        return tuple(window if t == "sliding_attention" else None for t in types)

    def layer_types(self, num_layers: int, default: Sequence[str], other: str) -> list[str]:
        """Returns `layer_types`, in which at least one layer is of type "full_attention".

        Args:
            num_layers: Number of layers.
            default: The value if the field is missing.
            other: The only other type that is allowed.
        """
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
        """Returns a reader of the values under `name`. It notes problems in this reader.

        Args:
            name: Name of the object.
            values: The values in it.
        """
        return ConfigReader(values, f"{self._prefix}{name}.", self._problems, self.max_model_len)

    def check(
        self, ok: bool, name: str, value: Any, allowed: str, *, also_needs: tuple[str, ...] = ()
    ) -> bool:
        """Notes a problem with a field unless `ok`, and returns `ok`.

        Args:
            ok: Whether the value is allowed.
            name: Name of the field.
            value: Its value.
            allowed: Description of the allowed values, for the message.
            also_needs: Other fields that `ok` depends on. If one of them has a problem, its value is a
                placeholder. In that case no problem is noted for this field.
        """
        name = self._prefix + name
        if not ok and not any(n in self._problems for n in (name, *also_needs)):
            found = "but it is missing" if value is _REQUIRED else f"got {shown(value)}"
            self._problems[name] = f"`{name}` must be {allowed}, {found}"
        return ok

    def finish(self) -> None:
        """Raises a ValueError that lists all problems, if there are any."""
        if self._problems:
            lines = "".join(f"\n  {problem}" for problem in self._problems.values())
            raise ValueError(f"config.json does not describe a supported model:{lines}")


# End of a weight's key in the checkpoint, by the last part of its NNX path. Weights with another last part
# have no such end.
_ENDS = {
    "kernel": ".weight",
    "scale": ".weight",
    "embedding": ".weight",
    "weight": ".weight",
    "bias": ".bias",
}


@dataclasses.dataclass(frozen=True)
class WeightTable:
    """Names of a family's weights in a checkpoint.

    The key of a weight is the name of its module in the checkpoint, followed by ".weight" or ".bias". By
    default, the name of a module is `start` plus its NNX path. For example, `layers.0.norm.scale` is stored
    as `model.layers.0.norm.weight`. If the last part of a weight's path is none of kernel, scale, embedding,
    weight and bias, its whole path is treated as the path of a module, and nothing is appended.

    Args:
        names: Pairs (pattern, template) for modules that do not have the default name. The pattern, a regular
            expression, must match the whole NNX path; the template is the name in the checkpoint. The first
            match is used. If the name contains {}, the checkpoint has one tensor for each index of the
            weight's first dimension.
        tied: Keys of weights that a tied model does not have, each with the key of the weight that the model
            uses instead.
        ignored: Regular expression for whole keys. A tensor with such a key that is not a weight of the model
            is not read, and there is no warning. Most of these tensors are in older checkpoints.
        prefix: Prefix of all keys except those in `tied`. Older checkpoints leave it out.
        start: Prefix of the default name of a module; None for `prefix`.
        renamed: Prefixes of keys in older checkpoints, each with its replacement.
        unused: Regular expression for whole keys of weights for other tasks. These weights are not read,
            and a warning lists them.
        transposed: Regular expression that matches the whole NNX path of every weight that is stored
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
        """Returns the key of a weight in a checkpoint, and whether it is stored transposed.

        Args:
            path: NNX path of the weight, joined by dots.
        """
        module, _, last = path.rpartition(".")
        end = _ENDS.get(last, "")
        module = module if end else path
        matches = ((re.fullmatch(pattern, module), name) for pattern, name in self.names)
        start = self.prefix if self.start is None else self.start
        key = next((match.expand(name) for match, name in matches if match), start + module)
        return key + end, re.fullmatch(self.transposed, path) is not None

    def with_names(self, *names: tuple[str, str], **changes: Any) -> "WeightTable":
        """Returns a copy of the table with more names, which take precedence over the existing ones.

        Args:
            *names: Pairs (pattern, template).
            **changes: New values of other fields.
        """
        return dataclasses.replace(self, names=(*names, *self.names), **changes)


def text_values(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the text model in the config.json of a multimodal model.

    Args:
        hf_config: The parsed config.json.

    Raises:
        ValueError: If config.json has no text_config.
    """
    text = hf_config.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"`text_config` of config.json must be an object, got {shown(text)}")
    outer = {name: hf_config.get(name) for name in ("quantization_config", "tie_word_embeddings")}
    return text | {name: value for name, value in outer.items() if value is not None}


def multimodal_table(table: WeightTable, others: Sequence[str]) -> WeightTable:
    """Returns the weight table of a multimodal checkpoint of which only the text model is read.

    Args:
        table: The table of the text model alone. Its keys begin with "model.", except the key of the head.
        others: Names of the parts of the checkpoint that are not read.
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
