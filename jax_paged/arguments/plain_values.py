"""Conversion of arguments to plain Python values: numbers of NumPy and JAX, arrays and paths.

Recordings, snapshots and messages between processes hold JSON, so values are converted where users pass them.
"""

import dataclasses
import numbers
import operator
from typing import Any

_PLAIN = frozenset({bool, bytes, float, int, str, type(None)})


def plain(value: Any) -> Any:
    """Returns an argument in plain Python values; a value without a plain equivalent is returned unchanged.

    Integers (`numbers.Integral`), real numbers, NumPy's booleans, arrays of any library (as lists) and paths
    (`os.PathLike`) are converted, also in lists, tuples and dicts. A list or dict that already holds plain
    values is returned itself, not a copy.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or isinstance(value, list):
        return _plain_items(value)
    if isinstance(value, dict):
        keys, values = _plain_items(list(value)), _plain_items(list(value.values()))
        same = all(map(operator.is_, value, keys)) and all(map(operator.is_, value.values(), values))
        return value if same else dict(zip(keys, values, strict=True))
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)  # of a member of an enum, the value
    if hasattr(kind, "__fspath__"):
        return value.__fspath__()
    # Arrays and scalars of any library, without importing one.
    if isinstance(getattr(value, "ndim", None), int) and callable(getattr(value, "tolist", None)):
        return _plain_array(value)
    return value


def make_plain(instance: Any) -> None:
    """Converts all fields of a dataclass, frozen or not, to plain Python values."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        try:
            converted = plain(value)
        except RecursionError:  # nested too deeply, which the checks of the field refuse
            continue
        if converted is not value:
            object.__setattr__(instance, field.name, converted)


def as_list(value: Any) -> Any:
    """Returns an array of at least one dimension as a list, and any other value as it is."""
    # Arrays of any library, without importing one.
    return value.tolist() if getattr(value, "ndim", 0) else value


def _plain_items(items: Any) -> Any:
    # An allow-list may have a hundred thousand token ids: calling `plain` for each would be slow.
    if _PLAIN.issuperset(map(type, items)):
        return items
    converted = [plain(item) for item in items]
    if all(map(operator.is_, items, converted)):
        return items
    return tuple(converted) if isinstance(items, tuple) else converted


def _plain_array(array: Any) -> Any:
    listed = array.tolist()
    # Types that ml_dtypes adds to NumPy, such as bfloat16, remain scalars of their own.
    return float(listed) if type(listed) is type(array) else plain(listed)
