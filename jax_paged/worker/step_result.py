"""Results on the device -> values on the host."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Array

from jax_paged.core.model_runner_output import NO_TOKEN, ModelRunnerOutput, TokenLogprobs
from jax_paged.worker.sampling.logits_rows import LogitsRows

if TYPE_CHECKING:
    from jax_paged.worker.composition import RowOutputs


@dataclasses.dataclass(frozen=True, eq=False)
class PendingStep:
    """A step that the device works on.

    Args:
        step_id: That of its SchedulerOutput.
        num_rows: Entries of SchedulerOutput.scheduled.
        num_samples: Entries of SchedulerOutput.samples.
        logits_rows: What the columns of `results` stand for.
        num_top: Per drawn token, how many most likely tokens to report; -1 for no log-probabilities.
        results: StepResult.tokens; None if the step computes nothing.
        details: StepResult.details; None if no sample wants log-probabilities.
        row_outputs: What features compute of the step's rows; None for nothing.
        num_shared_tokens: Of StepInputs.
    """

    step_id: int
    num_rows: int
    num_samples: int
    logits_rows: LogitsRows
    num_top: np.ndarray
    results: Array | None
    details: Array | None
    row_outputs: "RowOutputs | None" = None
    num_shared_tokens: int = 0

    @classmethod
    def empty(cls, step_id: int) -> "PendingStep":
        """Returns a step that computes nothing."""
        none = np.empty(0, np.int64)
        return cls(step_id, 0, 0, LogitsRows(none, none, none, none), none, None, None)

    def begin_transfer(self) -> None:
        """Lets the results travel to the host as soon as they are there."""
        for array in (self.results, self.details):
            if array is not None:
                array.copy_to_host_async()

    def read(self) -> ModelRunnerOutput:
        """Waits for the results and returns them."""
        if self.results is None:
            return ModelRunnerOutput(self.step_id, [], [], [], [])
        if self.results.ndim == 3:
            return self._read_multi_step(np.asarray(self.results)[:, :, : self.num_samples])
        num_drawn = self.logits_rows.num_drawn
        columns = np.array(self.results)[:, : len(self.logits_rows.rows)]
        outputs = self.row_outputs
        redrawn = outputs.redrawn if outputs else {}
        for j, (column, _) in redrawn.items():
            columns[:4, j] = column
        token_ids, logprobs, is_finite, has_choice = columns[:4]
        finite = np.ones(self.num_rows, bool)
        # A row behind drafts may never count: its sequence gets the tokens before it, and draws again there.
        finite[self.logits_rows.rows[(is_finite == 0) & (self.logits_rows.num_drafts == 0)]] = False
        tokens = np.where(has_choice != 0, token_ids, NO_TOKEN)[:num_drawn].tolist()
        chosen = logprobs[:num_drawn].view(np.float32).tolist()
        if self.details is None:
            details = [TokenLogprobs(logprob, 0, [], []) for logprob in chosen]
        else:
            rows = np.array(self.details)[:num_drawn]
            for j, (_, row) in redrawn.items():
                rows[j] = row
            details = read_details(rows, chosen, self.num_top.tolist())
        return ModelRunnerOutput(
            step_id=self.step_id,
            token_ids=self._up_to_bad(tokens, is_finite),
            logprobs=self._up_to_bad(details, is_finite),
            is_finite=finite.tolist(),
            prompt_logprobs=outputs.read_prompt_logprobs(self.num_rows)
            if outputs
            else [[] for _ in range(self.num_rows)],
            captured=outputs.read_captured() if outputs else {},
            num_shared_tokens=self.num_shared_tokens,
            # The first row of logits of a sample stands behind the token that it had.
            drafts=[tokens[1:] for tokens in self._by_sample(columns[4, :num_drawn].tolist())]
            if len(columns) > 4
            else [],
            errors=outputs.errors if outputs else {},
        )

    def _read_multi_step(self, results: np.ndarray) -> ModelRunnerOutput:
        """Returns the result of multi-step decoding, whose row i is that of sample i.

        Args:
            results: int32 [K, 5, num_samples].
        """
        token_ids, logprobs, is_finite, has_choice, is_live = results.transpose(1, 2, 0)
        outputs = self.row_outputs
        # What is not finite comes last, and draws nothing.
        counts = np.sum(is_live & is_finite, axis=1).tolist()
        tokens = np.where(has_choice != 0, token_ids, NO_TOKEN).tolist()
        chosen = np.ascontiguousarray(logprobs).view(np.float32).tolist()
        details = None if self.details is None else np.asarray(self.details)
        entries = []
        for i, (n, num_top) in enumerate(zip(counts, self.num_top.tolist(), strict=True)):
            if details is None or num_top < 0:
                entries.append([TokenLogprobs(logprob, 0, [], []) for logprob in chosen[i][:n]])
            else:
                entries.append(read_details(details[:n, i], chosen[i][:n], [num_top] * n))
        return ModelRunnerOutput(
            step_id=self.step_id,
            token_ids=[row[:n] for row, n in zip(tokens, counts, strict=True)],
            logprobs=entries,
            is_finite=np.all((is_live == 0) | (is_finite != 0), axis=1).tolist(),
            prompt_logprobs=[[] for _ in range(self.num_rows)],
            captured=outputs.read_captured(is_live.sum(axis=1).tolist()) if outputs else {},
            num_shared_tokens=self.num_shared_tokens * int(is_live.any(axis=0).sum()),
            errors=outputs.errors if outputs else {},
        )

    def _up_to_bad[T](self, items: list[T], is_finite: np.ndarray) -> list[list[T]]:
        """Splits what was drawn into a list per sample, up to logits behind drafts that are not finite."""
        lists = self._by_sample(items)
        num_drafts = self.logits_rows.num_drafts[: len(items)]
        bad = np.flatnonzero((is_finite[: len(items)] == 0) & (num_drafts > 0))
        for j in bad[::-1].tolist():
            del lists[self.logits_rows.samples[j]][num_drafts[j] :]
        return lists

    def _by_sample[T](self, items: list[T]) -> list[list[T]]:
        """Splits what was drawn into a list per sample."""
        if len(items) == self.num_samples:
            return [[item] for item in items]
        out: list[list[T]] = [[] for _ in range(self.num_samples)]
        for sample, item in zip(self.logits_rows.samples.tolist(), items, strict=True):
            out[sample].append(item)
        return out


def read_details(details: np.ndarray, logprobs: list[float], num_top: list[int]) -> list[TokenLogprobs]:
    """Returns the log-probabilities of tokens.

    Args:
        details: int32 [n, 1 + 2N]: rank, most likely ids, bits of their log-probabilities.
        logprobs: Of the tokens themselves.
        num_top: Per token, how many of the most likely ones to report; -1 for neither them nor the rank.
    """
    max_logprobs = details.shape[1] // 2
    ranks = details[:, 0].tolist()
    ids = details[:, 1 : 1 + max_logprobs]
    top = np.ascontiguousarray(details[:, 1 + max_logprobs :]).view(np.float32)
    return [
        TokenLogprobs(logprob, 0, [], [])
        if n < 0
        else TokenLogprobs(logprob, rank, ids[i, :n].tolist(), top[i, :n].tolist())
        for i, (logprob, rank, n) in enumerate(zip(logprobs, ranks, num_top, strict=True))
    ]
