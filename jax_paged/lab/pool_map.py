"""A map of the KV cache: the state, owners and fill level of each block, with a drawing for notebooks."""

import dataclasses
import html
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from jax_paged.core.request import SequenceGroup

BLOCK_DTYPE = np.dtype(
    [("block_id", "i4"), ("state", "U6"), ("group", "i4"), ("ref_count", "i4"), ("num_tokens", "i4")]
)
OWNER_DTYPE = np.dtype(
    [
        ("block_id", "i4"),
        ("request_id", "O"),
        ("arrival", "i8"),
        ("index", "i4"),
        ("group", "i4"),
        ("position", "i4"),
        ("num_tokens", "i4"),
    ]
)
# Maximum numbers of drawn blocks, of requests or owners in a list, and of stripes in a cell.
MAX_DRAWN, _MAX_LISTED, _MAX_STRIPES = 2000, 16, 4
# Size of a cell, distance between the origins of two cells (both in pixels), and number of cells in a row.
SIDE, PITCH, NUM_COLUMNS = 20, 24, 40
_GREY = "hsl(220,8%,55%)"
_LIGHTNESS = (52, 66, 42, 59)


@dataclasses.dataclass(frozen=True)
class PoolMap:
    """The KV cache blocks at one moment, on the device and in host memory.

    Shown as a drawing in a notebook. `blocks` and `host_blocks` have these fields:

    - block_id: Id of the block.
    - state: "null" (the null block), "free", "cached" (free, but still in the prefix cache), "used", or
      "pinned" (held by a pinned prefix).
    - group: Index of the cache group; -1 if the block holds nothing.
    - ref_count: Number of references to the block.
    - num_tokens: Number of filled slots.

    `owners` and `host_owners` have one row per reference to a block:

    - block_id: Id of the block.
    - request_id: Id of the request, or name of the pinned prefix.
    - arrival: Index of the request in order of arrival; -1 for a pinned prefix.
    - index: Index of the sequence in the request; -1 for a pinned prefix.
    - group: Index of the cache group.
    - position: Index of the block in the owner's block table.
    - num_tokens: Number of slots that this owner has filled.

    Args:
        blocks: All blocks on the device, in order of block ids.
        owners: References to these blocks, in order of block ids.
        host_blocks: The blocks in host memory that swapped-out requests hold.
        host_owners: References to these blocks.
        block_size: Number of tokens per block.
    """

    blocks: np.ndarray
    owners: np.ndarray
    host_blocks: np.ndarray
    host_owners: np.ndarray
    block_size: int

    def __repr__(self) -> str:
        host = f"; {len(self.host_blocks)} blocks in host memory" if len(self.host_blocks) else ""
        return f"<KV pool: {_summary(self.blocks, self.block_size)}{host}>"

    def _repr_html_(self) -> str:
        """Returns the drawing as inline SVG, without scripts or external resources."""
        parts = [_drawing("KV pool", self.blocks, self.owners, self.block_size)]
        if len(self.host_blocks):
            parts.append(_drawing("Host memory", self.host_blocks, self.host_owners, self.block_size))
        return f'<div style="font-size:12px;line-height:1.6">{"".join(parts)}</div>'


def pool_map(manager: BlockManager, requests: Iterable[SequenceGroup]) -> PoolMap:
    """Returns a map of the blocks of a block manager; changes nothing.

    Args:
        manager: Owner of the blocks.
        requests: All requests that may hold blocks.
    """
    device: list[tuple] = []
    host: list[tuple] = []

    def add_rows(rows: list[tuple], table: list[int], num_tokens: int, g: int, *owner: object) -> None:
        for position, block in enumerate(table):
            if block != NULL_BLOCK:  # the null block replaces blocks that left a sliding window
                filled = min(max(num_tokens - position * manager.block_size, 0), manager.block_size)
                rows.append((block, *owner, g, position, filled))

    for request in requests:
        owner = request.request_id, request.arrival
        for index, seq in enumerate(request.sequences):
            for rows, tables in ((device, manager.block_tables), (host, manager.swapped_tables)):
                for g, table in enumerate(tables.get(seq, ())):
                    is_cross = manager.groups[g].is_cross
                    n = (
                        len(request.request.encoder_token_ids)
                        if is_cross
                        else seq.num_computed_tokens - seq.num_dropped_tokens
                    )
                    add_rows(rows, table, n, g, *owner, index)
    for name, prefix in manager.pinned.items():
        for g, table in enumerate(prefix.tables):
            add_rows(device, table, len(table) * manager.block_size, g, name, -1, -1)
    owners, host_owners = (
        np.array(sorted(rows, key=lambda row: row[0]), OWNER_DTYPE) for rows in (device, host)
    )
    host_blocks = _blocks(manager.swap_pool, host_owners, manager.block_size)
    return PoolMap(
        _blocks(manager.pool, owners, manager.block_size),
        owners,
        host_blocks[host_blocks["ref_count"] > 0],
        host_owners,
        manager.block_size,
    )


def _blocks(pool: BlockPool, owners: np.ndarray, block_size: int) -> np.ndarray:
    blocks = np.zeros(pool.num_blocks, BLOCK_DTYPE)
    blocks["block_id"] = np.arange(pool.num_blocks)
    blocks["ref_count"] = pool.ref_counts
    blocks["group"] = [-1 if content is None else content.group for content in pool.contents]
    is_cached = blocks["group"] >= 0
    blocks["group"][owners["block_id"]] = owners["group"]
    blocks["num_tokens"] = is_cached * block_size
    np.maximum.at(blocks["num_tokens"], owners["block_id"], owners["num_tokens"])
    blocks["state"] = np.where(blocks["ref_count"] > 0, "used", np.where(is_cached, "cached", "free"))
    blocks["state"][owners["block_id"][owners["index"] < 0]] = "pinned"
    blocks["state"][NULL_BLOCK] = "null"
    return blocks


def _summary(blocks: np.ndarray, block_size: int) -> str:
    held = blocks[blocks["ref_count"] > 0]
    is_whole = blocks["block_id"][0] == NULL_BLOCK
    text = (
        f"{len(held):,} of {len(blocks) - 1:,} blocks in use" if is_whole else f"{len(held):,} blocks in use"
    )
    if not len(held):
        return text
    num_tokens, num_slots = held["num_tokens"].sum(), len(held) * block_size
    num_saved = held["ref_count"].sum() - len(held)
    saved = f", and sharing saves {num_saved:,} more" if num_saved else ""
    filled = f"{num_tokens:,} of their {num_slots:,} slots hold tokens ({num_tokens / num_slots:.0%})"
    return f"{text}{saved}; {filled}"


def _drawing(title: str, blocks: np.ndarray, owners: np.ndarray, block_size: int) -> str:
    """Returns a heading, the blocks as a grid, and a legend."""
    drawn, note = blocks, ""
    if len(blocks) > MAX_DRAWN:
        drawn = blocks[blocks["ref_count"] > 0]
        note = f" Only the {len(drawn):,} blocks in use are drawn."
        if len(drawn) > MAX_DRAWN:
            drawn, note = drawn[:MAX_DRAWN], f" Only the first {MAX_DRAWN:,} blocks in use are drawn."
    by_block: dict[int, list[np.void]] = defaultdict(list)
    for owner in owners[np.isin(owners["block_id"], drawn["block_id"])]:
        by_block[int(owner["block_id"])].append(owner)
    cells = [_cell(i, b, by_block[int(b["block_id"])], block_size) for i, b in enumerate(drawn)]
    num_rows = -(-len(drawn) // NUM_COLUMNS)
    width, height = (n * PITCH + 2 for n in (min(len(drawn), NUM_COLUMNS), num_rows))
    grid = (
        f'<svg viewBox="-1 -1 {width} {height}" style="display:block;width:100%;max-width:{width}px" '
        f'font-size="10" font-weight="bold" text-anchor="middle">{"".join(cells)}</svg>'
    )
    legend = "".join(
        f'<span style="display:inline-block;margin-right:1.2em">{entry}</span>'
        for entry in _legend(blocks, owners)
    )
    text = f"<div><b>{title}</b>: {_summary(blocks, block_size)}.{note}</div>"
    return f"{text}{grid if len(drawn) else ''}<div>{legend}</div>"


def _cell(i: int, block: np.void, owners: list[np.void], block_size: int) -> str:
    """Returns the i-th cell of the grid, with a tooltip.

    The cell has a stripe for each request that holds the block, or for each sequence if only one request
    holds it. The height of the stripes shows how many of the block's slots are filled.
    """
    state, count, num_tokens = str(block["state"]), int(block["ref_count"]), int(block["num_tokens"])
    lines = [
        f"block {block['block_id']}: {state}" + f", {num_tokens} of {block_size} tokens" * (num_tokens > 0)
    ]
    for owner in owners[:_MAX_LISTED]:
        group = f", group {owner['group']}" * bool(owner["group"])
        lines.append(f"{owner_name(owner)}: block {owner['position']} of its table{group}")
    if count > _MAX_LISTED:
        lines.append(f"and {count - _MAX_LISTED} more")
    x, y = cell_position(i)
    title = html.escape(chr(10).join(lines))
    return (
        f'<g transform="translate({x} {y})"><title>{title}</title>{cell_svg(block, owners, block_size)}</g>'
    )


def cell_position(i: int) -> tuple[int, int]:
    """Returns the position (x, y) of the i-th cell of a drawing."""
    return i % NUM_COLUMNS * PITCH, i // NUM_COLUMNS * PITCH


def cell_svg(block: np.void, owners: list[np.void], block_size: int) -> str:
    """Returns the SVG of a cell without position and tooltip; blocks that look the same have equal SVG.

    Args:
        block: A row of PoolMap.blocks.
        owners: The rows of PoolMap.owners for this block.
        block_size: Number of tokens per block.
    """
    sequences = [(owner["arrival"], owner["index"]) for owner in owners if owner["index"] >= 0]
    requests = dict.fromkeys(arrival for arrival, _ in sequences)
    colors = [_color(*s) for s in (sequences if len(requests) == 1 else [(r, 0) for r in requests])]
    share = int(block["num_tokens"]) / block_size
    return _draw_cell(str(block["state"]), colors[:_MAX_STRIPES], share, int(block["ref_count"]))


def _draw_cell(state: str, colors: list[str], share: float, count: int) -> str:
    stripes = colors or [_GREY] * (state in ("cached", "pinned"))
    width, height = SIDE / max(len(stripes), 1), SIDE * share
    opacity = 0.35 if state == "cached" else 1
    parts = [
        f'<rect x="{j * width:g}" y="{SIDE - height:g}" width="{width:g}" height="{height:g}" '
        f'fill="{color}" opacity="{opacity}"/>'
        for j, color in enumerate(stripes)
    ]
    line = 'stroke-width="2.5"' if state == "pinned" else f'stroke-opacity="{0.7 if count else 0.25}"'
    parts.append(
        f'<rect width="{SIDE}" height="{SIDE}" rx="2" fill="#fff" fill-opacity="0" '
        f'stroke="currentColor" {line}/>'
    )
    if state == "null":
        parts.append(f'<path d="M0 {SIDE}L{SIDE} 0" stroke="currentColor" stroke-opacity="0.25"/>')
    if count > 1:
        parts.append(
            f'<text x="{SIDE / 2:g}" y="{SIDE / 2 + 3.5:g}" fill="#fff" stroke="#000" stroke-width="2" '
            f'paint-order="stroke" pointer-events="none">{count}</text>'
        )
    return "".join(parts)


def _legend(blocks: np.ndarray, owners: np.ndarray) -> Iterator[str]:
    """Yields the meaning of each mark with the number of its blocks, and then the requests."""
    num = Counter(blocks["state"].tolist())
    marks = (
        ("free", [], 0, num["free"], "free"),
        ("cached", [], 0, num["cached"], "free, but cached"),
        ("pinned", [], 1, num["pinned"], "pinned"),
        ("used", [_GREY], 2, int(np.sum(blocks["ref_count"] > 1)), "shared by two or more sequences"),
        ("null", [], 0, num["null"], "null block"),
    )
    for state, colors, count, num_blocks, meaning in marks:
        if num_blocks:
            yield f"{_swatch(state, colors, count)} {meaning}: {num_blocks:,}"
    requests: dict[tuple[int, str], list[np.void]] = defaultdict(list)
    for owner in owners:
        if owner["index"] >= 0:
            requests[owner["arrival"], owner["request_id"]].append(owner)
    for (arrival, _), own in sorted(requests.items(), key=lambda item: item[0])[:_MAX_LISTED]:
        indices = sorted({int(owner["index"]) for owner in own})
        colors = [_color(arrival, index) for index in indices[:_MAX_STRIPES]]
        num_blocks = len({int(owner["block_id"]) for owner in own})
        several = f"{len(indices)} sequences, " if len(indices) > 1 else ""
        name = html.escape(short_name(own[0]["request_id"]))
        yield f"{_swatch('used', colors, 1)} {name}: {several}{num_blocks:,} blocks"
    if len(requests) > _MAX_LISTED:
        yield f"and {len(requests) - _MAX_LISTED:,} more requests"


def _swatch(state: str, colors: list[str], count: int) -> str:
    svg = _draw_cell(state, colors, 1, count)
    return (
        '<svg viewBox="-1 -1 22 22" width="14" height="14" style="vertical-align:-2px" font-size="12" '
        f'font-weight="bold" text-anchor="middle">{svg}</svg>'
    )


def _color(arrival: int, index: int) -> str:
    """Returns a hue for a request and a shade for its sequence, which are the same in every map."""
    golden_angle = 137.508  # gives consecutive requests very different hues
    hue = (210 + arrival * golden_angle) % 360
    return f"hsl({hue:.0f},60%,{_LIGHTNESS[index % len(_LIGHTNESS)]}%)"


def owner_name(owner: np.void) -> str:
    """Returns the request and sequence, or the pinned prefix, of a row of PoolMap.owners."""
    name = short_name(owner["request_id"])
    return f"pinned {name}" if owner["index"] < 0 else f"{name}, sequence {owner['index']}"


def short_name(request_id: str) -> str:
    """Returns a request id as one short line, with "?" for each character that is not printable."""
    text = "".join(c if c.isprintable() else "?" for c in request_id)
    return text if len(text) <= 32 else f"{text[:20]}...{text[-8:]}"
