"""Outputs of requests; the names are vLLM's."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from jax_paged.core.request import RequestMetrics

if TYPE_CHECKING:
    import numpy as np


class Snapshot[T](Sequence[T]):
    """A read-only view of the items that a growing list had when the view was created.

    Creating a snapshot copies nothing, so each output of a long streaming request costs the same time. A
    snapshot equals a list of the same items. Slicing, adding, multiplying, copying and pickling return lists.
    Code that requires a list, such as json.dumps, needs `list(snapshot)` (or json.dumps with default=list).

    Args:
        items: A list to which items may be appended later. It must not change in any other way.
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]
    __slots__ = ("_items", "_len")

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self._len = len(items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._len)
            if step > 0:
                return self._items[start:stop:step]
            return [self._items[i] for i in range(start, stop, step)]
        return self._items[range(self._len)[index]]

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[T]:
        return itertools.islice(self._items, self._len)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | Snapshot):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self]

    def __mul__(self, count: int) -> list[T]:
        return list(self) * count

    __rmul__ = __mul__

    def copy(self) -> list[T]:
        """Returns a list of the items."""
        return list(self)

    def __copy__(self) -> list[T]:
        return list(self)

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token.

    By default it is computed from the model's logits, before penalties, bias and temperature.
    EngineArgs.logprobs_mode selects other log-probabilities.

    Args:
        logprob: Natural logarithm of the token's probability.
        rank: Rank of the token in the vocabulary; 1 is the most probable token. Never None in this engine;
            the type is vLLM's.
        decoded_token: Text of the token; None without a tokenizer.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


# Log-probabilities at one position, by token id: the sampled token (or the prompt's token) first, then the
# most probable tokens.
TokenLogprobDict = dict[int, Logprob]


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One of the outputs of a request.

    Args:
        index: Index of the output in the request.
        text: Generated text. It does not include the stop string or stop token that ended it, unless
            include_stop_str_in_output is set. "" without a tokenizer.
        token_ids: Generated tokens, including the token that ended the output. A list if the request has
            finished, else a Snapshot; `list(token_ids)` converts it, for example for json.dumps.
        cumulative_logprob: Sum of the log-probabilities of `token_ids`. If another engine has begun the
            output and this engine continues it, the sum covers only the tokens of this engine.
        logprobs: One dict per token, in a list or Snapshot like token_ids; None if not requested.
        finish_reason: "stop", "length", "abort", or "error" if the request could not run; None while the
            request is running.
        stop_reason: The stop string or stop token id that ended the output, or the reason of an abort or
            error.
        captured: Values captured by hooks, by hook name; filled when the request has finished. Each value is
            an array with one row per computed token, which are all tokens of prompt and output except the
            last one. For a pooling request, "pooled" is the pooled array or "hidden" the hidden states of all
            tokens.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float
    logprobs: Sequence[TokenLogprobDict] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    captured: dict[str, Any] = dataclasses.field(default_factory=dict)

    def finished(self) -> bool:
        """Returns True if the output has finished."""
        return self.finish_reason is not None

    def extend(self, new: "CompletionOutput") -> None:
        """Appends a later part of the output in place; token_ids and logprobs must be lists.

        Args:
            new: The later part, with new tokens and text only.
        """
        assert isinstance(self.token_ids, list), type(self.token_ids)
        self.text += new.text
        self.token_ids.extend(new.token_ids)
        self.cumulative_logprob = new.cumulative_logprob
        if new.logprobs is not None:
            assert isinstance(self.logprobs, list), type(self.logprobs)
            self.logprobs.extend(new.logprobs)
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        self.captured = new.captured

    def snapshot(self, *, is_last: bool) -> "CompletionOutput":
        """Returns the current state of the output, which later calls of `extend` do not change.

        Args:
            is_last: Whether nothing will be appended later. The result then has lists instead of Snapshots.
        """
        token_ids, logprobs = self.token_ids, self.logprobs
        assert isinstance(token_ids, list), type(token_ids)
        assert isinstance(logprobs, list | None), type(logprobs)
        so_far = list if is_last else Snapshot
        return dataclasses.replace(
            self,
            token_ids=so_far(token_ids),
            logprobs=None if logprobs is None else so_far(logprobs),
        )

    def __repr__(self) -> str:
        end = self.finish_reason and f", finish_reason={self.finish_reason!r}"
        reason = f", stop_reason={self.stop_reason!r}" if self.stop_reason is not None else ""
        return f"CompletionOutput({self.text!r}, {len(self.token_ids)} tokens{end or ', running'}{reason})"


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A request and its outputs so far.

    Example:
        >>> (output,) = llm.generate("A block table is", SamplingParams(n=2))
        >>> for completion in output.outputs:
        ...     print(completion.text, completion.finish_reason)

    Args:
        request_id: Id of the request.
        prompt: Text of the prompt; None if the prompt was passed as token ids only. For an encoder-decoder
            model, this and prompt_token_ids are the decoder's prompt.
        prompt_token_ids: Tokens of the prompt, in a list that all outputs of the request share.
        prompt_logprobs: One dict per prompt token, None for the first token, in a list or Snapshot like
            token_ids; None if not requested.
        outputs: The outputs. With best_of > n and in a beam search the list is empty until the request
            finishes, because the best outputs are not known earlier.
        finished: Whether all outputs have finished.
        metrics: Times of arrival, first token and end, in seconds of time.monotonic(); None for events that
            have not happened. The object does not change later.
        num_cached_tokens: Number of prompt tokens found in the prefix cache. For a request created by
            LLMEngine.fork, number of tokens whose blocks it shares with the forked request.
        encoder_prompt: Text of the encoder's prompt; None if it was passed as token ids, or without an
            encoder.
        encoder_prompt_token_ids: Tokens of the encoder's prompt; None without an encoder.
        weight_versions: Versions of the weights that generated the tokens, in order, as named by
            update_weights. There are several if the weights were updated while the request was running.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Sequence[TokenLogprobDict | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    weight_versions: tuple[str, ...] = ()

    @property
    def weight_version(self) -> str | None:
        """The version of the weights that generated the newest tokens; None before the first token."""
        return self.weight_versions[-1] if self.weight_versions else None

    def __repr__(self) -> str:
        prompt = f"{len(self.prompt_token_ids)} prompt tokens" if self.prompt is None else repr(self.prompt)
        return f"RequestOutput({self.request_id!r}, {prompt}, outputs={self.outputs})"

    def extend(self, delta: "RequestOutput") -> None:
        """Appends a later part of the same request in place.

        Args:
            delta: The later part, with new tokens and text only.
        """
        if self.outputs:
            for output, new in zip(self.outputs, delta.outputs, strict=True):
                output.extend(new)
        else:
            self.outputs = delta.outputs
        self.prompt_logprobs = delta.prompt_logprobs
        self.finished = delta.finished
        self.metrics = delta.metrics
        self.num_cached_tokens = delta.num_cached_tokens
        self.weight_versions = delta.weight_versions

    def snapshot(self) -> "RequestOutput":
        """Returns the current state of the request, which later calls of `extend` do not change."""
        outputs = [output.snapshot(is_last=self.finished) for output in self.outputs]
        return dataclasses.replace(self, outputs=outputs)


@dataclasses.dataclass(frozen=True, slots=True)
class PoolingOutput:
    """Array that LLM.encode returns for a text.

    Args:
        data: A float32 array: an embedding [size], class probabilities [classes], or embeddings of all tokens
            [tokens, size].
    """

    data: "np.ndarray"


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """Embedding of a text.

    Args:
        embedding: The components of the embedding.
    """

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of components of the embedding."""
        return len(self.embedding)


@dataclasses.dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Class probabilities of a text.

    Args:
        probs: One probability per class.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Similarity or relevance score of two texts.

    Args:
        score: The score; higher means a better match.
    """

    score: float


@dataclasses.dataclass(frozen=True, slots=True)
class PoolingRequestOutput[T]:
    """A finished pooling request.

    Args:
        request_id: Id of the request.
        outputs: The result, such as an EmbeddingOutput.
        prompt_token_ids: Tokens of the text.
        num_cached_tokens: Number of tokens found in the prefix cache.
        finished: Always True.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Result of LLM.embed for one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Result of LLM.classify for one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Result of LLM.score for one pair of texts."""


@dataclasses.dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One sequence found by a beam search.

    Args:
        tokens: Tokens of the prompt and of the output.
        cum_logprob: Sum of the log-probabilities of the output tokens.
        text: Text of `tokens`; None without a tokenizer.
        finish_reason: "stop" if the sequence ends with an end-of-sequence token, else "length".
        stop_reason: The reason if the sequence ended before max_tokens because the KV cache had no room; else
            None.
    """

    tokens: list[int]
    cum_logprob: float
    text: str | None
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Result of a beam search for one prompt.

    Args:
        sequences: The sequences found, from best to worst.
    """

    sequences: list[BeamSearchSequence]
