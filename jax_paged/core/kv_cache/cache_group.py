"""What the layers of a model need of a sequence's past, as far as block tables are concerned."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables, because they need the same part of a sequence's past.

    Args:
        window: Tokens that a token attends to, itself included; None for all. Blocks that fall out of the
            window are given back while the sequence runs; the null block takes their place in the table.
        is_cross: Whether it holds an encoder's tokens: a fixed number of blocks from the start.
    """

    window: int | None = None
    is_cross: bool = False


def blocks_of(group: CacheGroup, num_tokens: int, block_size: int, num_new_tokens: int = 0) -> int:
    """Returns the blocks that a sequence needs at once in a cache group.

    Args:
        group: The cache group.
        num_tokens: Tokens of the sequence; of the encoder's text, for a group that holds that.
        block_size: Tokens per block.
        num_new_tokens: Tokens that one step writes, before blocks that fall out of a window are given back.
    """
    first = 0 if group.window is None else max(0, num_tokens - group.window - num_new_tokens) // block_size
    return -(-num_tokens // block_size) - first
