"""Rows of a step: scheduled sequences, token rows and logits rows."""

import itertools
from typing import NamedTuple

import numpy as np

from jax_paged.core.scheduler_output import SchedulerOutput


class ScheduledRows(NamedTuple):
    """The scheduled sequences and token rows of a step. n sequences, t tokens.

    Args:
        batch_slots: int64 [n], the batch slot of each sequence.
        start: int32 [n], the position of its first token.
        num_tokens: int32 [n].
        end_loc: int32 [n], the token row after its last one.
        token_batch_slots: int64 [t], the batch slot of each token row.
        positions: int32 [t], the position of each token row.
        tokens: int32 [t].
    """

    batch_slots: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    end_loc: np.ndarray
    token_batch_slots: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray

    @property
    def stop(self) -> np.ndarray:
        """int32 [n], the position after the last token of each sequence."""
        return self.start + self.num_tokens


class LogitsRows(NamedTuple):
    """The logits rows of a step, L of them: those of the samples, then one per sequence without a sample.

    Args:
        rows: int64 [L], index in SchedulerOutput.scheduled.
        tokens_back: int64 [L], the number of tokens between its token row and the sequence's last one.
        samples: int64 [N], index in SchedulerOutput.samples of the first N logits rows, from which tokens are
            drawn. Those of one sample are neighbours, in order of position.
        num_drafts: int64 [N], the number of drafts that precede each logits row of a sample; None in a step
            that verifies no drafts, where each sample has one logits row.
    """

    rows: np.ndarray
    tokens_back: np.ndarray
    samples: np.ndarray
    num_drafts: np.ndarray | None = None


def plan_logits_rows(output: SchedulerOutput) -> LogitsRows:
    """Returns the logits rows that a step computes."""
    num_samples = len(output.samples)
    flat = itertools.chain.from_iterable(output.samples)
    rows, _, num_logits = np.fromiter(flat, np.int64, 3 * num_samples).reshape(num_samples, 3).T
    is_sampled = np.zeros(len(output.scheduled), bool)
    is_sampled[rows] = True
    if (num_logits != 1).any():
        planned = _with_several_per_sample(rows, num_logits)
    else:
        planned = LogitsRows(rows, np.zeros(num_samples, np.int64), np.arange(num_samples))
    if not is_sampled.all():
        others = np.flatnonzero(~is_sampled)
        tokens_back = np.append(planned.tokens_back, np.zeros_like(others))
        planned = planned._replace(rows=np.append(planned.rows, others), tokens_back=tokens_back)
    assert len(planned.rows) == output.num_logits_rows, (len(planned.rows), output.num_logits_rows)
    return planned


def _with_several_per_sample(rows: np.ndarray, num_logits: np.ndarray) -> LogitsRows:
    """Returns the logits rows of samples that verify drafts."""
    assert num_logits.min() >= 1, "a sample has no row of logits"
    samples = np.repeat(np.arange(len(rows)), num_logits)
    tokens_back = np.cumsum(num_logits)[samples] - 1 - np.arange(len(samples))
    return LogitsRows(rows[samples], tokens_back, samples, num_logits[samples] - 1 - tokens_back)
