"""Which of several engines with the same weights runs a request: its prefix's home, or the least loaded."""

import hashlib
from collections.abc import Iterable

from jax_paged.errors import check, check_int

# What a prefix may cost: to stand behind four more requests that wait, or 16 more that run, than elsewhere.
MAX_LAG = 16
_LOAD_OF_WAITING = 4
# A Mersenne prime, so that products modulo it are spread evenly.
_PRIME = 2**61 - 1


class ReplicaRouter:
    """Chooses replicas, and counts what they have to do: 4 for a request that waits, 1 for one that runs.

    A choice counts as a request that waits, at once: those who choose in the same moment see each other. The
    caller then tells what becomes of it (`begin`, and `finish`, or `leave`), or what a replica has to do by
    its own account (`count`). One thread at a time may use it.

    The home of a prefix is the replica whose number, times that of the prefix, is the largest modulo a prime
    (rendezvous hashing with a multiplicative hash). So routers agree that have never heard of each other; a
    replica that goes gives up its own prefixes and moves no others, and one that comes takes an equal share.

    Args:
        replica_ids: The replicas, each by a name of its own.
        max_lag: How much more than the least loaded replica a prefix's home may have to do, and still be
            chosen.

    Raises:
        ValueError: If a name is there twice, or max_lag is negative.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """

    def __init__(self, replica_ids: Iterable[str], max_lag: int = MAX_LAG) -> None:
        check_int("max_lag", max_lag, 0)
        self._max_lag = max_lag
        self._loads: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        for replica_id in replica_ids:
            self.add_replica(replica_id)

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """The replicas, in the order in which they came."""
        return tuple(self._loads)

    def load(self, replica_id: str) -> int:
        """Returns what a replica has to do."""
        return self._loads[replica_id]

    def home(self, prefix_key: str) -> str:
        """Returns the replica that a prefix belongs to, whatever that has to do."""
        return self._first(self._numbers, prefix_key)

    def choose(self, prefix_key: str | None = None) -> str:
        """Returns who runs a request, which waits there from now on.

        Args:
            prefix_key: Equal for requests that begin alike and should meet in one prefix cache, such as what
                Conversations.key_of returns; who has only a text takes the part up to the end of the first
                message of a user, or so many of its first characters. None takes the least loaded replica.

        Raises:
            ValueError: If there are no replicas.
        """
        check(bool(self._loads), "replicas", 0, "at least 1", aspect="the number of")
        least = min(self._loads.values())
        chosen = None if prefix_key is None else self.home(prefix_key)
        if chosen is None or self._loads[chosen] - least > self._max_lag:
            free = [replica_id for replica_id, load in self._loads.items() if load == least]
            # A prefix that its home has no time for meets itself elsewhere, too, if it can.
            chosen = free[0] if prefix_key is None else self._first(free, prefix_key)
        self._loads[chosen] += _LOAD_OF_WAITING
        return chosen

    def begin(self, replica_id: str) -> None:
        """Counts a request that waited as one that runs; does nothing for a replica that has gone."""
        self._add(replica_id, 1 - _LOAD_OF_WAITING)

    def finish(self, replica_id: str) -> None:
        """Forgets a request that ran; does nothing for a replica that has gone."""
        self._add(replica_id, -1)

    def leave(self, replica_id: str) -> None:
        """Forgets a request that left before it ran; does nothing for a replica that has gone."""
        self._add(replica_id, -_LOAD_OF_WAITING)

    def count(self, replica_id: str, num_waiting: int, num_running: int) -> None:
        """Takes what a replica says it has to do, in place of what was counted; nothing if it has gone."""
        if replica_id in self._loads:
            self._loads[replica_id] = _LOAD_OF_WAITING * num_waiting + num_running

    def add_replica(self, replica_id: str) -> None:
        """Adds a replica that has nothing to do yet.

        Raises:
            ValueError: If there is one of this name. One that has gone must not come back under its name
                while requests still run that were sent to it.
        """
        check(replica_id not in self._loads, "replica_id", replica_id, "a name that no replica has")
        self._loads[replica_id], self._numbers[replica_id] = 0, _number(replica_id)

    def remove_replica(self, replica_id: str) -> None:
        """Chooses a replica no more, and forgets its requests.

        Raises:
            ValueError: If there is none of this name.
        """
        check(replica_id in self._loads, "replica_id", replica_id, f"one of {list(self._loads)}")
        del self._loads[replica_id], self._numbers[replica_id]

    def _add(self, replica_id: str, load: int) -> None:
        if replica_id in self._loads:
            self._loads[replica_id] += load

    def _first(self, replica_ids: Iterable[str], prefix_key: str) -> str:
        """Returns which of some replicas a prefix prefers."""
        number, numbers = _number(prefix_key), self._numbers
        ids = list(replica_ids)
        products = [number * numbers[replica_id] % _PRIME for replica_id in ids]
        return ids[products.index(max(products))]


def _number(name: str) -> int:
    # Texts of clients may hold lone surrogates.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest) % (_PRIME - 1) + 1
