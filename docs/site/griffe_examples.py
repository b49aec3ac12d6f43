"""Griffe extension that reads "Example:" in docstrings as a section with code."""

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Extension that renames the heading "Example:" to "Examples:", which Griffe reads as code."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Changes the docstring of an object after it was read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
