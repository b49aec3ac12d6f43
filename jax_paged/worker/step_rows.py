"""The three kinds of rows of a step: scheduled sequences, token rows and logits rows."""

import itertools
from typing import NamedTuple

import numpy as np

from jax_paged.core.scheduler_output import SchedulerOutput


class ScheduledRows(NamedTuple):
    """Scheduled sequences and token rows of a step, for n sequences and t tokens.

    Args:
        batch_slots: int64 [n], the batch slot of each sequence.
        start: int32 [n], the position of the first token that the step computes for the sequence.
        num_tokens: int32 [n], the number of tokens that the step computes for the sequence.
        end_loc: int32 [n], the index after the last token row of the sequence.
        token_batch_slots: int64 [t], the batch slot of each token row.
        positions: int32 [t], the position of each token row.
        tokens: int32 [t], the token of each token row.
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
        """The position after the last token of each sequence, int32 [n]."""
        return self.start + self.num_tokens


class LogitsRows(NamedTuple):
    """Logits rows of a step, L in total.

    The first N logits rows belong to the samples; tokens are drawn from them. Then follows one row for each
    sequence without a sample, because its logits are checked for NaN too.

    Args:
        rows: int64 [L], the index in SchedulerOutput.scheduled of each logits row.
        tokens_back: int64 [L], how many token rows each logits row lies before the last token row of its
            sequence.
        samples: int64 [N], the index in SchedulerOutput.samples of each of the first N logits rows. The
            logits rows of one sample are adjacent and ordered by position.
        num_drafts: int64 [N], the number of drafts that precede the token drawn from each of the first N
            logits rows. None if each sample has one logits row, as in a step that verifies no drafts.
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
        logits_rows = _with_several_per_sample(rows, num_logits)
    else:
        logits_rows = LogitsRows(rows, np.zeros(num_samples, np.int64), np.arange(num_samples))
    if not is_sampled.all():
        others = np.flatnonzero(~is_sampled)
        tokens_back = np.append(logits_rows.tokens_back, np.zeros_like(others))
        logits_rows = logits_rows._replace(rows=np.append(logits_rows.rows, others), tokens_back=tokens_back)
    num_rows, expected = len(logits_rows.rows), output.num_logits_rows
    assert num_rows == expected, f"the step has {num_rows} logits rows, num_logits_rows is {expected}"
    return logits_rows


def _with_several_per_sample(rows: np.ndarray, num_logits: np.ndarray) -> LogitsRows:
    """Returns the logits rows of a step in which samples have several, to verify drafts."""
    assert num_logits.min() >= 1, "a sample has no logits row"
    samples = np.repeat(np.arange(len(rows)), num_logits)
    tokens_back = np.cumsum(num_logits)[samples] - 1 - np.arange(len(samples))
    return LogitsRows(rows[samples], tokens_back, samples, num_logits[samples] - 1 - tokens_back)
