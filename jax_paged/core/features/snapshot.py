"""Snapshot of a scheduler as JSON-compatible values, and its restoration. No step may be in flight.

Batch slots are not saved. In the restored scheduler, each sequence takes one when it is next scheduled.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.codec import request_from_json, request_to_json
from jax_paged.core.kv_cache.prefix_cache import PinnedPrefix
from jax_paged.core.request import Request, RequestMetrics, Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import BlockTables

_TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "finished_time")
_SEQUENCE_FIELDS = (
    "index",
    "seed",
    "output_token_ids",
    "num_computed_tokens",
    "stop_reason",
    "cumulative_logprobs",
    "num_dropped_tokens",
)
_QUEUES = ("running", "waiting", "swapped")


def scheduler_to_json(scheduler: Scheduler) -> dict[str, Any]:
    """Returns the state of a scheduler except its requests."""
    manager = scheduler.block_manager
    return {
        "num_arrivals": scheduler.queues.num_arrivals,
        "pinned": {name: dataclasses.asdict(prefix) for name, prefix in manager.pinned.items()},
        "pool": manager.pool.to_json(),
        "swap_pool": manager.swap_pool.to_json(),
    }


def group_to_json(scheduler: Scheduler, group: SequenceGroup) -> dict[str, Any]:
    """Returns a request, its scheduling state, and the queue that it is in."""
    manager = scheduler.block_manager
    queues = ((name, getattr(scheduler.queues, name)) for name in _QUEUES)
    return {
        "request": request_to_json(group.request),
        "queue": next((name for name, queue in queues if queue.get(group.request_id) is group), None),
        "arrival": group.arrival,
        "metrics": dataclasses.asdict(group.metrics),
        "sequences": [_sequence_to_json(seq, manager) for seq in group.sequences],
        "completed": [_sequence_to_json(seq, manager) for seq in group.completed],
    }


def restore_group(scheduler: Scheduler, values: dict[str, Any], shift_s: float) -> SequenceGroup:
    """Adds a saved request to a new scheduler, in the queue that it was in. Returns the request.

    Args:
        scheduler: A scheduler with the same settings as the one that was saved.
        values: The result of group_to_json.
        shift_s: Seconds to add to all timestamps.
    """
    request, manager = request_from_json(values["request"]), scheduler.block_manager
    times = {name: values["metrics"][name] for name in _TIMES}
    shifted = {name: None if time is None else time + shift_s for name, time in times.items()}
    group = SequenceGroup(
        request,
        [_sequence_from_json(request, entry, manager) for entry in values["sequences"]],
        RequestMetrics(**(values["metrics"] | shifted)),
        arrival=values["arrival"],
        completed=[_sequence_from_json(request, entry, manager) for entry in values["completed"]],
    )
    queues = scheduler.queues
    scheduler.derive_fields(group)
    moves = queues.move_to_running, queues.move_to_waiting, queues.move_to_swapped
    if values["queue"] is not None:
        dict(zip(_QUEUES, moves, strict=True))[values["queue"]](group)
    return group


def restore_scheduler(scheduler: Scheduler, values: dict[str, Any]) -> None:
    """Restores the state saved by scheduler_to_json, after the requests have been restored."""
    manager = scheduler.block_manager
    scheduler.queues.num_arrivals = values["num_arrivals"]
    manager.pinned = {name: PinnedPrefix(**fields) for name, fields in values["pinned"].items()}
    on_device = [*manager.block_tables.values(), *(prefix.tables for prefix in manager.pinned.values())]
    for pool, name, held in (
        (manager.pool, "pool", on_device),
        (manager.swap_pool, "swap_pool", manager.swapped_tables.values()),
    ):
        pool.restore(values[name], _counts(held, pool.num_blocks))
    manager.check_integrity()


def kept_blocks(scheduler: Scheduler) -> tuple[list[int], list[int]]:
    """Returns the blocks whose keys and values may still be read: device blocks and host blocks."""
    manager = scheduler.block_manager
    pools = manager.pool, manager.swap_pool
    device, host = (
        [b for b in range(pool.num_blocks) if pool.ref_counts[b] or pool.contents[b] is not None]
        for pool in pools
    )
    return device, host


def _sequence_to_json(seq: Sequence, manager: BlockManager) -> dict[str, Any]:
    return {name: getattr(seq, name) for name in _SEQUENCE_FIELDS} | {
        "status": seq.status.name,
        "block_places": seq.kept_block_indices,  # the name of the field in this format
        "tables": manager.block_tables.get(seq),
        "swapped_tables": manager.swapped_tables.get(seq),
    }


def _sequence_from_json(request: Request, values: dict[str, Any], manager: BlockManager) -> Sequence:
    kept = {name: values[name] for name in _SEQUENCE_FIELDS}
    indices = tuple(values["block_places"])
    status = SequenceStatus[values["status"]]
    seq = Sequence(request.prompt_token_ids, status=status, kept_block_indices=indices, **kept)
    for tables, name in ((manager.block_tables, "tables"), (manager.swapped_tables, "swapped_tables")):
        if values[name] is not None:
            tables[seq] = values[name]
    return seq


def _counts(held: Iterable[BlockTables], num_blocks: int) -> list[int]:
    counts = Counter(block for tables in held for table in tables for block in table)
    return [0] + [counts[block] for block in range(1, num_blocks)]
