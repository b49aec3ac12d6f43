"""Which rows of logits a step computes: those of the samples, then one per row without a sample."""

import itertools
from typing import NamedTuple

import numpy as np

from jax_paged.core.scheduler_output import SchedulerOutput


class LogitsRows(NamedTuple):
    """The rows of logits of a step, L of them.

    Args:
        rows: int64 [L], index in SchedulerOutput.scheduled.
        tokens_back: int64 [L], how many tokens before the row's last one.
        samples: int64 [N], index in SchedulerOutput.samples of the first N rows of logits, which something
            is drawn from. Those of one sample stand together, in order of position.
        num_drafts: int64 [L], how many drafts each stands behind.
    """

    rows: np.ndarray
    tokens_back: np.ndarray
    samples: np.ndarray
    num_drafts: np.ndarray

    @property
    def num_drawn(self) -> int:
        """N."""
        return len(self.samples)


def plan_logits_rows(output: SchedulerOutput) -> LogitsRows:
    """Returns the rows of logits that a step computes."""
    num_samples = len(output.samples)
    flat = itertools.chain.from_iterable(output.samples)
    rows, _, num_logits = np.fromiter(flat, np.int64, 3 * num_samples).reshape(num_samples, 3).T
    samples = np.arange(num_samples)
    tokens_back = np.zeros(num_samples, np.int64)
    if (num_logits != 1).any():
        assert num_logits.min() >= 1, "a sample has no row of logits"
        samples = np.repeat(samples, num_logits)
        ends = np.cumsum(num_logits)
        rows, tokens_back = rows[samples], ends[samples] - 1 - np.arange(len(samples))
        num_logits = num_logits[samples]
    is_sampled = np.zeros(len(output.scheduled), bool)
    is_sampled[rows] = True
    if not is_sampled.all():
        others = np.flatnonzero(~is_sampled)
        rows = np.append(rows, others)
        tokens_back = np.append(tokens_back, np.zeros(len(others), np.int64))
    assert len(rows) == output.num_logits_rows, (len(rows), output.num_logits_rows)
    num_drafts = np.zeros(len(rows), np.int64)
    num_drafts[: len(samples)] = num_logits - 1 - tokens_back[: len(samples)]
    return LogitsRows(rows, tokens_back, samples, num_drafts)
