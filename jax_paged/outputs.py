"""What a request returns; the names are vLLM's."""

import dataclasses

from jax_paged.core.sequence import RequestMetrics


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token, before penalties, bias and temperature.

    Args:
        logprob: Natural logarithm of its probability.
        rank: 1 for the most probable token of the vocabulary.
        decoded_token: Its text; None without a tokenizer.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


# One dict per token: token id -> Logprob, first the sampled (or prompt's) token, then the most probable ones.
TokenLogprobDict = dict[int, Logprob]


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    Args:
        index: Which of the request's outputs it is.
        text: Its text, up to the stop string or stop token that ended it; "" without a tokenizer.
        token_ids: Its tokens, including the one that ended it.
        cumulative_logprob: Sum of the log-probabilities of `token_ids`.
        logprobs: One dict per token; None if not asked for.
        finish_reason: "stop", "length" or "abort"; None while it runs.
        stop_reason: The stop string or stop token id that ended it, or why it was aborted.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[TokenLogprobDict] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Returns whether it has ended."""
        return self.finish_reason is not None

    def extend(self, new: "CompletionOutput") -> None:
        """Appends what has come since."""
        self.text += new.text
        self.token_ids = self.token_ids + new.token_ids
        self.cumulative_logprob = new.cumulative_logprob
        if self.logprobs is not None and new.logprobs is not None:
            self.logprobs = self.logprobs + new.logprobs
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason

    def __repr__(self) -> str:
        end = self.finish_reason and f", finish_reason={self.finish_reason!r}"
        reason = f", stop_reason={self.stop_reason!r}" if self.stop_reason is not None else ""
        return f"CompletionOutput({self.text!r}, {len(self.token_ids)} tokens{end or ', running'}{reason})"


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A request and its outputs so far.

    Args:
        request_id: The id it was added with.
        prompt: The prompt's text; None if it came as token ids alone. Of an encoder-decoder model, the
            decoder's prompt; the next one as well.
        prompt_token_ids: The prompt's tokens.
        prompt_logprobs: One dict per prompt token, None for the first; None if not asked for.
        outputs: Its outputs. With best_of > n, and of a beam search, there are none before the end, because
            only then the best are known.
        finished: Whether all outputs have ended.
        metrics: When it arrived, got its first token and ended, in seconds of time.monotonic().
        num_cached_tokens: Prompt tokens that were found in the prefix cache.
        encoder_prompt: The text that an encoder has read; None if it came as token ids, or without encoder.
        encoder_prompt_token_ids: The tokens that an encoder has read; None without an encoder.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobDict | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None

    def __repr__(self) -> str:
        prompt = f"{len(self.prompt_token_ids)} prompt tokens" if self.prompt is None else repr(self.prompt)
        return f"RequestOutput({self.request_id!r}, {prompt}, outputs={self.outputs})"

    def extend(self, delta: "RequestOutput") -> None:
        """Appends a later part of the same request; `delta` holds only what has come since."""
        if self.outputs:
            for output, new in zip(self.outputs, delta.outputs, strict=True):
                output.extend(new)
        else:
            self.outputs = delta.outputs
        self.prompt_logprobs = delta.prompt_logprobs
        self.finished = delta.finished
        self.num_cached_tokens = delta.num_cached_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A hypothesis of a beam search.

    Args:
        tokens: The tokens of the prompt and its own.
        cum_logprob: Sum of the log-probabilities of its own tokens.
        text: The text of `tokens`; None without a tokenizer.
        finish_reason: "stop" if it ends with an end token, else "length".
        stop_reason: Why it ended before max_tokens, if the pool had no room for more.
    """

    tokens: list[int]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What a beam search found.

    Args:
        sequences: Best first.
    """

    sequences: list[BeamSearchSequence]
