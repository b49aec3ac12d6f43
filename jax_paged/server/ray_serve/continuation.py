"""An answer that replicas make one after the other: what its client has, and what each part adds."""

import copy
import dataclasses
import hashlib
import secrets
import time
import uuid
from typing import Self

from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.replicas.prior_outputs import PriorOutput, joined
from jax_paged.outputs import RequestOutput


@dataclasses.dataclass(frozen=True)
class ResponseStart:
    """The begin of an answer.

    Args:
        status: Of HTTP.
        headers: Names in lower case, and values.
        version: Equal for replicas of the same program, model and settings.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    version: str

    @property
    def is_stream(self) -> bool:
        """Whether server-sent events follow."""
        return dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream")


@dataclasses.dataclass(frozen=True)
class ResponsePart:
    """Bytes of an answer; of a stream, whole events.

    Args:
        body: The bytes.
        outputs: What they tell the client: the index of a choice, and what it adds to that.
        is_last: Whether nothing follows.
    """

    body: bytes
    outputs: tuple[tuple[int, PriorOutput], ...] = ()
    is_last: bool = False


@dataclasses.dataclass
class Progress:
    """What the client of an answer has of it: all that another replica needs to go on.

    Args:
        answer_id: Hexadecimal digits; the ids in the answer are made of them.
        created: When the answer was asked for, in seconds of Unix time.
        seed: The prompts of a request without a seed get theirs from it.
        num_events: Server-sent events that the client has.
        outputs: What they said of each choice, part by part.
        is_whole: Whether it has the last one.
        asked: Names of the replicas that were asked so far; whoever chooses them notes it.
    """

    answer_id: str
    created: int
    seed: int
    num_events: int = 0
    outputs: dict[int, list[PriorOutput]] = dataclasses.field(default_factory=dict)
    is_whole: bool = False
    asked: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def begin(cls) -> Self:
        """Returns that of an answer of which its client has nothing."""
        return cls(uuid.uuid4().hex, int(time.time()), secrets.randbits(63))

    def add(self, part: ResponsePart) -> None:
        """Notes that the client gets a part of a stream."""
        self.num_events += part.body.count(b"\n\n")
        for index, output in part.outputs:
            self.outputs.setdefault(index, []).append(output)
        self.is_whole |= part.is_last


class Journal:
    """Of an answer at the replica that makes it now: what the client has, and what the next event tells it.

    Args:
        progress: What the client had when the replica was asked; read only.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._new: list[tuple[int, PriorOutput]] = []
        self._is_last = False

    @property
    def has_begun(self) -> bool:
        """Whether the client had an event when the replica was asked."""
        return bool(self.progress.outputs)

    def note(self, first: int, part: RequestOutput) -> None:
        """Notes that the next event holds a part of a request's output.

        Args:
            first: The index of the request's first choice.
            part: What is new.
        """
        for output in part.outputs:
            if output.token_ids or output.finish_reason:
                logprobs = None if output.logprobs is None else tuple(output.logprobs)
                ending = output.finish_reason, output.stop_reason
                new = PriorOutput(tuple(output.token_ids), logprobs, *ending)
                self._new.append((first + output.index, new))

    def end(self) -> None:
        """Notes that the next event is the last."""
        self._is_last = True

    def take(self, body: bytes) -> ResponsePart:
        """Returns some bytes with all that was noted for them."""
        outputs, self._new = tuple(self._new), []
        return ResponsePart(body, outputs, self._is_last)

    def begun(self, i: int, num_outputs: int, request: CheckedRequest) -> CheckedRequest:
        """Returns a request as it goes on here: with its seed, and what the client has of its outputs.

        Args:
            i: Which of the answer's requests it is.
            num_outputs: Choices of each request.
            request: What was checked; not changed.
        """
        outputs = self.progress.outputs
        indices = range(i * num_outputs, (i + 1) * num_outputs)
        given = tuple(joined(outputs.get(index, ())) for index in indices)
        params = copy.copy(request.params)  # dataclasses.replace would check all values again
        if params.seed is None:
            digest = hashlib.sha256(f"{self.progress.seed} prompt {i}".encode()).digest()
            params.seed = int.from_bytes(digest[:8]) >> 1
        if not any(output.token_ids for output in given):
            return request.with_params(params)
        params.prompt_logprobs = None  # they stood in the first event
        return dataclasses.replace(request.with_params(params), prior_outputs=given)


@dataclasses.dataclass(frozen=True)
class ReplicaCall:
    """One HTTP request, on its way to a replica.

    Args:
        method: Of HTTP, as are the following.
        path: Without the query.
        query: What stands behind the question mark.
        headers: Names in lower case, and values.
        body: The whole of it.
        progress: What the client has of the answer.
        prefix_key: Equal for requests that begin alike; None if nothing is to be read ahead of them.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    progress: Progress
    prefix_key: str | None = None


class ReplicaLostError(Exception):
    """A replica has gone, or its engine has stopped: another one goes on."""
