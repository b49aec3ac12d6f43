"""What a planted bug is."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A planted bug.

    Args:
        file: Where it is planted, in jax_paged.
        old: A piece of source that occurs once in it.
        new: What takes its place.
        why: What that means.
    """

    file: str
    old: str
    new: str
    why: str
