"""Conversion of a step's results from device arrays to a ModelRunnerOutput."""

import dataclasses

import numpy as np
from jaxtyping import Array

from jax_paged.core.model_runner_output import NO_TOKEN, ModelRunnerOutput, TokenLogprobs
from jax_paged.worker.step_features import RowOutputs
from jax_paged.worker.step_rows import LogitsRows


@dataclasses.dataclass(frozen=True, eq=False)
class PendingStep:
    """A dispatched step whose result has not been read.

    Args:
        step_id: The step_id of its SchedulerOutput.
        num_rows: Number of entries in SchedulerOutput.scheduled.
        num_samples: Number of entries in SchedulerOutput.samples.
        logits_rows: The logits rows that the columns of `results` belong to.
        num_top: For each drawn token, the number of most likely tokens to report; -1 for no
            log-probabilities.
        results: StepResult.tokens; None if the step computes nothing.
        details: StepResult.details; None if no sample wants log-probabilities.
        row_outputs: Outputs of features; None if the step uses none.
        num_saved_reads: See StepInputs.
    """

    step_id: int
    num_rows: int
    num_samples: int
    logits_rows: LogitsRows
    num_top: np.ndarray
    results: Array | None
    details: Array | None
    row_outputs: RowOutputs | None = None
    num_saved_reads: int = 0

    @classmethod
    def empty(cls, step_id: int) -> "PendingStep":
        """Returns a step that computes nothing."""
        none = np.empty(0, np.int64)
        return cls(step_id, 0, 0, LogitsRows(none, none, none), none, None, None)

    def begin_transfer(self) -> None:
        """Starts to copy the results to the host, without waiting for them."""
        for array in (self.results, self.details):
            if array is not None:
                array.copy_to_host_async()

    def read(self) -> ModelRunnerOutput:
        """Waits for the results and returns them."""
        if self.results is None:
            return ModelRunnerOutput(self.step_id, [], [], [], [])
        results = np.asarray(self.results)
        details = None if self.details is None else np.asarray(self.details)
        if results.ndim == 3:
            return self._read_multi_step(results[:, :, : self.num_samples], details)
        if self.row_outputs is not None:
            results, details = self.row_outputs.redraw(results, details)
        columns, num_drawn = results[:, : len(self.logits_rows.rows)], len(self.logits_rows.samples)
        token_ids, logprobs, is_finite, has_choice = columns[:4]
        finite = np.ones(self.num_rows, bool)
        finite[self.logits_rows.rows[is_finite == 0]] = False
        tokens = np.where(has_choice != 0, token_ids, NO_TOKEN)[:num_drawn].tolist()
        chosen = logprobs[:num_drawn].view(np.float32).tolist()
        entries = read_details(details, chosen, self.num_top.tolist())
        output = ModelRunnerOutput(
            step_id=self.step_id,
            token_ids=[[token] for token in tokens],
            logprobs=[[entry] for entry in entries],
            is_finite=finite.tolist(),
            prompt_logprobs=[[] for _ in range(self.num_rows)],
            num_saved_reads=self.num_saved_reads,
        )
        if (num_drafts := self.logits_rows.num_drafts) is not None:
            output = self._by_sample(output, columns, num_drafts)
        return output if self.row_outputs is None else self.row_outputs.add_to(output)

    def _by_sample(
        self, output: ModelRunnerOutput, columns: np.ndarray, num_drafts: np.ndarray
    ) -> ModelRunnerOutput:
        """Groups the results of a step that verifies drafts by sample.

        Args:
            output: The results with one entry per logits row.
            columns: int32 [4 or 5, L], StepResult.tokens without padding.
            num_drafts: The number of drafts that precede each drawn token.
        """
        samples = self.logits_rows.samples.tolist()

        def split[T](items: list[list[T]]) -> list[list[T]]:
            out: list[list[T]] = [[] for _ in range(self.num_samples)]
            for sample, (item,) in zip(samples, items, strict=True):
                out[sample].append(item)
            return out

        token_ids, logprobs = split(output.token_ids), split(output.logprobs)
        is_bad = columns[2] == 0
        is_bad_draft = is_bad[: len(samples)] & (num_drafts > 0)
        # A logits row after a draft counts only if the draft is accepted, so logits that are not finite do
        # not end the sequence. The sequence gets the tokens before this row and draws again at this position
        # in a later step.
        for j in np.flatnonzero(is_bad_draft)[::-1].tolist():
            for items in (token_ids, logprobs):
                del items[samples[j]][num_drafts[j] :]
        is_bad[: len(samples)] &= num_drafts == 0
        finite = np.ones(self.num_rows, bool)
        finite[self.logits_rows.rows[is_bad]] = False
        drafts: list[list[int]] = []
        if len(columns) > 4:
            # The token before the first logits row of a sample is not a draft.
            drafts = [
                tokens[1:] for tokens in split([[token] for token in columns[4, : len(samples)].tolist()])
            ]
        return dataclasses.replace(
            output, token_ids=token_ids, logprobs=logprobs, is_finite=finite.tolist(), drafts=drafts
        )

    def _read_multi_step(self, results: np.ndarray, details: np.ndarray | None) -> ModelRunnerOutput:
        """Returns the result of multi-step decoding, in which sequence i is also sample i.

        Args:
            results: int32 [K, 5, num_samples] for K decode steps. The first four rows are those of
                StepResult.tokens. The fifth row is 1 if the sequence was not finished before the decode step.
            details: int32 [K, B, 1 + 2N], or None.
        """
        token_ids, logprobs, is_finite, has_choice, is_live = results.transpose(1, 2, 0)
        # A decode step with logits that are not finite is the sequence's last, and its token does not count.
        counts = np.sum(is_live & is_finite, axis=1).tolist()
        tokens = np.where(has_choice != 0, token_ids, NO_TOKEN).tolist()
        chosen = np.ascontiguousarray(logprobs).view(np.float32).tolist()
        entries = []
        for i, (n, num_top) in enumerate(zip(counts, self.num_top.tolist(), strict=True)):
            rows = None if details is None else details[:, i]
            entries.append(read_details(rows, chosen[i][:n], [num_top] * n))
        output = ModelRunnerOutput(
            step_id=self.step_id,
            token_ids=[row[:n] for row, n in zip(tokens, counts, strict=True)],
            logprobs=entries,
            is_finite=np.all((is_live == 0) | (is_finite != 0), axis=1).tolist(),
            prompt_logprobs=[[] for _ in range(self.num_rows)],
            num_saved_reads=self.num_saved_reads * int(is_live.any(axis=0).sum()),
        )
        if self.row_outputs is None:
            return output
        return self.row_outputs.add_to(output, is_live.sum(axis=1).tolist())


def read_details(
    details: np.ndarray | None, logprobs: list[float], num_top: list[int]
) -> list[TokenLogprobs]:
    """Returns the log-probabilities of n tokens.

    Args:
        details: int32 [n or more, 1 + 2N]: rank, ids of the N most likely tokens, bits of their
            log-probabilities; None if no token wants them.
        logprobs: Log-probabilities of the tokens themselves.
        num_top: For each token, the number of most likely tokens to report; -1 to report neither them nor the
            rank.
    """
    if details is None:
        return [TokenLogprobs(logprob, 0, [], []) for logprob in logprobs]
    max_logprobs, ranks = details.shape[1] // 2, details[: len(logprobs), 0].tolist()
    ids = details[:, 1 : 1 + max_logprobs]
    top = np.ascontiguousarray(details[:, 1 + max_logprobs :]).view(np.float32)
    return [
        TokenLogprobs(logprob, 0, [], [])
        if n < 0
        else TokenLogprobs(logprob, rank, ids[i, :n].tolist(), top[i, :n].tolist())
        for i, (logprob, rank, n) in enumerate(zip(logprobs, ranks, num_top, strict=True))
    ]
