"""The block table of one request and the tokens in each block, with a drawing for notebooks."""

import dataclasses
import html
from collections.abc import Callable

import numpy as np

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.kv_cache.block_pool import NULL_BLOCK
from jax_paged.core.request import Sequence, SequenceGroup

ENTRY_DTYPE = np.dtype(
    [
        ("group", "i4"),
        ("block_id", "i4"),
        ("ref_count", "i4"),
        ("position", "i4"),
        ("num_tokens", "i4"),
        ("is_cached", "?"),
    ]
)
_MAX_DRAWN = 64
_SHARED, _OWN = "hsl(28,75%,55%)", "hsl(210,60%,52%)"


@dataclasses.dataclass(frozen=True)
class PageTable:
    """The block table of one sequence at one moment.

    Shown as a drawing in a notebook. `entries` has these fields:

    - group: Index of the cache group.
    - block_id: Id of the block; 0 (the null block) if the block has left a sliding window.
    - ref_count: Number of references to the block.
    - position: Position of the block's first token in the text.
    - num_tokens: Number of filled slots.
    - is_cached: Whether the prefix cache contains the block.

    Args:
        request_id: Id of the request.
        entries: One row per entry, in the order of the block table.
        block_size: Number of tokens per block.
        tokens: Text of each token of the sequence, or its id without a tokenizer.
    """

    request_id: str
    entries: np.ndarray
    block_size: int
    tokens: tuple[str, ...]

    def __repr__(self) -> str:
        held = self.entries[self.entries["block_id"] != NULL_BLOCK]
        num_shared = int(np.sum(held["ref_count"] > 1))
        return (
            f"<page table of {self.request_id!r}: {len(held)} blocks of {self.block_size} tokens, "
            f"{num_shared} of them shared; keys and values of {held['num_tokens'].sum()} tokens>"
        )

    def _repr_html_(self) -> str:
        """Returns the drawing: a row per block with its tokens, without scripts or external resources."""
        rows = "".join(self._row(entry) for entry in self.entries[:_MAX_DRAWN])
        left = len(self.entries) - _MAX_DRAWN
        more = f"<div>and {left} more blocks</div>" if left > 0 else ""
        style = (
            "display:inline-block;padding:0 .4em;border-radius:2px;color:#fff;font-weight:bold;background:"
        )
        legend = (
            f'<div style="margin-top:4px"><span style="{style}{_OWN}">7</span> block 7, not shared &nbsp; '
            f'<span style="{style}{_SHARED}">7 &times;2</span> shared by two sequences &nbsp; &#9679; full, '
            "in the prefix cache &nbsp; &#9633; empty slot</div>"
        )
        title = html.escape(repr(self)[1:-1])
        return (
            f'<div style="font-size:12px"><div><b>{title}</b></div><table style="border-collapse:collapse;'
            f'font-size:12px;margin:4px 0">{rows}</table>{more}{legend}</div>'
        )

    def _row(self, entry: np.void) -> str:
        position, n, count = int(entry["position"]), int(entry["num_tokens"]), int(entry["ref_count"])
        cell = "padding:1px 6px;text-align:left;border:1px solid rgba(128,128,128,.45)"
        if entry["block_id"] == NULL_BLOCK:
            return f'<tr><td style="{cell}" colspan="3">left the sliding window</td></tr>'
        color = _SHARED if count > 1 else _OWN
        name = f"{entry['block_id']}" + f" &times;{count}" * (count > 1)
        mark = "&#9679;" if entry["is_cached"] else ""
        slots = "".join(
            f'<td style="{cell};font-family:monospace;white-space:pre">{html.escape(token)}</td>'
            for token in self.tokens[position : position + n]
        )
        slots += f'<td style="{cell};opacity:.4">&#9633;</td>' * (self.block_size - n)
        group = f" group {entry['group']}" * bool(entry["group"])
        return (
            f'<tr><td style="{cell};background:{color};color:#fff;font-weight:bold">{name}</td>'
            f'<td style="{cell}">{mark}</td><td style="{cell};text-align:right">{position}{group}</td>'
            f"{slots}</tr>"
        )


def page_table(
    manager: BlockManager, request: SequenceGroup, seq: Sequence, text_of: Callable[[int], str]
) -> PageTable:
    """Returns the block table of a sequence that has blocks on the device; changes nothing.

    Args:
        manager: Owner of the blocks.
        request: Request of the sequence.
        seq: The sequence.
        text_of: Returns the text of a token id.
    """
    size, rows = manager.block_size, []
    for g, (group, table) in enumerate(zip(manager.groups, manager.block_tables[seq], strict=True)):
        num_filled = seq.num_computed_tokens - seq.num_dropped_tokens
        if group.is_cross:
            num_filled = len(request.request.encoder_token_ids)
        for i, block in enumerate(table):
            n = min(max(num_filled - i * size, 0), size) * (block != NULL_BLOCK)
            is_cached = manager.pool.contents[block] is not None
            position = seq.original_block_index(i) * size
            rows.append((g, block, manager.pool.ref_counts[block], position, n, is_cached))
    tokens = tuple(map(text_of, seq.tokens(0, len(seq))))
    return PageTable(request.request_id, np.array(rows, ENTRY_DTYPE), size, tokens)
