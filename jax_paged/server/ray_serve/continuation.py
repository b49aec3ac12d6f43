"""Messages between ingress and replicas, and the state with which another replica can continue a response.

Each part of a stream carries the output tokens that it contains. The ingress collects them in a `Progress`
and sends it along if it has to pass the request on to another replica. The new replica computes the tokens of
the Progress as prior output and continues from there. In each replica, a `Journal` collects the tokens for
the next part.
"""

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
    """Start of a response.

    Args:
        status: HTTP status.
        headers: Names in lower case, and values.
        version: Hash that is equal for replicas with the same program, model and settings.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    version: str

    @property
    def is_stream(self) -> bool:
        """Whether the response is a stream of server-sent events."""
        return dict(self.headers).get(b"content-type", b"").startswith(b"text/event-stream")


@dataclasses.dataclass(frozen=True)
class ResponsePart:
    """Part of a response body.

    Args:
        body: The bytes. In a stream, complete server-sent events.
        outputs: Pairs of the index of a choice and the output that the part adds to this choice.
        is_last: Whether this is the last part.
    """

    body: bytes
    outputs: tuple[tuple[int, PriorOutput], ...] = ()
    is_last: bool = False


@dataclasses.dataclass
class Progress:
    """Progress of a response: what the client has received, and what another replica needs to continue it.

    Args:
        answer_id: Hexadecimal digits, from which the ids in the response are made.
        created: Time of the request (Unix time in seconds).
        seed: Random number from which the seeds are derived for requests without a seed.
        num_events: Number of server-sent events that the client has received.
        outputs: Received deltas of each choice, by its index.
        is_whole: Whether the client has received the last part.
        tried_replicas: Names of the replicas that have been tried. The router adds them.
    """

    answer_id: str
    created: int
    seed: int
    num_events: int = 0
    outputs: dict[int, list[PriorOutput]] = dataclasses.field(default_factory=dict)
    is_whole: bool = False
    tried_replicas: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def begin(cls) -> Self:
        """Returns the progress of a new response."""
        return cls(uuid.uuid4().hex, int(time.time()), secrets.randbits(63))

    def add(self, part: ResponsePart) -> None:
        """Records that a part of a stream is sent to the client."""
        self.num_events += part.body.count(b"\n\n")
        for index, output in part.outputs:
            self.outputs.setdefault(index, []).append(output)
        self.is_whole |= part.is_last


class Journal:
    """Record of a response in the replica that generates it: earlier output and output of the next event.

    Args:
        progress: Progress of the response when this replica received the request. It is not changed.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._new: list[tuple[int, PriorOutput]] = []
        self._is_last = False

    @property
    def has_begun(self) -> bool:
        """Whether the client had received output when this replica received the request."""
        return bool(self.progress.outputs)

    def note(self, first: int, part: RequestOutput) -> None:
        """Records that the next event contains a part of a request's output.

        Args:
            first: Index of the request's first choice.
            part: The new part.
        """
        for output in part.outputs:
            if output.token_ids or output.finish_reason:
                logprobs = None if output.logprobs is None else tuple(output.logprobs)
                ending = output.finish_reason, output.stop_reason
                new = PriorOutput(tuple(output.token_ids), logprobs, *ending)
                self._new.append((first + output.index, new))

    def end(self) -> None:
        """Records that the next event is the last one."""
        self._is_last = True

    def take(self, body: bytes) -> ResponsePart:
        """Returns a response part with the given bytes and everything that has been recorded for them."""
        outputs, self._new = tuple(self._new), []
        return ResponsePart(body, outputs, self._is_last)

    def with_prior_output(self, i: int, num_outputs: int, request: CheckedRequest) -> CheckedRequest:
        """Returns a request with a seed and with the output that the client already has as prior output.

        Args:
            i: Index of the request in the response.
            num_outputs: Number of choices of each request.
            request: The checked request. It is not changed.
        """
        outputs = self.progress.outputs
        indices = range(i * num_outputs, (i + 1) * num_outputs)
        prior = tuple(joined(outputs.get(index, ())) for index in indices)
        params = copy.copy(request.params)  # dataclasses.replace would validate all values again
        if params.seed is None:
            digest = hashlib.sha256(f"{self.progress.seed} prompt {i}".encode()).digest()
            params.seed = int.from_bytes(digest[:8]) >> 1
        if not any(output.token_ids for output in prior):
            return request.with_params(params)
        params.prompt_logprobs = None  # They were in the first event.
        return dataclasses.replace(request.with_params(params), prior_outputs=prior)


@dataclasses.dataclass(frozen=True)
class ReplicaCall:
    """One HTTP request for a replica.

    Args:
        method: HTTP method.
        path: Path without the query.
        query: Query string.
        headers: Names in lower case, and values.
        body: The complete body.
        progress: Progress of the response.
        prefix_key: Key that is equal for requests with the same beginning, which should run on the same
            replica. None if the request has no prompt.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    progress: Progress
    prefix_key: str | None = None


class ReplicaLostError(Exception):
    """Error of a replica that has ended or whose engine has stopped; another replica must continue."""
