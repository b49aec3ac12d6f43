"""Which conversation a prompt belongs to, as its tokens tell: what a router keeps together goes by this."""

import collections
import hashlib
from array import array
from collections.abc import Sequence

_BLOCK_SIZE = 16
_MAX_CONVERSATIONS = 65_536


class Conversations:
    """Knows the last prompts, so that the next one of a conversation is given the key of its first.

    No number of leading tokens would do as a key. A short one is within the system prompt that all
    conversations of an application share, and sends all of them to one replica; a long one is not reached by
    the first prompts of a short conversation, whose key then changes with every turn. But the prompt of a
    turn begins with the whole prompt of the turn before. So the end of each prompt is remembered, in full
    blocks of tokens, until another prompt goes on from there: that one belongs to the same conversation, and
    its own end takes the place. A second prompt that goes on from the same end, such as one behind a system
    prompt that was a prompt once, begins a conversation of its own.

    Args:
        max_num: How many conversations are remembered; each takes 250 bytes. Those that rest longest are
            forgotten first, and begin anew.
    """

    def __init__(self, max_num: int = _MAX_CONVERSATIONS) -> None:
        self._max_num = max_num
        self._key_at: collections.OrderedDict[bytes, str] = collections.OrderedDict()

    def key_of(self, token_ids: Sequence[int], salt: str = "") -> str | None:
        """Returns the key of the conversation that a prompt begins or goes on with, and remembers its end.

        Args:
            token_ids: The prompt.
            salt: Only prompts of equal salt can share anything.

        Returns:
            The same for all turns of a conversation; None for a prompt of less than 16 tokens, which has
            nothing to share.
        """
        ends = _ends(token_ids, salt)
        if not ends:
            return None
        found = next((end for end in reversed(ends) if end in self._key_at), None)
        key = ends[-1].hex() if found is None else self._key_at.pop(found)
        self._key_at[ends[-1]] = key
        if len(self._key_at) > self._max_num:
            self._key_at.popitem(last=False)
        return key


def _ends(token_ids: Sequence[int], salt: str) -> list[bytes]:
    """Returns a digest per full block of a prompt, of all tokens up to its end."""
    tokens = array("q", token_ids)
    # Salts come from users, and may hold lone surrogates.
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16)
    ends = []
    for end in range(_BLOCK_SIZE, len(tokens) + 1, _BLOCK_SIZE):
        digest.update(tokens[end - _BLOCK_SIZE : end])
        ends.append(digest.digest())
    return ends
