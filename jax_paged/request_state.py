"""What the front keeps of a running request: its text and log-probabilities; makes its outputs."""

import functools
from typing import TYPE_CHECKING

from jax_paged.detokenizer import Detokenizer
from jax_paged.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobDict
from jax_paged.sequence import SequenceGroup
from jax_paged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jax_paged.model_runner import TokenLogprobs


class RequestState:
    """One request: takes in a token at constant cost, and makes a RequestOutput when asked.

    Args:
        group: The request; only read.
        prompt: Its text; None if it came as token ids.
        tokenizer: None leaves all texts empty.
    """

    def __init__(self, group: SequenceGroup, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        params = group.sampling_params
        self.group = group
        self.seq = group.sequences[0]
        self.prompt = prompt
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer and Detokenizer(
            tokenizer,
            self.seq.prompt_token_ids,
            stop=params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        self._cumulative_logprob = 0.0
        self._logprobs: list[TokenLogprobDict] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobDict | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self._num_tokens_taken = 0
        self._num_chars_taken = 0

    def add_prompt_logprobs(self, start: int, logprobs: "list[TokenLogprobs]") -> None:
        """Takes the log-probabilities of the prompt tokens at positions start + 1 and on.

        A preempted request computes its prompt again; the first values stay.
        """
        kept, k = self._prompt_logprobs, self.group.sampling_params.prompt_logprobs
        if kept is None or k is None:
            return
        for position, entry in enumerate(logprobs, start + 1):
            if position == len(kept):
                kept.append(self._logprob_dict(self.seq.prompt_token_ids[position], entry, k))

    def add_token(self, token_id: int, logprob: "TokenLogprobs | None", *, is_stop_token: bool) -> str | None:
        """Takes a sampled token; one that ends the sequence adds nothing to the text.

        Returns:
            The stop string that the text now holds, or None.
        """
        if logprob is not None:
            self._cumulative_logprob += logprob.logprob
            if self._logprobs is not None:
                k = self.group.sampling_params.logprobs or 0
                self._logprobs.append(self._logprob_dict(token_id, logprob, k))
        if self._detokenizer is None or is_stop_token:
            return None
        return self._detokenizer.append(token_id)

    def finish(self) -> None:
        """Ends the request as its sequence ended; a stop string in the text that was held back counts."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.stop_reason = self.seq.status.finish_reason, self.seq.stop_reason
        stop = self._detokenizer and self._detokenizer.finish()
        if stop and self.finish_reason != "abort":
            self.finish_reason, self.stop_reason = "stop", stop

    def output(self) -> RequestOutput:
        """Returns the request as it stands; all outputs of a request share the lists of its prompt."""
        return self._output(0, 0)

    def take_delta(self) -> RequestOutput:
        """Returns what has come since the last call: text, token ids and logprobs hold only the new part."""
        output = self._output(self._num_tokens_taken, self._num_chars_taken)
        self._num_tokens_taken += len(output.outputs[0].token_ids)
        self._num_chars_taken += len(output.outputs[0].text)
        return output

    @functools.cached_property
    def _prompt_token_ids(self) -> list[int]:
        """The prompt for outputs: what a user does to it must not reach the running request."""
        return list(self.seq.prompt_token_ids)

    def _output(self, first_token: int, first_char: int) -> RequestOutput:
        group, seq, detokenizer = self.group, self.seq, self._detokenizer
        completion = CompletionOutput(
            index=0,
            text=detokenizer.text[first_char : detokenizer.num_visible] if detokenizer else "",
            token_ids=seq.output_token_ids[first_token:],
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=group.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[completion],
            finished=self.finish_reason is not None,
            metrics=group.metrics,
            num_cached_tokens=group.metrics.num_cached_tokens,
        )

    def _logprob_dict(self, token_id: int, entry: "TokenLogprobs", k: int) -> TokenLogprobDict:
        text = self._tokenizer.token_text if self._tokenizer else lambda _: None
        result = {token_id: Logprob(entry.logprob, entry.rank, text(token_id))}
        top = zip(entry.top_token_ids[:k], entry.top_logprobs[:k], strict=True)
        for rank, (top_id, top_logprob) in enumerate(top, 1):
            result.setdefault(top_id, Logprob(top_logprob, rank, text(top_id)))
        return result
