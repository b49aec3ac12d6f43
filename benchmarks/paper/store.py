"""Storage of computed points, so that a second run continues where the first one stopped."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paper.points import Point

RESULTS = Path(__file__).resolve().parent.parent / "results" / "paper"


class Store:
    """Values of points in one JSON file, which is replaced atomically after each new value.

    Args:
        folder: Folder of the file points.json; created if it does not exist.
    """

    def __init__(self, folder: Path = RESULTS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "points.json"
        self._values = self._read()

    def __contains__(self, point: Point) -> bool:
        return point.key in self._values

    def __getitem__(self, point: Point) -> Any:
        return self._values[point.key]

    def __setitem__(self, point: Point, value: Any) -> None:
        # Another process may have added values.
        self._values = self._read() | {point.key: value}
        self._write()

    def keep_only(self, points: Iterable[Point]) -> None:
        """Removes the values of all other points."""
        keys = {point.key for point in points}
        self._values = {key: value for key, value in self._values.items() if key in keys}
        self._write()

    def _read(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def _write(self) -> None:
        new = self.path.with_suffix(".new")
        lines = [
            f"{json.dumps(key)}: {json.dumps(value, sort_keys=True)}"
            for key, value in sorted(self._values.items())
        ]
        new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(new, self.path)
