"""Conversations: assigns prompts to conversations, so that a router can keep their turns together."""

import collections
import hashlib
from array import array
from collections.abc import Sequence

_BLOCK_SIZE = 16
_MAX_CONVERSATIONS = 65_536


class Conversations:
    """Recently seen prompts, from which the conversation key of a new prompt is found.

    A fixed number of leading tokens does not work as a key. A short prefix lies within the system prompt that
    all conversations of an application share, so all of them would go to one replica. A long prefix is longer
    than the first prompts of a short conversation, so its key would change between turns.

    However, the prompt of each turn begins with the whole prompt of the previous turn. This class therefore
    stores a hash of each prompt (its full blocks of tokens). If a new prompt begins with a stored prompt, it
    belongs to the same conversation and gets the same key, and its own hash replaces the stored one. A second
    prompt that continues the same stored prompt begins a new conversation. This happens, for example, if a
    system prompt was once a prompt of its own.

    Args:
        max_num: Maximum number of stored conversations, of about 250 bytes each. The least recently used one
            is removed first; its next prompt begins a new conversation.
    """

    def __init__(self, max_num: int = _MAX_CONVERSATIONS) -> None:
        self._max_num = max_num
        self._key_at: collections.OrderedDict[bytes, str] = collections.OrderedDict()

    def key_of(self, token_ids: Sequence[int], salt: str = "") -> str | None:
        """Returns the key of the conversation that a prompt belongs to, and stores the prompt.

        Args:
            token_ids: The prompt.
            salt: Prompts belong to the same conversation only if their salts are equal.

        Returns:
            The key, which is the same for all turns of a conversation. None for a prompt of less than 16
            tokens, which has no full block to share.
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
    """Returns one digest per full block of a prompt, over all tokens up to the end of the block."""
    tokens = array("q", token_ids)
    # Salts come from users and may contain lone surrogates.
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16)
    ends = []
    for end in range(_BLOCK_SIZE, len(tokens) + 1, _BLOCK_SIZE):
        digest.update(tokens[end - _BLOCK_SIZE : end])
        ends.append(digest.digest())
    return ends
