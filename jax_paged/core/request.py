"""A request (Request) and its state in the scheduler (SequenceGroup, Sequence).

These are plain Python objects. Only PlaceholderData.data may hold arrays, which the scheduler does not read.
"""

import dataclasses
import enum
import itertools
from typing import Any, NamedTuple, Self

from jax_paged.sampling_params import BeamSearchParams, SamplingParams


class PlaceholderData(NamedTuple):
    """Data for a range of placeholder tokens in a prompt, such as one tile of an image.

    Args:
        start: Position of the first placeholder token.
        stop: Position after the last placeholder token.
        digest: Hash of the data. Equal digests mean equal data.
        data: The data. Only the executor reads it.
    """

    start: int
    stop: int
    digest: str
    data: Any


class PromptEmbeds(NamedTuple):
    """Embeddings that replace the first tokens of a prompt.

    Args:
        num_tokens: Number of embeddings. prompt_token_ids begins with the same number of placeholder tokens.
        data: float32 [num_tokens, hidden_size] as little-endian bytes.
    """

    num_tokens: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class RequestFeatures:
    """Optional inputs of a request: beam search, encoder, LoRA adapter, embeddings and multimodal data.

    Args:
        beam_params: Parameters of a beam search; None for sampling.
        encoder_token_ids: Input tokens of the encoder of an encoder-decoder model; empty for other models.
        adapter: Content hash of the LoRA adapter; "" without an adapter.
        prompt_embeds: Embeddings that replace the first tokens of the prompt; None without embeddings.
        placeholder_data: Data for other placeholder tokens of the prompt, in order of position.
    """

    beam_params: BeamSearchParams | None = None
    encoder_token_ids: list[int] = dataclasses.field(default_factory=list)
    adapter: str = ""
    prompt_embeds: PromptEmbeds | None = None
    placeholder_data: tuple[PlaceholderData, ...] = ()

    @property
    def logprob_temperature(self) -> float:
        """The number by which logits are divided to compute log-probabilities; 1 if there is no beam search.

        For a beam search it is the temperature, or 1 if the temperature is 0.
        """
        return (self.beam_params.temperature if self.beam_params else 0) or 1.0

    def num_seqs(self, num_samples: int) -> int:
        """Returns the maximum number of sequences: the beam width, or `num_samples` without a beam search."""
        return num_samples if self.beam_params is None else self.beam_params.beam_width


@dataclasses.dataclass(frozen=True)
class Request:
    """The prompt of a request, its sampling parameters and its optional inputs.

    Args:
        request_id: Unique among unfinished requests; "" until the engine has accepted the request.
        prompt_token_ids: The prompt. For an encoder-decoder model, the prompt of the decoder. Read-only.
        sampling_params: Sampling parameters of all sequences. Read-only.
        cache_salt: Requests share cached blocks only if their salts are equal.
        priority: Requests with lower values are served earlier under the "priority" policy.
        features: Optional inputs; None if the request has none.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    features: RequestFeatures | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the request uses no optional features, only sampling."""
        return self.features is None and not self.sampling_params.uses_features

    @property
    def beam_params(self) -> BeamSearchParams | None:
        """Parameters of a beam search; None for sampling."""
        return self.features and self.features.beam_params

    @property
    def encoder_token_ids(self) -> list[int]:
        """Input tokens of the encoder; empty without an encoder."""
        return [] if self.features is None else self.features.encoder_token_ids

    @property
    def adapter(self) -> str:
        """Content hash of the LoRA adapter; "" without an adapter."""
        return "" if self.features is None else self.features.adapter

    @property
    def prompt_embeds(self) -> PromptEmbeds | None:
        """Embeddings that replace the first tokens of the prompt; None without embeddings."""
        return self.features and self.features.prompt_embeds

    @property
    def placeholder_data(self) -> tuple[PlaceholderData, ...]:
        """Data for placeholder tokens that stand for images, not for prompt_embeds, in order of position."""
        return () if self.features is None else self.features.placeholder_data

    @property
    def max_num_seqs(self) -> int:
        """The maximum number of sequences that run at the same time."""
        num_samples = self.sampling_params.best_of or self.sampling_params.n
        return num_samples if self.features is None else self.features.num_seqs(num_samples)


class SequenceStatus(enum.Enum):
    """Status of a sequence: waiting, running, swapped out, or finished for one of four reasons.

    - FINISHED_STOPPED: it ended at an end token, a stop token, a stop string or the end of a grammar.
    - FINISHED_LENGTH_CAPPED: it reached a length limit, or it has output and the KV cache is too small for
      more.
    - FINISHED_ABORTED: the request was aborted, or ended because of an error.
    - FINISHED_IGNORED: it has no output and can never run, for example because even the empty KV cache is too
      small.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self not in (SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.SWAPPED)

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the API: "stop", "length", "abort" or "error"; None while unfinished."""
        if not self.is_finished:
            return None
        return {
            SequenceStatus.FINISHED_STOPPED: "stop",
            SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
            SequenceStatus.FINISHED_ABORTED: "abort",
            SequenceStatus.FINISHED_IGNORED: "error",
        }[self]


@dataclasses.dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """The tokens of one sequence, and how many of them have been computed.

    The scheduler owns its sequences. Only the scheduler and the block manager change these fields.

    Args:
        prompt_token_ids: The prompt. It never changes and is shared by all sequences of the request.
        index: Index of this sample among the samples of its request.
        seed: Random seed. Each draw is keyed by the seed and the position of the token.
        output_token_ids: Output tokens so far.
        status: Whether the sequence waits, runs, is swapped out or has ended.
        num_computed_tokens: Number of leading tokens that have been computed. Their keys and values are in
            the KV cache, unless their blocks were dropped.
        num_in_flight_tokens: Number of tokens after the computed ones that steps in flight compute.
        num_pending_tokens: Number of output tokens that steps in flight sample and whose values are not
            known yet.
        stop_reason: The stop token id or stop string that ended the sequence, or the reason why it could not
            continue. None if it has not ended, or if an end token of the model or a length limit ended it.
        block_hashes: Prefix cache hashes of the first full blocks. The block manager adds a hash when it
            needs it.
        cumulative_logprobs: For each output token, the sum of the log-probabilities up to this token.
        seq_id: Id of the sequence in SchedulerOutput. It changes with each batch slot that the sequence
            takes, for example after a preemption. 0 before the first batch slot.
        num_dropped_tokens: Number of tokens whose blocks the user has dropped. These blocks have no block
            table entry: the token at position p after them has the index p - num_dropped_tokens among the
            tokens of the block table.
        kept_block_indices: Empty unless blocks were dropped. Entry i is the index that block i of the block
            table would have if no blocks had ever been dropped. The entries ascend. Blocks after these have
            consecutive indices that follow the last entry.
        placeholder_data: Data for placeholder tokens, from the request.
    """

    prompt_token_ids: list[int]
    index: int = 0
    seed: int = 0
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_pending_tokens: int = 0
    stop_reason: int | str | None = None
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    cumulative_logprobs: list[float] = dataclasses.field(default_factory=list)
    seq_id: int = 0
    num_dropped_tokens: int = 0
    kept_block_indices: tuple[int, ...] = ()
    placeholder_data: tuple[PlaceholderData, ...] = ()

    @property
    def cumulative_logprob(self) -> float:
        """The sum of the log-probabilities of the output tokens."""
        return self.cumulative_logprobs[-1] if self.cumulative_logprobs else 0.0

    @property
    def next_position(self) -> int:
        """The first position that has not been computed and that no step in flight computes."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_new_tokens(self) -> int:
        """The number of tokens that are left to schedule, including pending tokens.

        Tokens that steps in flight compute are not counted.
        """
        num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending_tokens
        return num_tokens - self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def num_output_tokens(self) -> int:
        """The number of output tokens, including pending tokens."""
        return len(self.output_token_ids) + self.num_pending_tokens

    @property
    def has_output(self) -> bool:
        """Whether an output token has been sampled or is pending."""
        return bool(self.output_token_ids) or self.num_pending_tokens > 0

    def append(self, token_id: int, logprob: float) -> None:
        """Appends a token and its log-probability to the output."""
        sums = self.cumulative_logprobs
        self.output_token_ids.append(token_id)
        sums.append(sums[-1] + logprob if sums else logprob)

    def truncate(self, num_output_tokens: int) -> None:
        """Keeps only the first `num_output_tokens` output tokens."""
        del self.output_token_ids[num_output_tokens:]
        del self.cumulative_logprobs[num_output_tokens:]

    def original_block_index(self, i: int) -> int:
        """Returns the index that block `i` of the block table would have if no blocks had been dropped."""
        kept = self.kept_block_indices
        return kept[i] if i < len(kept) else i + (kept[-1] + 1 - len(kept) if kept else 0)

    def fork(self, index: int, seed: int) -> "Sequence":
        """Returns a sequence with the same tokens, and with its own index and seed.

        Tokens that steps in flight compute count as computed in the new sequence.
        """
        return dataclasses.replace(
            self,
            index=index,
            seed=seed,
            num_computed_tokens=self.next_position,
            num_in_flight_tokens=0,
            output_token_ids=list(self.output_token_ids),
            block_hashes=list(self.block_hashes),
            cumulative_logprobs=list(self.cumulative_logprobs),
            seq_id=0,
        )

    def num_common_tokens(self, other: "Sequence") -> int:
        """Returns the length of the common prefix with another sequence of the same request."""
        pairs = zip(self.output_token_ids, other.output_token_ids, strict=False)
        return len(self.prompt_token_ids) + sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns the tokens at positions [start, stop) of the prompt followed by the output."""
        p = len(self.prompt_token_ids)
        if start >= p:
            return self.output_token_ids[start - p : stop - p]
        return self.prompt_token_ids[start:stop] + self.output_token_ids[: max(0, stop - p)]


@dataclasses.dataclass
class RequestMetrics:
    """Timestamps and counters of one request.

    Args:
        arrival_time: Time of arrival. All times are in the engine's clock (seconds).
        first_scheduled_time: Time of the first step that computes tokens of the request; None before it.
        first_token_time: Time of the first output token; None before it.
        finished_time: Time at which the last sequence ended; None before it.
        num_cached_tokens: Number of prompt tokens that were found in the prefix cache at first admission. For
            a fork, the number of tokens whose blocks it shares with the forked request, including output.
        num_preemptions: How often the request was preempted.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def copy(self) -> "RequestMetrics":
        """Returns a copy, which later events do not change."""
        return RequestMetrics(**vars(self))


@dataclasses.dataclass(eq=False)
class SequenceGroup:
    """A request and its scheduling state. All of its sequences are preempted together.

    Args:
        request: The prompt, the sampling parameters and the optional inputs. Only its `cache_salt` is ever
            replaced.
        sequences: One sequence at first. Samples are forked from it when the end of its prompt is scheduled,
            beams after every token.
        metrics: Timestamps and counters.
        key: The scheduling key, set by the scheduler. Requests with lower keys are scheduled first.
        arrival: Sequence number of the arrival, set by the scheduler. It decides between requests with equal
            keys.
        completed: The best hypotheses of a beam search that have ended. They hold no blocks.
        needs_tokens_on_host: True if the next token cannot be chosen before the host knows the previous one.
            The scheduler derives this flag and the two that follow when it adds the request.
        allows_multi_step: True if its sequences may take part in multi-step decoding.
        allows_drafts: True if draft tokens may be verified for its sequences.
    """

    request: Request
    sequences: list[Sequence]
    metrics: RequestMetrics
    key: Any = 0
    arrival: int = 0
    completed: list[Sequence] = dataclasses.field(default_factory=list)
    needs_tokens_on_host: bool = False
    allows_multi_step: bool = False
    allows_drafts: bool = False

    def __post_init__(self) -> None:
        self.max_num_seqs = self.request.max_num_seqs
        self.request_id = self.request.request_id
        self.sampling_params = self.request.sampling_params

    @classmethod
    def from_request(cls, request: Request, arrival_time: float) -> Self:
        """Returns a new request with one sequence."""
        seq = Sequence(request.prompt_token_ids, seed=request.sampling_params.seed or 0)
        if request.features is not None:
            seq.placeholder_data = request.features.placeholder_data
        return cls(request, [seq], RequestMetrics(arrival_time))

    @property
    def cache_salt(self) -> str:
        """The cache salt. Requests share cached blocks only if their salts are equal."""
        return self.request.cache_salt

    @property
    def priority(self) -> int:
        """The priority. Requests with lower values are served earlier under the "priority" policy."""
        return self.request.priority

    @property
    def beam_params(self) -> BeamSearchParams | None:
        """Parameters of a beam search; None for sampling."""
        return self.request.beam_params

    @property
    def adapter(self) -> str:
        """Content hash of the LoRA adapter; "" without an adapter."""
        return self.request.adapter

    @property
    def num_reserved_slots(self) -> int:
        """The number of batch slots that the request reserves while it runs.

        This is the largest number of sequences that the request can still have at the same time.
        """
        if self.max_num_seqs == 1 or self.beam_params or len(self.sequences) < self.max_num_seqs:
            return self.max_num_seqs
        return len(self.unfinished)

    @property
    def order(self) -> tuple[Any, int]:
        """The scheduling key, then the arrival. Requests with a lower order are scheduled first."""
        return self.key, self.arrival

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [s for s in self.sequences if not s.status.is_finished]

    @property
    def is_finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(s.status.is_finished for s in self.sequences)
