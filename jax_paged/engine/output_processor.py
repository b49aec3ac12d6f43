"""What the front keeps of a running request: its texts and log-probabilities; makes its outputs."""

import dataclasses
import functools
from typing import TYPE_CHECKING

from jax_paged.core.sequence import Sequence, SequenceGroup
from jax_paged.engine.detokenizer import Detokenizer
from jax_paged.engine.tokenizer import Tokenizer
from jax_paged.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobDict

if TYPE_CHECKING:
    from jax_paged.core.runner_output import TokenLogprobs


class SampleState:
    """One output of a request: takes in a token at constant cost.

    Args:
        seq: Its tokens; only read.
        group: Its request; only read.
        tokenizer: None leaves the text empty.
    """

    def __init__(self, seq: Sequence, group: SequenceGroup, tokenizer: Tokenizer | None) -> None:
        params = group.sampling_params
        self.seq = seq
        self.cumulative_logprob = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._logprobs: list[TokenLogprobDict] | None = None if params.logprobs is None else []
        self._num_logprobs = params.logprobs or 0
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer and Detokenizer(
            tokenizer,
            seq.prompt_token_ids,
            stop=params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        self._shows_stop_token = params.include_stop_str_in_output
        self._num_tokens_taken = 0
        self._num_chars_taken = 0

    def add_token(self, token_id: int, logprob: "TokenLogprobs", *, is_stop_token: bool) -> str | None:
        """Takes a sampled token; one that ends the sequence adds nothing to the text.

        Returns:
            The stop string that the text now holds, or None.
        """
        self.cumulative_logprob += logprob.logprob
        if self._logprobs is not None:
            entry = logprob_dict(token_id, logprob, self._num_logprobs, self._tokenizer)
            self._logprobs.append(entry)
        if self._detokenizer is None or (is_stop_token and not self._shows_stop_token):
            return None
        return self._detokenizer.append(token_id)

    def finish(self) -> None:
        """Ends it as its sequence ended; a stop string in the text that was held back counts."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.stop_reason = self.seq.status.finish_reason, self.seq.stop_reason
        stop = self._detokenizer and self._detokenizer.finish()
        if stop and self.finish_reason != "abort":
            self.finish_reason, self.stop_reason = "stop", stop

    def output(self, index: int, *, only_new: bool) -> CompletionOutput:
        """Returns it as it stands, or only what has come since this was last asked."""
        first_token, first_char = (self._num_tokens_taken, self._num_chars_taken) if only_new else (0, 0)
        detokenizer = self._detokenizer
        output = CompletionOutput(
            index=index,
            text=detokenizer.text[first_char : detokenizer.num_visible] if detokenizer else "",
            token_ids=self.seq.output_token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        if only_new:
            self._num_tokens_taken += len(output.token_ids)
            self._num_chars_taken += len(output.text)
        return output


class RequestState:
    """One request: its samples, or its beams; makes a RequestOutput when asked.

    Args:
        group: The request; only read.
        prompt: Its text; None if it came as token ids.
        tokenizer: None leaves all texts empty.
        encoder_prompt: The text that an encoder reads; None if there is none.
    """

    def __init__(
        self,
        group: SequenceGroup,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        encoder_prompt: str | None = None,
    ) -> None:
        self.group = group
        self.prompt = prompt
        self._encoder_prompt = encoder_prompt
        self.is_finished = False
        self._tokenizer = tokenizer
        # By the sequence's index. The others are forked from the first when the prompt is computed; until
        # then its state stands for all.
        self._samples = [SampleState(group.sequences[0], group, tokenizer)]
        self._prompt_logprobs: list[TokenLogprobDict | None] | None = (
            None if group.sampling_params.prompt_logprobs is None else [None]
        )

    def add_prompt_logprobs(self, start: int, logprobs: "list[TokenLogprobs]") -> None:
        """Takes the log-probabilities of the prompt tokens at positions start + 1 and on.

        A preempted request computes its prompt again; the first values stay.
        """
        kept, k = self._prompt_logprobs, self.group.sampling_params.prompt_logprobs
        if kept is None or k is None:
            return
        for position, entry in enumerate(logprobs, start + 1):
            if position == len(kept):
                token_id = self._prompt_token_ids[position]
                kept.append(logprob_dict(token_id, entry, k, self._tokenizer))

    def add_token(
        self, seq: Sequence, token_id: int, logprob: "TokenLogprobs", *, is_stop_token: bool
    ) -> str | None:
        """Takes a sampled token of one of its sequences; see SampleState.add_token."""
        samples = self._samples
        if seq.index == len(samples):  # samples come in the order of their index
            samples.append(SampleState(seq, self.group, self._tokenizer))
        return samples[seq.index].add_token(token_id, logprob, is_stop_token=is_stop_token)

    def finish_sample(self, seq: Sequence) -> None:
        """Ends the output of one sequence, as that has ended."""
        self._samples[seq.index].finish()

    def finish(self) -> None:
        """Ends the request as its sequences ended."""
        self.is_finished = True
        if self.group.beam_params is None:
            for sample in self._samples:
                sample.finish()

    def output(self) -> RequestOutput:
        """Returns the request as it stands; all outputs of a request share the lists of its prompt."""
        return self._output(only_new=False)

    def take_delta(self) -> RequestOutput:
        """Returns what has come since the last call: text, token ids and logprobs hold only the new part."""
        return self._output(only_new=True)

    @functools.cached_property
    def _prompt_token_ids(self) -> list[int]:
        """The prompt for outputs: what a user does to it must not reach the running request."""
        return list(self.group.sequences[0].prompt_token_ids)

    def _output(self, *, only_new: bool) -> RequestOutput:
        group = self.group
        return RequestOutput(
            request_id=group.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=self._completions(only_new=only_new),
            finished=self.is_finished,
            metrics=group.metrics,
            num_cached_tokens=group.metrics.num_cached_tokens,
            encoder_prompt=self._encoder_prompt,
            encoder_prompt_token_ids=list(group.encoder_token_ids) or None,
        )

    def _completions(self, *, only_new: bool) -> list[CompletionOutput]:
        group = self.group
        params, n = group.sampling_params, group.sampling_params.n
        samples = list(self._samples)
        if group.beam_params is not None:
            beams = group.sequences if self.is_finished else []
            return [self._beam_output(i, seq) for i, seq in enumerate(beams)]
        if (params.best_of or n) > n:
            if not self.is_finished:
                return []
            samples = sorted(samples, key=lambda s: s.cumulative_logprob, reverse=True)[:n]
        outputs = [s.output(i, only_new=only_new) for i, s in enumerate(samples)]
        # Before its prompt is computed, all samples are as the first: empty.
        return outputs + [dataclasses.replace(outputs[0], index=i) for i in range(len(outputs), n)]

    def _beam_output(self, index: int, seq: Sequence) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=self._tokenizer.decode(seq.output_token_ids) if self._tokenizer else "",
            token_ids=seq.output_token_ids,
            cumulative_logprob=seq.cum_logprob,
            logprobs=None,
            finish_reason=seq.status.finish_reason,
            stop_reason=seq.stop_reason,
        )


def logprob_dict(
    token_id: int, entry: "TokenLogprobs", k: int, tokenizer: Tokenizer | None
) -> TokenLogprobDict:
    """Returns a token's Logprob and those of the k most likely ones, by token id."""
    text = tokenizer.token_text if tokenizer else lambda _: None
    result = {token_id: Logprob(entry.logprob, entry.rank, text(token_id))}
    top = zip(entry.top_token_ids[:k], entry.top_logprobs[:k], strict=True)
    for rank, (top_id, top_logprob) in enumerate(top, 1):
        result.setdefault(top_id, Logprob(top_logprob, rank, text(top_id)))
    return result
