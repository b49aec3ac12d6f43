"""Helpers for figures with matplotlib, which is an optional dependency."""

import io
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure.

    Args:
        width: Width (inches).
        height: Height (inches).

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{error}; drawings need matplotlib: pip install 'jax-paged[plot]'") from error
    return Figure((width, height), layout="constrained")


def png_of(draw: Callable[[], "Figure"]) -> bytes | None:
    """Returns a figure as PNG; None if matplotlib is not installed.

    Args:
        draw: Creates the figure.
    """
    file = io.BytesIO()
    try:
        draw().savefig(file, format="png")
    except ImportError:
        return None
    return file.getvalue()


def format_seconds(value: float) -> str:
    """Returns a time as text with three digits and a unit; "n/a" for NaN."""
    units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    unit, factor = next((u for u in units if not value or round(value * u[1], 3) >= 1), units[-1])
    return "n/a" if math.isnan(value) else f"{float(f'{value * factor:.3g}'):,g} {unit}"
