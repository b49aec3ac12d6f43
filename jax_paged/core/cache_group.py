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
