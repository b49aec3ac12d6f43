"""ReplicaRouter: chooses the engine that runs a request, by prefix and load."""

import hashlib
from collections.abc import Iterable

from jax_paged.errors import check, check_int

# Default of max_lag, a difference between loads: 4 waiting requests or 16 running requests.
MAX_LAG = 16
_WAITING_LOAD = 4
# A Mersenne prime. Products modulo a prime are distributed evenly.
_PRIME = 2**61 - 1


class ReplicaRouter:
    """Router that prefers the home replica of a request's prefix, unless its load is too high.

    The load of a replica is the number of its running requests plus 4 times the number of its waiting
    requests. A chosen replica immediately counts one more waiting request, so that simultaneous choices take
    each other into account. The caller then reports what happens to the request (`begin`, then `finish`; or
    `cancel`), or reports the load that a replica measures itself (`set_load`). The router is not thread-safe.

    The home of a prefix is found by rendezvous hashing with a multiplicative hash: it is the replica whose
    hash, times the hash of the prefix, is largest modulo a prime. Routers therefore agree without
    communication. If a replica is removed, only its own prefixes move. A new replica receives an equal share
    of the prefixes.

    Args:
        replica_ids: Unique names of the replicas.
        max_lag: A prefix's home is chosen if its load exceeds the lowest load of all replicas by at most this
            number.

    Raises:
        ValueError: If a name is not unique, or max_lag is negative.

    Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.
    """

    def __init__(self, replica_ids: Iterable[str], max_lag: int = MAX_LAG) -> None:
        check_int("max_lag", max_lag, 0)
        self._max_lag = max_lag
        self._loads: dict[str, int] = {}
        self._hashes: dict[str, int] = {}
        for replica_id in replica_ids:
            self.add_replica(replica_id)

    @property
    def replica_ids(self) -> tuple[str, ...]:
        """The replicas, in the order in which they were added."""
        return tuple(self._loads)

    def load(self, replica_id: str) -> int:
        """Returns the load of a replica."""
        return self._loads[replica_id]

    def home(self, prefix_key: str) -> str:
        """Returns the home replica of a prefix, regardless of its load."""
        return self._preferred(self._hashes, prefix_key)

    def choose(self, prefix_key: str | None = None) -> str:
        """Returns the replica for a request, and counts the request as waiting there.

        Args:
            prefix_key: The same key for all requests that share a prefix and should use the same prefix
                cache, such as the result of Conversations.key_of. If only text is available, use the text up
                to the end of the first user message, or a fixed number of leading characters. None chooses
                the replica with the lowest load.

        Raises:
            ValueError: If there are no replicas.
        """
        check(bool(self._loads), "replicas", 0, "at least 1", aspect="the number of")
        least = min(self._loads.values())
        chosen = None if prefix_key is None else self.home(prefix_key)
        if chosen is None or self._loads[chosen] - least > self._max_lag:
            free = [replica_id for replica_id, load in self._loads.items() if load == least]
            # Among replicas with the lowest load, requests with the same prefix prefer the same replica.
            chosen = free[0] if prefix_key is None else self._preferred(free, prefix_key)
        self._loads[chosen] += _WAITING_LOAD
        return chosen

    def begin(self, replica_id: str) -> None:
        """Counts a waiting request as running. Does nothing if the replica was removed."""
        self._add(replica_id, 1 - _WAITING_LOAD)

    def finish(self, replica_id: str) -> None:
        """Removes a running request. Does nothing if the replica was removed."""
        self._add(replica_id, -1)

    def cancel(self, replica_id: str) -> None:
        """Removes a request that was still waiting. Does nothing if the replica was removed."""
        self._add(replica_id, -_WAITING_LOAD)

    def set_load(self, replica_id: str, num_waiting: int, num_running: int) -> None:
        """Replaces the load of a replica by the load that it reports. Does nothing if it was removed."""
        if replica_id in self._loads:
            self._loads[replica_id] = _WAITING_LOAD * num_waiting + num_running

    def add_replica(self, replica_id: str) -> None:
        """Adds a replica without load.

        A removed replica must not be added again under the same name while requests sent to it are running.

        Raises:
            ValueError: If a replica has this name.
        """
        check(replica_id not in self._loads, "replica_id", replica_id, "unique among replicas")
        self._loads[replica_id], self._hashes[replica_id] = 0, _hash(replica_id)

    def remove_replica(self, replica_id: str) -> None:
        """Removes a replica and its requests.

        Raises:
            ValueError: If no replica has this name.
        """
        check(replica_id in self._loads, "replica_id", replica_id, f"one of {list(self._loads)}")
        del self._loads[replica_id], self._hashes[replica_id]

    def _add(self, replica_id: str, load: int) -> None:
        if replica_id in self._loads:
            self._loads[replica_id] += load

    def _preferred(self, replica_ids: Iterable[str], prefix_key: str) -> str:
        """Returns the replica that a prefix prefers among the given ones."""
        prefix_hash, hashes = _hash(prefix_key), self._hashes
        ids = list(replica_ids)
        products = [prefix_hash * hashes[replica_id] % _PRIME for replica_id in ids]
        return ids[products.index(max(products))]


def _hash(name: str) -> int:
    # Text from clients may contain lone surrogates.
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(digest) % (_PRIME - 1) + 1
