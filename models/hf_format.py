"""What the families share of Hugging Face's checkpoint format: fields of config.json, keys of weights."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

_REQUIRED: Any = object()


class ConfigReader:
    """Reads fields of a config.json and collects everything that is wrong with them.

    A read whose value is bad notes a problem and returns a placeholder, so that one pass finds all of
    them; `finish` then raises. null counts as absent, as it does in transformers.

    Args:
        config: The parsed config.json, or a dictionary inside it.
        prefix: Put before names in messages.
        problems: Where problems are noted, by name; a nested reader shares its parent's.
    """

    def __init__(
        self, config: Mapping[str, Any], prefix: str = "", problems: dict[str, str] | None = None
    ) -> None:
        self._config = config
        self._prefix = prefix
        self._problems: dict[str, str] = {} if problems is None else problems

    def integer(self, name: str, default: Any = _REQUIRED, low: int = 1) -> int:
        """Returns an integer of at least `low`."""
        value = self._get(name, default)
        ok = isinstance(value, int) and not isinstance(value, bool) and value >= low
        self.check(ok, name, value, f"an integer of at least {low}")
        return value if ok else low

    def number(
        self, name: str, default: Any = _REQUIRED, low: float = 0.0, *, low_open: bool = True
    ) -> float:
        """Returns a finite number above `low`, or at least `low` if not `low_open`."""
        value = self._get(name, default)
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        ok = ok and (value > low if low_open else value >= low)
        self.check(ok, name, value, f"a finite number {'above' if low_open else 'of at least'} {low}")
        return float(value) if ok else low + 1

    def choice(self, name: str, default: Any, choices: tuple[Any, ...]) -> Any:
        """Returns one of `choices`."""
        value = self._get(name, default)
        ok = any(value == c and isinstance(value, bool) == isinstance(c, bool) for c in choices)
        self.check(ok, name, value, " or ".join(map(repr, choices)))
        return value if ok else choices[0]

    def rope(self, max_position_embeddings: int) -> tuple[float, tuple[tuple[str, Any], ...]]:
        """Returns the base of the rotary frequencies, and their scaling as `rope_frequencies` takes it.

        Reads both forms: `rope_parameters`, and the older `rope_theta` beside `rope_scaling`.
        """
        name = "rope_scaling" if self._config.get("rope_scaling") else "rope_parameters"
        nested = self._config.get(name) or {}
        if not self.check(isinstance(nested, dict), name, nested, "an object or null"):
            return 1.0, ()
        # The order of precedence is that of transformers.
        outer = ("rope_theta", "partial_rotary_factor")
        values = {k: self._config[k] for k in outer if k in self._config}
        values |= {"original_max_position_embeddings": max_position_embeddings} | nested
        if self._config.get("original_max_position_embeddings") is not None:
            values["original_max_position_embeddings"] = self._config["original_max_position_embeddings"]
        if "type" in values:
            values.setdefault("rope_type", values["type"])

        read = ConfigReader(values, f"{self._prefix}{name}.", self._problems)
        read.choice("partial_rotary_factor", 1.0, (1.0,))
        theta = read.number("rope_theta", 10000.0)
        rope_type = read.choice("rope_type", "default", ("default", "llama3"))
        if rope_type == "default":
            return theta, (("rope_type", rope_type),)
        low = read.number("low_freq_factor")
        return theta, (
            ("rope_type", rope_type),
            ("factor", read.number("factor", low=1.0, low_open=False)),
            ("low_freq_factor", low),
            ("high_freq_factor", read.number("high_freq_factor", low=low)),
            ("original_max_position_embeddings", read.integer("original_max_position_embeddings")),
        )

    def check(
        self, ok: bool, name: str, value: Any, allowed: str, *, also_needs: tuple[str, ...] = ()
    ) -> bool:
        """Notes a problem with `name` unless `ok`, and returns `ok`.

        Args:
            also_needs: Other fields that went into `ok`. While one of them has a problem of its own its
                value is a placeholder, and nothing is noted.
        """
        name = self._prefix + name
        if not ok and not any(n in self._problems for n in (name, *also_needs)):
            shown = "missing" if value is _REQUIRED else repr(value)
            self._problems[name] = f"{name} is {shown}; allowed: {allowed}"
        return ok

    def finish(self) -> None:
        """Raises ValueError that names every problem noted, if there is one."""
        if self._problems:
            lines = "".join(f"\n  {problem}" for problem in self._problems.values())
            raise ValueError(f"config.json does not describe a supported model:{lines}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._config.get(name)
        return default if value is None else value


@dataclasses.dataclass(frozen=True)
class WeightTable:
    """How a family's weights are called in a checkpoint.

    Args:
        rows: (regular expression of a whole NNX path joined by dots, Hugging Face key that its groups are
            put into, whether the checkpoint holds the transposed matrix). The first match counts.
        tied: Keys of weights that a tied model shares, with the key of the weight that it keeps.
        ignored: Regular expression of whole keys that older checkpoints hold and nobody needs.
    """

    rows: tuple[tuple[str, str, bool], ...]
    tied: Mapping[str, str]
    ignored: str

    def hf_key(self, path: str) -> tuple[str, bool]:
        """Returns the Hugging Face key of the weight at an NNX path, and whether it lies transposed."""
        for pattern, key, transposed in self.rows:
            if match := re.fullmatch(pattern, path):
                return match.expand(key), transposed
        raise AssertionError(f"no row of the weight table matches {path}")
