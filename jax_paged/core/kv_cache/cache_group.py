"""Cache groups: sets of layers that share block tables."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that share block tables because they attend to the same past tokens.

    Args:
        window: Number of tokens that a token attends to, including itself; None for all. Blocks that fall out
            of the window are freed while the sequence runs, and the null block replaces them in the block
            table.
        is_cross: Whether the group holds encoder tokens for cross-attention. It then has a fixed number of
            blocks, allocated at the beginning.
    """

    window: int | None = None
    is_cross: bool = False


def max_blocks_held(group: CacheGroup, num_tokens: int, block_size: int, num_new_tokens: int = 0) -> int:
    """Returns the largest number of blocks that a sequence holds at the same time in a cache group.

    Args:
        group: The cache group.
        num_tokens: Tokens of the sequence, or of the encoder input if the group holds encoder tokens.
        block_size: Tokens per block.
        num_new_tokens: How many of the num_tokens tokens the last step writes. Blocks that fall out of the
            window because of these tokens are freed only after that step.
    """
    first = 0 if group.window is None else max(0, num_tokens - group.window - num_new_tokens) // block_size
    return -(-num_tokens // block_size) - first
