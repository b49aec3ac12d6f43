"""Bugs planted in the slots of states."""

from planted_bugs.mutation import Mutation

_FILE = "core/kv_cache/state_slots.py"

STATES = [
    Mutation(
        _FILE,
        "            self._moves.copies.append((slot, own))  #",
        "            #",
        "a fork goes on from whatever its new slot holds",
    ),
    Mutation(
        _FILE,
        "if is_alone and pool.contents[slot] is None:",
        "if pool.contents[slot] is None:",
        "a shared slot is written",
    ),
    Mutation(
        _FILE, "if is_alone and pool.contents[slot] is None:", "if is_alone:", "a checkpoint is written"
    ),
    Mutation(
        _FILE,
        "self._positions[parent] == num_tokens",
        "self._positions[parent] >= num_tokens",
        "a fork of fewer tokens gets a state that has seen more",
    ),
    Mutation(
        _FILE, "            self._positions[seq] = start\n", "", "a row that was dropped counts as seen"
    ),
    Mutation(
        _FILE,
        "            for _, slot in pending[len(kept) :]:\n                self.pool.release(slot)\n",
        "",
        "the checkpoint of a row that was dropped keeps its slot",
    ),
    Mutation(
        _FILE,
        "        for _, slot in self._pending.pop(seq, []):\n            self.pool.release(slot)\n",
        "",
        "the checkpoint of a request that was aborted keeps its slot",
    ),
    Mutation(
        _FILE,
        "        return StateCheckpoint(position - start, slot)\n",
        "        return StateCheckpoint(position, slot)\n",
        "a checkpoint too late",
    ),
    Mutation(
        _FILE,
        "            pool.remove_from_cache(slot)\n        elif",
        "        elif",
        "a stale checkpoint is found",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "is_usable &= self._states.pool.find_cached(content._replace(group=STATE_GROUP)) is not None\n",
        "pass\n",
        "a prefix is used whose state is gone",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "                lookup.first_positions.setdefault((content.hash, STATE_GROUP), i)\n",
        "",
        "a walk that is kept does not hear of states",
    ),
    Mutation(
        "core/block_manager.py",
        "        self.states.free(seq)\n",
        "",
        "a slot is not freed with the blocks",
    ),
    Mutation(
        "core/block_manager.py",
        "        self.states.swap_in(seqs)\n",
        "",
        "states stay in host memory",
    ),
]
