"""Conversion of arguments to plain Python values: NumPy and JAX numbers, arrays and paths.

Recordings, snapshots and messages between processes are JSON. Values are therefore converted when a user
passes them.
"""

import dataclasses
import numbers
import operator
from typing import Any

_PLAIN = frozenset({bool, bytes, float, int, str, type(None)})


def plain(value: Any) -> Any:
    """Returns a value as plain Python values; a value without a plain equivalent is returned unchanged.

    Converts integers (`numbers.Integral`), real numbers, NumPy booleans, members of string enums, arrays of
    any library (to lists) and paths (`os.PathLike`), also inside lists, tuples and dicts. A list or dict that
    already holds plain values is returned itself, not as a copy.
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
        return str.__str__(value)  # the value, if it is a member of an enum
    if hasattr(kind, "__fspath__"):
        return value.__fspath__()
    # Recognizes arrays and scalars of any library without importing the library.
    if isinstance(getattr(value, "ndim", None), int) and callable(getattr(value, "tolist", None)):
        return _plain_array(value)
    return value


def make_plain(instance: Any) -> None:
    """Converts all fields of a dataclass instance, frozen or not, to plain Python values in place."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        try:
            converted = plain(value)
        except RecursionError:  # nested too deeply; the checks of the field report it
            continue
        if converted is not value:
            object.__setattr__(instance, field.name, converted)


def as_list(value: Any) -> Any:
    """Returns an array with at least one dimension as a list, and any other value unchanged."""
    # Recognizes arrays of any library without importing the library.
    return value.tolist() if getattr(value, "ndim", 0) else value


def _plain_items(items: Any) -> Any:
    # A list of allowed tokens may have a hundred thousand ids. Calling `plain` for each would be slow.
    if _PLAIN.issuperset(map(type, items)):
        return items
    converted = [plain(item) for item in items]
    if all(map(operator.is_, items, converted)):
        return items
    return tuple(converted) if isinstance(items, tuple) else converted


def _plain_array(array: Any) -> Any:
    listed = array.tolist()
    # Scalars of types that ml_dtypes adds to NumPy, such as bfloat16, are not converted by tolist().
    return float(listed) if type(listed) is type(array) else plain(listed)
