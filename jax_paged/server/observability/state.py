"""Snapshot of the server for the status page: counts, lengths and ids, never request text.

The engine's thread changes the objects that are read here while they are read. Therefore each dict or list is
copied before it is iterated over; the interpreter makes such a copy atomically. Copies that are made one
after the other may be from different steps, which does not matter for the status page.
"""

import functools
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request import SequenceGroup
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.server.observability.metrics import Latency, Metrics

# A snapshot is reused for this time (seconds), even if many pages are open.
_MAX_AGE_S = 0.4
_MAX_REQUESTS = 64
_MAX_BLOCKS = 16384
# Values of the "cells" of the "pool". A block that belongs to a listed request has _FIRST_OWNER plus the
# index of the request in "requests". _USED stands for a block that only other requests hold.
_FREE, _CACHED, _PINNED, _USED, _FIRST_OWNER = range(5)


class State:
    """Source of the snapshots for the status page.

    Args:
        engine: The engine. It is only read.
        metrics: Metrics of the server, for the latencies of recent requests.
        model_name: Name of the model in the API.
    """

    def __init__(self, engine: ServingEngine, metrics: Metrics, model_name: str) -> None:
        self._engine = engine
        self._metrics = metrics
        self._model_name = model_name
        self._start = time.monotonic()
        self._last: dict[str, Any] = {}
        self._last_time = -_MAX_AGE_S

    @functools.cached_property
    def _has_chat(self) -> bool:
        tokenizer = self._engine.engine.tokenizer
        try:
            return tokenizer is not None and bool(tokenizer.encode_chat([{"role": "user", "content": "a"}]))
        except ValueError:
            return False

    def snapshot(self) -> dict[str, Any]:
        """Returns a snapshot that is at most 0.4 s old, as a JSON-compatible dict."""
        now = time.monotonic()
        if now - self._last_time >= _MAX_AGE_S:
            self._last, self._last_time = self._snapshot(now), now
        return self._last

    def _snapshot(self, now: float) -> dict[str, Any]:
        replicas, metrics, config = self._engine.replicas, self._metrics, self._engine.engine.config
        done = [replica.statistics for replica in replicas]
        schedulers = [replica.engine.scheduler for replica in replicas]
        by_status = {
            "running": [group for s in schedulers for group in list(s.queues.running.values())],
            "swapped": [group for s in schedulers for group in list(s.queues.swapped.values())],
            "waiting": [group for s in schedulers for group in list(s.queues.waiting.values())],
        }
        shown = [(group, status) for status, groups in by_status.items() for group in groups][:_MAX_REQUESTS]
        progress = [replica.engine.executor.compile_progress for replica in replicas]
        stopped = self._engine.error
        recent = list(metrics.recent)
        return {
            "model": self._model_name,
            "about": {
                "architecture": config.architecture,
                "dtype": config.dtype,
                "attention": config.attention_backend,
                "products": config.matmul_backend,
                "max_model_len": config.max_model_len,
                "num_engines": len(replicas),
                "max_num_seqs": len(replicas) * config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "max_logprobs": config.max_logprobs,
                "weight_bytes": len(replicas) * config.weight_bytes,
                "kv_cache_bytes": len(replicas) * config.kv_cache_bytes,
            },
            "has_chat": self._has_chat,
            "stopped": None if stopped is None else str(stopped) or repr(stopped),
            "uptime_s": now - self._start,
            "programs": {"compiled": sum(p[0] for p in progress), "all": sum(p[1] for p in progress)},
            "done": {
                "steps": sum(d.num_steps for d in done),
                "prompt_tokens": sum(d.num_prompt_tokens for d in done),
                "cached_tokens": sum(d.num_cached_tokens for d in done),
                "generated_tokens": sum(d.num_generated_tokens for d in done),
                "requests": dict(metrics.num_ended),
            },
            "latency": _latency(recent),
            "queues": {
                "running": len(by_status["running"]),
                "swapped": len(by_status["swapped"]),
                "waiting": metrics.num_waiting(),
            },
            "requests": [_request(group, status, now) for group, status in shown],
            "pool": _pools([s.block_manager for s in schedulers], [group for group, _ in shown]),
        }


def _request(group: SequenceGroup, status: str, now: float) -> dict[str, Any]:
    times, sequences = group.metrics, list(group.sequences)
    # A beam search may briefly have no live sequences, when all of its hypotheses have just ended.
    prompt = group.request.encoder_token_ids or next(
        (s.prompt_token_ids for s in sequences + group.completed), ()
    )
    started, first = times.first_scheduled_time, times.first_token_time
    return {
        "id": group.request_id,
        "order": group.arrival,
        "status": status,
        "num_prompt_tokens": len(prompt),
        "num_cached_tokens": times.num_cached_tokens,
        "num_output_tokens": sum(len(seq.output_token_ids) for seq in sequences),
        "num_sequences": len(sequences),
        "max_tokens": group.sampling_params.max_tokens,
        "queue_s": (now if started is None else started) - times.arrival_time,
        "first_token_s": None if first is None else first - times.arrival_time,
        "age_s": now - times.arrival_time,
        "num_preemptions": times.num_preemptions,
    }


def _latency(recent: Sequence[Latency]) -> dict[str, Any]:
    return {
        "first_token": _quantiles(latency.first_token for latency in recent),
        "per_token": _quantiles(x.per_token for x in recent if x.per_token is not None),
    }


def _quantiles(values: Iterable[float]) -> dict[str, float] | None:
    found = sorted(values)
    if not found:
        return None
    return {"p50": statistics.median(found), "p90": found[min(len(found) - 1, len(found) * 9 // 10)]}


def _pools(managers: Sequence[BlockManager], requests: Sequence[SequenceGroup]) -> dict[str, Any]:
    """Returns the contents of the block pools of all engines, concatenated and without null blocks.

    The cells are run-length encoded. Blocks that are shared or only partly filled are listed separately.
    """
    pools = [_pool(manager, requests) for manager in managers]
    cells, refs = np.concatenate([pool[0] for pool in pools]), np.concatenate([pool[1] for pool in pools])
    drawn = cells[:_MAX_BLOCKS]
    starts = np.flatnonzero(np.concatenate(([True], drawn[1:] != drawn[:-1])))
    lengths = np.diff(np.append(starts, len(drawn)))
    shared = np.flatnonzero(refs[:_MAX_BLOCKS] > 1)
    size, not_full, start = managers[0].block_size, [], 0
    for own, _, num_filled in pools:
        placed = ((start + block, n) for block, n in num_filled.items())
        not_full += [[block, n] for block, n in placed if block < _MAX_BLOCKS and n < size]
        start += len(own)
    return {
        "block_size": size,
        "num_blocks": sum(manager.num_usable_blocks for manager in managers),
        "num_used": int(np.count_nonzero(refs)),
        "num_cached": int(np.count_nonzero(cells == _CACHED)),
        "num_shared": int(np.count_nonzero(refs > 1)),
        "num_saved": int(np.sum(np.maximum(refs - 1, 0))),
        "cells": np.stack([lengths, drawn[starts]], 1).tolist(),
        "shared": [list(pair) for pair in zip(shared.tolist(), refs[shared].tolist(), strict=True)],
        "not_full": not_full,
    }


def _pool(
    manager: BlockManager, requests: Sequence[SequenceGroup]
) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
    """Returns the contents of one block pool, without the null block.

    Args:
        manager: Block manager of an engine.
        requests: Requests of all engines, in the order of "requests".

    Returns:
        The cell of each block, the reference count of each block, and the number of tokens in each block at
        the end of a listed sequence, by block. Only the last blocks of a sequence can be partly filled.
    """
    pool, size = manager.pool, manager.block_size
    contents, refs = list(pool.contents), np.array(pool.ref_counts)
    is_cached = np.fromiter((content is not None for content in contents), bool, len(contents))
    cells = np.where(refs > 0, _USED, np.where(is_cached, _CACHED, _FREE))
    for prefix in list(manager.pinned.values()):
        for table in prefix.tables:
            cells[list(table)] = _PINNED
    num_filled: dict[int, int] = {}
    for i, group in enumerate(requests):
        for seq in list(group.sequences):
            for g, table in enumerate(manager.block_tables.get(seq, ())):
                blocks = list(table)
                cells[blocks] = np.where(cells[blocks] == _USED, _FIRST_OWNER + i, cells[blocks])
                is_cross = manager.groups[g].is_cross
                n = len(group.request.encoder_token_ids) if is_cross else seq.num_computed_tokens
                for position in range(n // size, len(blocks)):
                    filled = max(0, min(n - position * size, size))
                    num_filled[blocks[position]] = max(filled, num_filled.get(blocks[position], 0))
    return cells[1:], refs[1:], {block - 1: n for block, n in num_filled.items() if block}
