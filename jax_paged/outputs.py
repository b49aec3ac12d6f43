"""What a request returns; the names are vLLM's."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from jax_paged.core.request import RequestMetrics

if TYPE_CHECKING:
    import numpy as np


class Snapshot[T](Sequence[T]):
    """A read-only list of the items that a growing list has now; making one copies nothing.

    It equals a list of the same items. Its slices, sums, products, copies and pickles are lists. It is not a
    list itself: use list(...) before what takes nothing else, such as json.dumps (or pass default=list).

    Args:
        items: A list to which items may be appended later, but that changes in no other way.
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
        token_ids: Its tokens, including the one that ended it. A list once the request has finished, and a
            Snapshot while it runs (list(...) makes a list of it, as json.dumps needs).
        cumulative_logprob: Sum of the log-probabilities of `token_ids`.
        logprobs: One dict per token, in a list or Snapshot as token_ids; None if not asked for.
        finish_reason: "stop", "length", "abort", or "error" for a request that could not run; None while
            it runs.
        stop_reason: The stop string or stop token id that ended it, or why it was aborted or could not run.
        captured: Once the request has finished, what hooks captured, by name: arrays with a row for each
            token of the prompt and the output that was computed, which is all but the last. Of a pooling
            request "pooled", what its hidden states were pooled to, or "hidden", all of them.
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
        """Returns whether it has ended."""
        return self.finish_reason is not None

    def extend(self, new: "CompletionOutput") -> None:
        """Appends, in place, what has come since; its token_ids and logprobs must be lists.

        Args:
            new: Holds the new part only.
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
        """Returns it as it stands; what `extend` appends later does not change that.

        Args:
            is_last: Whether nothing will be appended: the result then has lists of its own.
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

    Args:
        request_id: The id it was added with.
        prompt: The prompt's text; None if it came as token ids alone. Of an encoder-decoder model, the
            decoder's prompt; the next one as well.
        prompt_token_ids: The prompt's tokens, in a list that all outputs of the request share.
        prompt_logprobs: One dict per prompt token, None for the first, in a list or Snapshot as token_ids;
            None if not asked for.
        outputs: Its outputs. With best_of > n, and of a beam search, there are none before the end, because
            only then the best are known.
        finished: Whether all outputs have ended.
        metrics: When it arrived, got its first token and ended, in seconds of time.monotonic(), as far as
            that has happened; it does not change later.
        num_cached_tokens: Prompt tokens that were found in the prefix cache.
        encoder_prompt: The text that an encoder has read; None if it came as token ids, or if there is no
            encoder.
        encoder_prompt_token_ids: The tokens that an encoder has read; None without an encoder.
        weight_versions: Of the weights that have drawn its tokens, in order, as update_weights names them:
            several where weights were exchanged meanwhile.
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
        """The version of the weights that have drawn its newest tokens; None before the first."""
        return self.weight_versions[-1] if self.weight_versions else None

    def __repr__(self) -> str:
        prompt = f"{len(self.prompt_token_ids)} prompt tokens" if self.prompt is None else repr(self.prompt)
        return f"RequestOutput({self.request_id!r}, {prompt}, outputs={self.outputs})"

    def extend(self, delta: "RequestOutput") -> None:
        """Appends, in place, a later part of the same request.

        Args:
            delta: Holds only what has come since.
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
        """Returns it as it stands; what `extend` appends later does not change that."""
        outputs = [output.snapshot(is_last=self.finished) for output in self.outputs]
        return dataclasses.replace(self, outputs=outputs)


@dataclasses.dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What LLM.encode returns of a text.

    Args:
        data: float32: an embedding, or the scores of classes; of all tokens, a row for each.
    """

    data: "np.ndarray"


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its numbers."""
        return len(self.embedding)


@dataclasses.dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The scores of a text, one per class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Classes."""
        return len(self.probs)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts fit."""

    score: float


@dataclasses.dataclass(frozen=True, slots=True)
class PoolingRequestOutput[T]:
    """A pooling request that has ended.

    Args:
        request_id: The id it was added with.
        outputs: What it returns.
        prompt_token_ids: The text's tokens.
        num_cached_tokens: Those of them that were found in the prefix cache.
        finished: True.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What LLM.embed returns."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """What LLM.classify returns."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """What LLM.score returns."""


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
