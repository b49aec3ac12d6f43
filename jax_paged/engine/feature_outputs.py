"""Additions of features to the outputs of a request: beams, captured arrays and the encoder prompt.

A plain request has no FeatureOutputs.
"""

from collections.abc import Iterable

import numpy as np

from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.engine.sample_output import OutputSettings
from jax_paged.outputs import CompletionOutput, RequestOutput


class FeatureOutputs:
    """The additions of features to the outputs of one request.

    Args:
        group: The request; read-only.
        encoder_prompt: Text of the encoder prompt; None if there is none.
        settings: Conversion of outputs to text.
    """

    def __init__(self, group: SequenceGroup, encoder_prompt: str | None, settings: OutputSettings) -> None:
        self._group = group
        self._encoder_prompt = encoder_prompt
        # A copy, because the user may change the list in an output.
        self._encoder_token_ids = list(group.request.encoder_token_ids) or None
        self._tokenizer = settings.tokenizer
        # By the index of the sequence: name of the hook, first position, and the captured rows from that
        # position on.
        self._captured: dict[int, list[tuple[str, int, np.ndarray]]] = {}
        self._pooled: np.ndarray | None = None

    def copy_captured_from(self, other: "FeatureOutputs") -> None:
        """Copies the captured arrays of another request, which this request is forked from."""
        self._captured = {0: list(other._captured.get(0, ()))}

    def add_captured(self, seq: Sequence, start: int, arrays: dict[str, np.ndarray]) -> None:
        """Adds the arrays that hooks captured in a step for one sequence.

        Positions that are computed again, such as after a preemption, get the new values. The array "pooled"
        is the contribution of one chunk of the prompt to the pooled hidden states; the contributions of all
        chunks are added up.

        Args:
            seq: The sequence.
            start: Position of the first token.
            arrays: Captured arrays by the name of the hook, [tokens, ...].
        """
        pooled = arrays.pop("pooled", None)
        if pooled is not None:
            self._pooled = pooled if start == 0 or self._pooled is None else self._pooled + pooled
        self._captured.setdefault(seq.index, []).extend((name, start, x) for name, x in arrays.items())

    def add_to(self, output: RequestOutput, sequences: Iterable[Sequence]) -> None:
        """Adds the encoder prompt to an output; to a finished one also beams, captured and pooled arrays.

        Args:
            output: The output of the request.
            sequences: The sequences of its completions.
        """
        output.encoder_prompt = self._encoder_prompt
        output.encoder_prompt_token_ids = self._encoder_token_ids
        if not output.finished:
            return
        if self._group.beam_params is not None:
            output.outputs = self._beams()
        if self._captured:
            first, *others = map(self._captured_of, sequences)
            # If the request has ended before its prompt was computed, there is only one sequence. All
            # completions get its arrays.
            others += [first] * (len(output.outputs) - 1 - len(others))
            for completion, captured in zip(output.outputs, (first, *others), strict=True):
                completion.captured = captured
        if self._group.sampling_params.pooling is not None:
            output.outputs[0].token_ids = []  # a pooling request draws a meaningless token
            if self._pooled is not None:
                output.outputs[0].captured["pooled"] = self._pooled

    def _beams(self) -> list[CompletionOutput]:
        return [
            CompletionOutput(
                index=i,
                text=self._tokenizer.decode(seq.output_token_ids) if self._tokenizer else "",
                token_ids=list(seq.output_token_ids),
                cumulative_logprob=seq.cumulative_logprob,
                logprobs=None,
                finish_reason=seq.status.finish_reason,
                stop_reason=seq.stop_reason,
            )
            for i, seq in enumerate(self._group.sequences)
        ]

    def _captured_of(self, seq: Sequence) -> dict[str, np.ndarray]:
        """Returns the captured arrays of a sequence, [computed tokens, ...], by the name of the hook.

        The rows of the prompt come from the first sequence, which has computed it for all sequences. Rows
        that were not captured are NaN.
        """
        prompt_len, num_rows = len(seq.prompt_token_ids), len(seq) - 1
        result: dict[str, np.ndarray] = {}
        for index in dict.fromkeys((0, seq.index)):
            end = num_rows if index == seq.index else prompt_len
            for name, start, rows in self._captured.get(index, ()):
                whole = result.setdefault(name, np.full((num_rows, *rows.shape[1:]), np.nan, np.float32))
                part = rows[: max(0, end - start)]
                whole[start : start + len(part)] = part
        return result
