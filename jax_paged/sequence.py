"""A request as the scheduler sees it: a SequenceGroup of Sequences, plain Python and no arrays."""

import dataclasses
import enum

from jax_paged.sampling_params import SamplingParams


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
        return self not in (SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED)

    @property
    def finish_reason(self) -> str | None:
        """The OpenAI word for a finished status: "stop", "length", "abort"; None while unfinished."""
        return {
            SequenceStatus.FINISHED_STOPPED: "stop",
            SequenceStatus.FINISHED_LENGTH_CAPPED: "length",
            SequenceStatus.FINISHED_ABORTED: "abort",
            SequenceStatus.FINISHED_IGNORED: "length",
        }.get(self)


@dataclasses.dataclass(eq=False)
class Sequence:
    """The tokens of one sequence, and how far they are computed.

    Owned by the scheduler: only it (and the block manager, for the block table that it keeps by seq_id)
    changes these fields.

    Args:
        seq_id: Unique in its engine.
        prompt_token_ids: Never changes.
        output_token_ids: Grows by the sampled tokens.
        num_computed_tokens: Tokens whose keys and values lie in the pool.
        stop_reason: The stop token id or stop string that ended it; None for the end token or no stop.
        block_hashes: Hashes of its first full blocks, as far as the block manager needed them.
    """

    seq_id: int
    prompt_token_ids: list[int]
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    stop_reason: int | str | None = None
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)

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


@dataclasses.dataclass(eq=False)
class SequenceGroup:
    """One request: its sequences (one each, until sequences can fork), parameters and times."""

    request_id: str
    sequences: list[Sequence]
    sampling_params: SamplingParams
    metrics: RequestMetrics
    cache_salt: str = ""

    @property
    def is_finished(self) -> bool:
        return all(s.status.is_finished for s in self.sequences)
