"""Text and log-probabilities of one output of a running request."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from jax_paged.core.request import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED
from jax_paged.engine.replicas.prior_outputs import PriorOutput
from jax_paged.engine.text.detokenizer import Detokenizer
from jax_paged.engine.text.stop_strings import StopStrings
from jax_paged.engine.text.text_codec import TextCodec
from jax_paged.outputs import CompletionOutput, Logprob, Snapshot, TokenLogprobDict

if TYPE_CHECKING:
    from jax_paged.core.model_runner_output import TokenLogprobs
    from jax_paged.engine.features.structured_output.grammars import Grammar, Matcher


@dataclasses.dataclass(frozen=True)
class OutputSettings:
    """Conversion of a request's outputs to text, and the grammar that constrains them.

    Args:
        tokenizer: Decodes tokens; None leaves all texts empty.
        stop: The stop strings; None without stop strings.
        grammar: The grammar that outputs follow; None without one.
    """

    tokenizer: TextCodec | None
    stop: StopStrings | None = None
    grammar: "Grammar | None" = None

    @property
    def is_constrained(self) -> bool:
        """True if the outputs follow a grammar."""
        return self.grammar is not None


class SampleState:
    """Text and log-probabilities of one output. The cost of a token does not grow with the output's length.

    Args:
        seq: The sequence, with its tokens and stop reason; read-only.
        group: The request; read-only.
        settings: Conversion of the output to text.
    """

    def __init__(self, seq: Sequence, group: SequenceGroup, settings: OutputSettings) -> None:
        params, tokenizer = group.sampling_params, settings.tokenizer
        self.seq = seq
        self.is_finished = False
        self._group = group
        self._logprobs: list[TokenLogprobDict] | None = None if params.logprobs is None else []
        self._num_logprobs = params.logprobs or 0
        self._settings = settings
        self._is_constrained = settings.is_constrained
        self._detokenizer = tokenizer and Detokenizer(
            tokenizer,
            seq.prompt_token_ids,
            stop=settings.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        self._shows_stop_token = params.include_stop_str_in_output
        self._num_tokens_sent = 0
        self._num_chars_sent = 0

    def with_replayed_text(self, seq: Sequence, group: SequenceGroup) -> "SampleState":
        """Returns a new state for a sequence whose output is a prefix of this output, or the same output.

        The text of the sequence is decoded again.
        """
        state = SampleState(seq, group, self._settings)
        if self._logprobs is not None:
            state._logprobs = self._logprobs[: len(seq.output_token_ids)]
        if state._detokenizer is not None:
            for token_id in seq.output_token_ids:
                state._detokenizer.append(token_id)
        return state

    def continue_from(self, prior: PriorOutput) -> None:
        """Adds a prior output that another engine has begun.

        If the output has ended, its text is not decoded, because the caller already has it.
        """
        if self._logprobs is not None:
            self._logprobs += prior.logprobs or ()
        self.is_finished = prior.finish_reason is not None
        if self._detokenizer is not None and not self.is_finished:
            for token_id in prior.token_ids:
                self._detokenizer.append(token_id)

    def rolled_back(self) -> "SampleState":
        """Returns the state of the sequence after it has lost its last tokens.

        The next delta does not repeat text and tokens of earlier deltas.
        """
        state = self.with_replayed_text(self.seq, self._group)
        detokenizer = state._detokenizer
        state._num_tokens_sent = min(self._num_tokens_sent, len(self.seq.output_token_ids))
        state._num_chars_sent = min(self._num_chars_sent, detokenizer.num_visible if detokenizer else 0)
        return state

    @functools.cached_property
    def matcher(self) -> "Matcher | None":
        """The grammar matcher of the output; None without a grammar.

        It is created in the state before the first output token. Its method `follow` advances it.
        """
        if self._settings.grammar is None:
            return None
        ignores_eos = self._group.sampling_params.ignore_eos
        return self._settings.grammar.matcher(self.seq.prompt_token_ids, ignores_eos=ignores_eos)

    def add_tokens(
        self, token_ids: list[int], logprobs: "list[TokenLogprobs]"
    ) -> tuple[str | None, int] | None:
        """Adds new tokens of the sequence one by one, up to a stop string or the end of the grammar.

        Args:
            token_ids: The last tokens of the sequence. A stop token that ended the sequence adds no text,
                unless include_stop_str_in_output is set.
            logprobs: One entry per token.

        Returns:
            None if the output continues. Otherwise the stop string that the text contains (None if the
            grammar is complete) and the number of output tokens up to that point. The tokens after it are not
            added.
        """
        if self._detokenizer is None and self._logprobs is None and not self._is_constrained:
            return None
        complete = self._completed_at() if self._is_constrained else None
        hides_last = self.seq.status is SequenceStatus.FINISHED_STOPPED and not self._shows_stop_token
        num_before = len(self.seq.output_token_ids) - len(token_ids)
        for i, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1):
            if self._logprobs is not None:
                is_first = self._detokenizer is not None and self._detokenizer.is_at_start
                entry = logprob_dict(
                    token_id, logprob, self._num_logprobs, self._settings.tokenizer, starts_text=is_first
                )
                self._logprobs.append(entry)
            if hides_last and i == len(token_ids):
                continue
            stop = self._detokenizer.append(token_id) if self._detokenizer else None
            if stop is not None or num_before + i == complete:
                return stop, num_before + i
        return None

    def _completed_at(self) -> int | None:
        """Returns the number of output tokens that completed the grammar; None if it is not complete."""
        assert self.matcher is not None, "the output follows a grammar but has no matcher"
        return self.matcher.follow(self.seq.output_token_ids)

    def finish(self) -> str | None:
        """Decodes the text that was held back. Returns the stop string that it contains, or None."""
        self.is_finished = True
        return self._detokenizer.finish() if self._detokenizer else None

    def values(self) -> dict[str, Any]:
        """Returns the state as JSON-compatible values."""
        return {
            "is_finished": self.is_finished,
            "logprobs": self._logprobs and [logprob_values(entry) for entry in self._logprobs],
            "num_taken": [self._num_tokens_sent, self._num_chars_sent],
            "detokenizer": self._detokenizer and self._detokenizer.values(),
        }

    def restore(self, values: dict[str, Any]) -> None:
        """Restores the state from the result of `values`, for the same request."""
        self.is_finished = values["is_finished"]
        if self._logprobs is not None:
            self._logprobs = [logprob_from_values(entry) for entry in values["logprobs"] or ()]
        self._num_tokens_sent, self._num_chars_sent = values["num_taken"]
        if self._detokenizer is not None:
            self._detokenizer.restore(values["detokenizer"])

    @property
    def _stop_reason(self) -> int | str | None:
        reason = self.seq.stop_reason
        if reason == NO_TOKEN_ALLOWED and self.matcher is not None and self.matcher.problem:
            return f"{reason}: {self.matcher.problem}"
        return reason

    def output(self, index: int, *, is_final: bool) -> CompletionOutput:
        """Returns the whole output so far.

        Args:
            index: Index of the output in the request.
            is_final: Whether the request has finished. If so, the output has its own lists; if not, it has
                snapshots of lists that still grow.
        """
        detokenizer, logprobs = self._detokenizer, self._logprobs
        list_type = list if is_final else Snapshot
        return CompletionOutput(
            index=index,
            text=detokenizer.text[: detokenizer.num_visible] if detokenizer else "",
            token_ids=list_type(self.seq.output_token_ids),
            cumulative_logprob=self.seq.cumulative_logprob,
            logprobs=None if logprobs is None else list_type(logprobs),
            finish_reason=self.seq.status.finish_reason,
            stop_reason=self._stop_reason,
        )

    def take_delta(self, index: int) -> CompletionOutput:
        """Returns the part of the output that is new since the last call.

        Args:
            index: Index of the output in the request.
        """
        first_token, first_char = self._num_tokens_sent, self._num_chars_sent
        detokenizer, logprobs = self._detokenizer, self._logprobs
        delta = CompletionOutput(
            index=index,
            text=detokenizer.text[first_char : detokenizer.num_visible] if detokenizer else "",
            token_ids=self.seq.output_token_ids[first_token:],
            cumulative_logprob=self.seq.cumulative_logprob,
            logprobs=None if logprobs is None else logprobs[first_token:],
            finish_reason=self.seq.status.finish_reason,
            stop_reason=self._stop_reason,
        )
        self._num_tokens_sent += len(delta.token_ids)
        self._num_chars_sent += len(delta.text)
        return delta


def logprob_dict(
    token_id: int,
    entry: "TokenLogprobs",
    k: int,
    tokenizer: TextCodec | None,
    *,
    starts_text: bool = False,
) -> TokenLogprobDict:
    """Returns the log-probabilities of a token and of the k most likely tokens, by token id.

    Args:
        token_id: The token that was drawn, or the token of the prompt.
        entry: Log-probabilities at its position.
        k: Number of most likely tokens.
        tokenizer: Decodes the tokens; None leaves `decoded_token` None.
        starts_text: Whether the token is the first one with text. Some tokenizers drop its leading space.
    """

    def text(token_id: int) -> str | None:
        if tokenizer is None:
            return None
        if starts_text:
            return tokenizer.decode([token_id], skip_special_tokens=False)
        return tokenizer.token_text(token_id)

    result = {token_id: Logprob(entry.logprob, entry.rank, text(token_id))}
    top = zip(entry.top_token_ids[:k], entry.top_logprobs[:k], strict=True)
    for rank, (top_id, top_logprob) in enumerate(top, 1):
        result.setdefault(top_id, Logprob(top_logprob, rank, text(top_id)))
    return result


def logprob_values(entry: TokenLogprobDict) -> list[list[Any]]:
    """Returns the log-probabilities of one position as JSON-compatible values."""
    return [[token_id, x.logprob, x.rank, x.decoded_token] for token_id, x in entry.items()]


def logprob_from_values(values: list[list[Any]]) -> TokenLogprobDict:
    """Returns the log-probabilities from the result of `logprob_values`."""
    return {token_id: Logprob(*rest) for token_id, *rest in values}
