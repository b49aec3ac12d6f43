"""Requests: what was passed and checked (Request), and its state in the scheduler (SequenceGroup, Sequence).

Plain Python and no arrays.
"""

import dataclasses
import enum
import itertools
from typing import Any, NamedTuple, Self

from jax_paged.sampling_params import BeamSearchParams, SamplingParams


class StandIn(NamedTuple):
    """Data in place of some tokens of a prompt, such as a part of an image.

    Args:
        start: Position of the first of these tokens.
        stop: Position after the last of them.
        digest: Hash of the data. Equal digests mean equal data.
        data: The data, which only the executor reads.
    """

    start: int
    stop: int
    digest: str
    data: Any


class PromptEmbeds(NamedTuple):
    """Vectors in place of the first tokens of a prompt.

    Args:
        num_tokens: Number of vectors; prompt_token_ids has as many placeholders.
        data: float32, little-endian, [num_tokens, hidden_size].
    """

    num_tokens: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class RequestFeatures:
    """What a plain request does not use.

    Args:
        beam_params: Parameters of a beam search; None for sampling.
        encoder_token_ids: Tokens for the encoder of an encoder-decoder model; empty without an encoder.
        adapter: Hash of what the LoRA adapter does; "" without an adapter.
        prompt_embeds: Vectors in place of the first tokens of the prompt; None without vectors.
        stand_ins: Data in place of other tokens of the prompt, in order of position.
    """

    beam_params: BeamSearchParams | None = None
    encoder_token_ids: list[int] = dataclasses.field(default_factory=list)
    adapter: str = ""
    prompt_embeds: PromptEmbeds | None = None
    stand_ins: tuple[StandIn, ...] = ()

    @property
    def logprob_temperature(self) -> float:
        """Divides the logits before log-probabilities are taken; 1 except for beam searches."""
        return (self.beam_params.temperature if self.beam_params else 0) or 1.0

    def num_seqs(self, num_samples: int) -> int:
        """Returns the maximum number of sequences: beams, or samples."""
        return num_samples if self.beam_params is None else self.beam_params.beam_width


@dataclasses.dataclass(frozen=True)
class Request:
    """A request: its prompt, its parameters, and the features that it uses.

    Args:
        request_id: Unique among unfinished requests; "" until the engine has accepted the request.
        prompt_token_ids: The prompt; for an encoder-decoder model, the prompt of the decoder. Read-only.
        sampling_params: Sampling parameters of all sequences. Read-only.
        cache_salt: Only requests of equal salt share blocks.
        priority: Lower values are served earlier under the "priority" policy.
        features: What a plain request does not use; None if the request uses none of it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    features: RequestFeatures | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the request uses nothing but sampling."""
        return self.features is None and not self.sampling_params.uses_features

    @property
    def beam_params(self) -> BeamSearchParams | None:
        """Parameters of a beam search; None for sampling."""
        return self.features and self.features.beam_params

    @property
    def encoder_token_ids(self) -> list[int]:
        """Tokens for the encoder; empty without an encoder."""
        return [] if self.features is None else self.features.encoder_token_ids

    @property
    def adapter(self) -> str:
        """Hash of what the LoRA adapter does; "" without an adapter."""
        return "" if self.features is None else self.features.adapter

    @property
    def prompt_embeds(self) -> PromptEmbeds | None:
        """Vectors in place of the first tokens of the prompt; None without vectors."""
        return self.features and self.features.prompt_embeds

    @property
    def stand_ins(self) -> tuple[StandIn, ...]:
        """Data in place of other tokens of the prompt, in order of position."""
        return () if self.features is None else self.features.stand_ins

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences that run at a time."""
        num_samples = self.sampling_params.best_of or self.sampling_params.n
        return num_samples if self.features is None else self.features.num_seqs(num_samples)


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()

    @property
    def is_finished(self) -> bool:
        return self not in (SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.SWAPPED)

    @property
    def finish_reason(self) -> str | None:
        """The word for a finished status: "stop", "length", "abort", "error"; None while unfinished."""
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
    """The tokens of one sequence, and how far they are computed.

    Owned by the scheduler: only it (and the block manager, for the block table that it keeps of it)
    changes these fields.

    Args:
        prompt_token_ids: Never changes; shared with the other sequences of its group.
        index: Which of its group's samples it is.
        seed: Of its random choices; with a position it is the key of one draw.
        output_token_ids: Grows by the sampled tokens.
        num_computed_tokens: Tokens whose keys and values lie in the pool.
        num_in_flight: Tokens after these that the steps in flight compute.
        num_pending: Tokens that the steps in flight draw for it: they are not known yet.
        stop_reason: The stop token id or stop string that ended it; None for the end token or no stop.
        block_hashes: Hashes of its first full blocks, as far as the block manager needed them.
        cumulative_logprobs: For each output token, the sum of the log-probabilities up to it.
        seq_id: Its id in SchedulerOutput: another one for each batch slot that it takes, so it changes when
            the sequence comes back after a preemption. 0 before it has run.
        num_dropped_tokens: Tokens whose blocks a user has dropped: the slot of a later token in the block
            table is its position less these.
        block_places: If blocks were dropped, where in the whole text each block stood that was kept then, in
            order; the blocks after them follow without a gap.
        stand_ins: Those of its request.
    """

    prompt_token_ids: list[int]
    index: int = 0
    seed: int = 0
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_pending: int = 0
    stop_reason: int | str | None = None
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    cumulative_logprobs: list[float] = dataclasses.field(default_factory=list)
    seq_id: int = 0
    num_dropped_tokens: int = 0
    block_places: tuple[int, ...] = ()
    stand_ins: tuple[StandIn, ...] = ()

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the log-probabilities of its output tokens."""
        return self.cumulative_logprobs[-1] if self.cumulative_logprobs else 0.0

    @property
    def next_position(self) -> int:
        """The first token that no step has computed, nor does one in flight."""
        return self.num_computed_tokens + self.num_in_flight

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are still to be computed; those that are not known yet count."""
        num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_pending
        return num_tokens - self.num_computed_tokens - self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were drawn for it, or are being drawn."""
        return len(self.output_token_ids) + self.num_pending

    @property
    def has_output(self) -> bool:
        """Whether a token was drawn for it, or is being drawn."""
        return bool(self.output_token_ids) or self.num_pending > 0

    def append(self, token_id: int, logprob: float) -> None:
        """Appends a token to the output."""
        sums = self.cumulative_logprobs
        self.output_token_ids.append(token_id)
        sums.append(sums[-1] + logprob if sums else logprob)

    def truncate(self, num_output_tokens: int) -> None:
        """Drops the output tokens from a certain one on."""
        del self.output_token_ids[num_output_tokens:]
        del self.cumulative_logprobs[num_output_tokens:]

    def block_place(self, i: int) -> int:
        """Returns where in the whole text the i-th block of its table stands, in blocks."""
        kept = self.block_places
        return kept[i] if i < len(kept) else i + (kept[-1] + 1 - len(kept) if kept else 0)

    def fork(self, index: int, seed: int) -> "Sequence":
        """Returns a sequence with the same tokens, computed as far once the steps in flight have returned."""
        return dataclasses.replace(
            self,
            index=index,
            seed=seed,
            num_computed_tokens=self.next_position,
            num_in_flight=0,
            output_token_ids=list(self.output_token_ids),
            block_hashes=list(self.block_hashes),
            cumulative_logprobs=list(self.cumulative_logprobs),
            seq_id=0,
        )

    def num_common_tokens(self, other: "Sequence") -> int:
        """Returns the length of the longest prefix that two sequences of one group share."""
        pairs = zip(self.output_token_ids, other.output_token_ids, strict=False)
        return len(self.prompt_token_ids) + sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Returns the tokens at positions [start, stop), prompt and output as one."""
        p = len(self.prompt_token_ids)
        if start >= p:
            return self.output_token_ids[start - p : stop - p]
        return self.prompt_token_ids[start:stop] + self.output_token_ids[: max(0, stop - p)]


@dataclasses.dataclass
class RequestMetrics:
    """Times of one request, in the engine's clock (seconds); None until it happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def snapshot(self) -> "RequestMetrics":
        """Returns a copy: what happens later does not change it."""
        return RequestMetrics(**vars(self))


@dataclasses.dataclass(eq=False)
class SequenceGroup:
    """A request and its state: sequences and times. Scheduled and preempted as a whole.

    Args:
        request: The prompt, the parameters, and the features that the request uses. Only `cache_salt` is
            ever replaced.
        sequences: One at first; samples are forked from it when its prompt is computed, beams at every step.
        metrics: When things happened.
        key: What the scheduler orders groups by; set by it.
        arrival: Its place in the order of arrival, which settles ties; set by the scheduler.
        completed: Of a beam search, the best hypotheses that ended; they hold no blocks.
        needs_tokens_on_host: True if its next token cannot be chosen before the host knows the previous one.
            The scheduler derives this and the next two when it adds the request.
        allows_multi_step: True if its sequences may take part in a multi-step.
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
    def of(cls, request: Request, arrival_time: float) -> Self:
        """Returns a new request, with one sequence."""
        seq = Sequence(request.prompt_token_ids, seed=request.sampling_params.seed or 0)
        if request.features is not None:
            seq.stand_ins = request.features.stand_ins
        return cls(request, [seq], RequestMetrics(arrival_time))

    @property
    def cache_salt(self) -> str:
        """Only groups of equal salt share blocks."""
        return self.request.cache_salt

    @property
    def priority(self) -> int:
        """Lower values are served earlier under the "priority" policy."""
        return self.request.priority

    @property
    def beam_params(self) -> BeamSearchParams | None:
        """Parameters of a beam search; None for sampling."""
        return self.request.beam_params

    @property
    def encoder_token_ids(self) -> list[int]:
        """Tokens for the encoder; empty without an encoder."""
        return self.request.encoder_token_ids

    @property
    def adapter(self) -> str:
        """Hash of what the LoRA adapter does; "" without an adapter."""
        return self.request.adapter

    @property
    def num_reserved_slots(self) -> int:
        """Sequences that it may still come to have at a time."""
        if self.max_num_seqs == 1 or self.beam_params or len(self.sequences) < self.max_num_seqs:
            return self.max_num_seqs
        return len(self.unfinished)

    @property
    def order(self) -> tuple[Any, int]:
        """Groups of a lower order go first."""
        return self.key, self.arrival

    @property
    def unfinished(self) -> list[Sequence]:
        """Its sequences that have not ended."""
        return [s for s in self.sequences if not s.status.is_finished]

    @property
    def is_finished(self) -> bool:
        return all(s.status.is_finished for s in self.sequences)
