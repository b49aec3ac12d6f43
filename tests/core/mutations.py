"""Plants bugs in the scheduling core, one at a time, and counts those that the tests kill. Not run by pytest.

    python tests/core/mutations.py [words that a bug's description holds]

Each bug is a piece of source that occurs once, what takes its place, and what that means. Exits with 1 if
fewer than 19 of 20 are killed, and stops if a piece isn't found once.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 120
CORE = tuple(
    f"core/test_{name}"
    for name in (
        "block_manager",
        "sequence_groups",
        "scheduler",
        "fairness",
        "steps_as_values",
        "scheduler_simulation",
        "state_machine",
        "running_ahead",
    )
)
TESTS = {
    "core/step_edits.py": ("core/test_running_ahead",),
    "worker/batch_builder.py": ("worker/test_batch",),
    "worker/input_batch.py": ("worker/test_input_batch",),
    "worker/block_mover.py": ("worker/test_block_mover",),
}


class Mutation(NamedTuple):
    """A planted bug."""

    file: str
    old: str
    new: str
    why: str


MUTATIONS = [
    Mutation(
        "core/block_pool.py",
        "fromkeys(range(1, num_blocks))",
        "fromkeys(range(num_blocks))",
        "null block handed out",
    ),
    Mutation(
        "core/block_pool.py",
        "self.ref_counts[block] += 1",
        "self.ref_counts[block] = 1",
        "reference not counted",
    ),
    Mutation(
        "core/block_pool.py",
        "self.ref_counts[block] -= 1",
        "self.ref_counts[block] = 0",
        "freed while referenced",
    ),
    Mutation(
        "core/block_pool.py",
        "                del self._free[block]\n",
        "                pass\n",
        "a hit stays free",
    ),
    Mutation("core/block_pool.py", "parent + array(", "array(", "hash without the parent"),
    Mutation("core/block_pool.py", " + salt.encode(", ' + "".encode(', "hash without the salt"),
    Mutation("core/block_pool.py", "and self.contents[block] == content", "", "a hash is trusted"),
    Mutation("core/block_pool.py", "            del self._cached[key]\n", "", "an evicted block is found"),
    Mutation(
        "core/block_pool.py",
        "move_to_end(block, last=False)",
        "move_to_end(block)",
        "cached blocks evicted first",
    ),
    Mutation(
        "core/block_manager.py",
        "                copies.append((block, table[i]))\n",
        "",
        "a copy is left out",
    ),
    Mutation(
        "core/block_manager.py",
        "                pool.release(block)\n                copies",
        "                copies",
        "a copied block keeps its reference",
    ),
    Mutation(
        "core/block_manager.py",
        "            if pool.ref_counts[block] > 1:\n",
        "            if True:\n",
        "the last writer copies too",
    ),
    Mutation(
        "core/block_manager.py",
        "                pool.forget(block)\n",
        "                pass\n",
        "a cached block is written",
    ),
    Mutation(
        "core/block_manager.py",
        "n - (pool.ref_counts[block] == n)",
        "n - 1",
        "one copy too few is counted",
    ),
    Mutation(
        "core/block_manager.py",
        "+ num_copies > pool.num_free",
        "> pool.num_free",
        "room for copies not counted",
    ),
    Mutation(
        "core/block_manager.py",
        "list(table) if group.is_cross else table[:num_blocks]\n            for",
        "list(table)\n            for",
        "a fork without truncation",
    ),
    Mutation(
        "core/block_manager.py",
        "        for table in self.block_tables[child]:\n            for block in table:\n"
        "                self.pool.share(block)\n",
        "",
        "a fork takes no references",
    ),
    Mutation(
        "core/prefix_cache.py",
        "max(0, position - window + 1) // self.block_size",
        "max(0, position - window + 2) // self.block_size",
        "the window a token too short",
    ),
    Mutation(
        "core/prefix_cache.py",
        "max(0, position - window + 1) // self.block_size",
        "max(0, position - window - self.block_size) // self.block_size",
        "blocks kept after they fell out of the window",
    ),
    Mutation(
        "core/block_manager.py",
        "        for block in prefix.blocks:  # before any new block is taken, which could evict them\n"
        "            self.pool.share(block)\n"
        "        self.block_tables[seq] = [list(table) for table in prefix.tables]\n"
        "        self.prefixes.forget_walk()\n"
        "        for table, n in zip(self.block_tables[seq], num_new, strict=True):\n"
        "            table.extend(self.pool.take() for _ in range(n))\n",
        "        self.block_tables[seq] = [list(table) for table in prefix.tables]\n"
        "        self.prefixes.forget_walk()\n"
        "        for table, n in zip(self.block_tables[seq], num_new, strict=True):\n"
        "            table.extend(self.pool.take() for _ in range(n))\n"
        "        for block in prefix.blocks:\n"
        "            self.pool.share(block)\n",
        "hits claimed after new blocks are taken",
    ),
    Mutation(
        "core/prefix_cache.py",
        "parent = hashes[i - 1] if i else NO_PARENT",
        "parent = NO_PARENT",
        "blocks found without what is before them",
    ),
    Mutation(
        "core/prefix_cache.py",
        "(len(walk.seq) - 1) // self.block_size):",
        "len(walk.seq) // self.block_size):",
        "the last token is a hit",
    ),
    Mutation(
        "core/prefix_cache.py",
        "range(start // self.block_size, stop // self.block_size):",
        "range(start // self.block_size, -(-stop // self.block_size)):",
        "half full blocks cached",
    ),
    Mutation(
        "core/prefix_cache.py",
        "self.pool.remember(tables[g][i], content._replace(group=g))",
        "self.pool.remember(tables[g][i], content)",
        "cache groups mixed up",
    ),
    Mutation(
        "core/block_manager.py",
        "                    target.share(block)\n",
        "                    pass\n",
        "what moves keeps no references",
    ),
    Mutation(
        "core/block_manager.py",
        "return [(block, moved[block]) for block in blocks]",
        "return [(moved[block], block) for block in blocks]",
        "pairs of a swap the wrong way round",
    ),
    Mutation(
        "core/block_manager.py",
        "        self.pool.release_tables(self.pinned.pop(name).tables)",
        "        self.pinned.pop(name)",
        "unpin without letting go",
    ),
    Mutation(
        "core/scheduler.py",
        "self.block_manager.fork(seq, sample, len(seq))",
        "self.block_manager.fork(seq, sample, len(seq) - 1)",
        "samples forked a token too early",
    ),
    Mutation(
        "core/scheduler.py",
        "group.sampling_params.seed_of(index))",
        "group.sampling_params.seed_of(0))",
        "samples of one seed",
    ),
    Mutation(
        "core/row_planner.py",
        "self.within(n - is_behind, budget)",
        "self.within(n, budget)",
        "beams go on before all are back",
    ),
    Mutation(
        "core/row_planner.py",
        "        if parent.num_computed_tokens < shared:\n            return\n",
        "",
        "forked from what is not computed yet",
    ),
    Mutation("core/preemption.py", "        step.swap_out += copies\n", "", "a swap out is left out"),
    Mutation(
        "core/preemption.py",
        "seq.status, seq.num_computed_tokens = SequenceStatus.WAITING, 0",
        "seq.status = SequenceStatus.WAITING",
        "a preempted sequence keeps its progress",
    ),
    Mutation(
        "core/admission.py",
        "self.queues.num_seats_taken + group.num_seats > self.max_num_seqs",
        "self.queues.num_seats_taken + 1 > self.max_num_seqs",
        "seats of samples not counted",
    ),
    Mutation(
        "core/admission.py",
        "self._holds_back_new or is_behind",
        "self._holds_back_new",
        "new requests overtake swapped ones",
    ),
    Mutation(
        "core/preemption.py",
        'or ("swap" if len(seqs) > 1 else "recompute")',
        'or ("swap" if len(seqs) > 2 else "recompute")',
        "not the paper's rule",
    ),
    Mutation(
        "core/admission.py",
        '"use_cache": group.sampling_params.reads_prefix_cache',
        '"use_cache": True',
        "prompt_logprobs lost",
    ),
    Mutation(
        "core/request_queues.py",
        "next(reversed(self.running.values()), None)",
        "next(iter(self.running.values()), None)",
        "the first is preempted",
    ),
    Mutation(
        "core/sequence_updater.py",
        "                self.block_manager.fork(parent, seq, parent.num_computed_tokens)\n",
        "                self.block_manager.fork(parent, seq, parent.num_computed_tokens - 1)\n",
        "a beam forked a token short",
    ),
    Mutation(
        "core/sequence_updater.py",
        "            if seq not in parents:\n                self.block_manager.free(seq)\n",
        "",
        "blocks of dropped beams kept",
    ),
    Mutation(
        "core/sequence_updater.py",
        "                seq.num_computed_tokens = len(seq) - 1\n",
        "                pass\n",
        "progress of samples not kept",
    ),
    Mutation(
        "core/stop_conditions.py",
        "num_output_tokens >= params.min_tokens",
        "num_output_tokens > params.min_tokens",
        "min_tokens a token late",
    ),
    Mutation(
        "core/beam_search.py",
        "seq.cumulative_logprob + logprob)",
        "logprob)",
        "log-probabilities do not add up",
    ),
    Mutation("core/beam_search.py", "(len(seq) - ends)", "len(seq)", "the end token counts in the length"),
    Mutation(
        "core/beam_search.py", "for n in (len(b), max_len)]", "for n in (len(b),)]", "a search ends too early"
    ),
    Mutation(
        "core/block_pool.py",
        "        if self._last_step is None:\n",
        "        if True:\n",
        "nothing is held back for a step in flight",
    ),
    Mutation(
        "core/block_pool.py",
        "next(iter(self._held.values())) <= step_id",
        "next(iter(self._held.values())) <= step_id + 1",
        "a block is freed a step too early",
    ),
    Mutation(
        "core/prefix_cache.py",
        "walk.num_valid, walk.result = place, None",
        "walk.num_valid, walk.result = place + 1, None",
        "an evicted block is found again",
    ),
    Mutation(
        "core/prefix_cache.py",
        "place is not None and place < walk.num_valid:",
        "place is not None:",
        "a walk goes on behind a hole",
    ),
    Mutation(
        "core/scheduler.py",
        "self._planner.available(behind, step)",
        "step.budget",
        "newcomers take the tokens of those that decode",
    ),
    Mutation(
        "core/block_manager.py",
        "release_tables(self.block_tables.pop(seq))\n            self.lost.append(seq)\n",
        "release_tables(self.block_tables.pop(seq))\n",
        "seats are kept by those that lost their blocks",
    ),
    Mutation(
        "core/seats.py",
        "                seat.num_told = list(map(len, seat.tables))\n",
        "",
        "blocks are told twice",
    ),
    Mutation(
        "core/block_manager.py",
        "                self._note_replaced(seq, g, i)\n",
        "",
        "a copied block is not told",
    ),
    Mutation(
        "core/block_manager.py",
        "                    self._note_replaced(seq, i, j)\n",
        "",
        "a block that fell out of a window is not told",
    ),
    Mutation(
        "core/sequence_updater.py",
        "(n <= len(drafts) and drafts[n - 1] != token_id)",
        "(n < len(drafts) and drafts[n - 1] != token_id)",
        "a token after a wrong draft is accepted",
    ),
    Mutation(
        "core/sequence_updater.py",
        "self._note_computed(group, seq, seq.num_computed_tokens, len(seq) - 1)",
        "self._note_computed(group, seq, seq.num_computed_tokens, len(seq) - 1 + len(drafts))",
        "blocks of rejected drafts cached",
    ),
    Mutation(
        "core/request_queues.py",
        "            self.num_seats_taken += group.num_seats - self._seats[group.request_id]\n",
        "            pass\n",
        "samples that ended keep their seats",
    ),
    Mutation(
        "core/row_planner.py",
        "step.budget - self._num_decode_tokens(behind)",
        "step.budget",
        "a long prompt starves those that decode",
    ),
    Mutation(
        "core/admission.py",
        "len(released.difference(shared)) >= num_missing",
        "len(released) >= 0",
        "preempted for one that does not fit",
    ),
    Mutation(
        "worker/batch_builder.py",
        "blocks * size + places % size",
        "blocks * size + (places + 1) % size",
        "slots shifted",
    ),
    Mutation(
        "worker/batch_builder.py",
        "end_loc[logits_rows.rows] - 1 - logits_rows.tokens_back",
        "end_loc[logits_rows.rows] - logits_rows.tokens_back",
        "logits of the next row",
    ),
    Mutation(
        "worker/batch_builder.py",
        'view["context_lens"][g, :n] = stops - batch.num_dropped[seats]\n',
        'view["context_lens"][g, :n] = stops - batch.num_dropped[seats] - 1\n',
        "own tokens not attended to",
    ),
    Mutation(
        "core/seats.py",
        "(beams.temperature if beams else 0) or 1.0",
        "1.0",
        "temperature of beams forgotten",
    ),
    Mutation(
        "worker/batch_builder.py",
        '        view["slot_mapping"][:] = self._num_blocks * size\n',
        "",
        "padding is written to block 0",
    ),
    Mutation(
        "worker/input_batch.py",
        "self.block_tables[g, seat, index] = block\n",
        "pass\n",
        "a replaced block is not taken in",
    ),
    Mutation(
        "worker/input_batch.py",
        "self._write(g, seat, int(self.num_table_blocks[g, seat]), blocks)",
        "self._write(g, seat, 0, blocks)",
        "new blocks stand at the wrong place",
    ),
    Mutation(
        "core/block_manager.py",
        "            start = seq.next_position - seq.num_dropped_tokens\n            first,",
        "            start = seq.num_computed_tokens - seq.num_dropped_tokens\n            first,",
        "a step ahead has no block for its token",
    ),
    Mutation(
        "core/sequence.py",
        "            num_computed_tokens=self.next_position,\n            num_in_flight=0,\n",
        "",
        "a sample is forked from a prompt that is in flight",
    ),
    Mutation(
        "core/stop_conditions.py",
        "group.beam_params is not None or group.sampling_params.bad_words_token_ids",
        "group.beam_params is not None",
        "bad words are looked for without the last token",
    ),
    Mutation(
        "core/stop_conditions.py",
        "self.num_left(group, seq) > 0",
        "self.num_left(group, seq) >= 0",
        "a token is computed that nothing is drawn after",
    ),
    Mutation(
        "core/preemption.py",
        "            if step.is_ahead:\n",
        "            if False:\n",
        "a request is preempted while a step computes it",
    ),
    Mutation(
        "core/scheduler.py",
        "if not self.queues.running and not step.is_ahead:",
        "if not self.queues.running:",
        "a request ends for lack of blocks that are about to be freed",
    ),
    Mutation(
        "core/block_pool.py",
        "        if self._last_step is None:\n",
        "        if True:\n",
        "a block is handed out that a step in flight still writes to",
    ),
    Mutation(
        "core/burst_planner.py",
        "append_slots([(seq, num_tokens) for",
        "append_slots([(seq, 1) for",
        "a burst has a block for its first token only",
    ),
    Mutation(
        "core/burst_planner.py",
        "min(self.size, num_left)",
        "self.size",
        "a burst draws more tokens than a sequence may have",
    ),
    Mutation(
        "core/burst_planner.py",
        " or queues.waiting or queues.swapped",
        "",
        "a burst begins while somebody waits",
    ),
    Mutation(
        "core/burst_planner.py",
        "                    continue  # it ends with the tokens that are being drawn\n",
        "                    return False\n",
        "one sequence that ends keeps the others from a burst",
    ),
    Mutation(
        "core/burst_planner.py",
        "        step.copies += copies\n",
        "",
        "what a burst writes to is not copied before",
    ),
    Mutation(
        "core/seats.py",
        "sample.num_pending += num_tokens if is_burst else 1",
        "sample.num_pending += 1",
        "a burst in flight is taken for a single step",
    ),
    Mutation(
        "core/stop_conditions.py",
        " or seq.num_output_tokens < params.min_tokens",
        "",
        "a burst goes past min_tokens",
    ),
    Mutation(
        "core/sequence_updater.py",
        "                seq.num_in_flight -= output.burst[i]\n",
        "                seq.num_in_flight -= 1\n",
        "tokens of a burst stay in flight",
    ),
    Mutation(
        "core/sequence_updater.py",
        "num_steps + (i < breaks_at)",
        "num_steps",
        "the samples before one that allows no token lose theirs",
    ),
    Mutation(
        "core/sequence_updater.py",
        "found is not None and not found[1].status.is_finished",
        "found is not None and not found[0].is_finished",
        "what a sequence computes after its end ends its request",
    ),
    Mutation(
        "worker/batch_builder.py",
        'view["end_tokens"][:n] = batch.end_tokens[seats]',
        'view["end_tokens"][:n] = -1',
        "a burst goes on after an end token",
    ),
    Mutation(
        "worker/input_batch.py",
        "            self._changed_places.append(self._place(g, seat, index))\n",
        "",
        "the device is not told of a replaced block",
    ),
    Mutation(
        "worker/input_batch.py",
        "range(place, place + len(blocks))",
        "range(place, place + 1)",
        "the device is told of the first new block only",
    ),
    Mutation(
        "worker/batch_builder.py",
        "bias, mask, changes[:, :num_ahead])",
        "bias, mask, changes[:, :0])",
        "changes of tables that do not fit into the buffer are dropped",
    ),
    Mutation(
        "worker/batch_builder.py",
        '        view["seats"][n:] = batch.num_seats\n',
        "",
        "rows that are not used read the table of seat 0",
    ),
    Mutation(
        "core/request_edits.py",
        "        del seq.block_hashes[len(seq) // manager.block_size :]\n",
        "",
        "hashes of tokens that were taken back are kept",
    ),
    Mutation(
        "core/request_edits.py",
        "        manager.prefixes.forget_walk()  #",
        "        #",
        "a walk goes on along tokens that were taken back",
    ),
    Mutation(
        "core/request_edits.py",
        "min(seq.num_computed_tokens, len(seq) - 1)",
        "min(seq.num_computed_tokens, len(seq))",
        "the last token that is left is not computed again",
    ),
    Mutation(
        "core/request_edits.py",
        "        if manager.lacks(tables, seq.num_computed_tokens):\n",
        "        if False:\n",
        "a request goes on behind a window whose blocks are gone",
    ),
    Mutation(
        "core/request_edits.py",
        "seq.num_dropped_tokens += (len(held)",
        "seq.num_dropped_tokens = (len(held)",
        "the first of two drops is forgotten",
    ),
    Mutation(
        "core/request_edits.py",
        "- 2 - seq.block_places",
        "- 1 - seq.block_places",
        "taken back up to the last kept block",
    ),
    Mutation(
        "core/request_edits.py",
        "self._manager.fork(seq, child, seq.num_computed_tokens)",
        "self._manager.fork(seq, child, seq.num_computed_tokens - 1)",
        "a fork of a request lacks its last token",
    ),
    Mutation(
        "core/request_edits.py",
        "self._queues.num_seats_taken < self._max_num_seqs",
        "self._queues.num_seats_taken <= self._max_num_seqs",
        "a fork takes a seat that is not there",
    ),
    Mutation(
        "core/block_manager.py",
        "            start = seq.next_position - seq.num_dropped_tokens\n",
        "            start = seq.next_position\n",
        "slots count what was dropped",
    ),
    Mutation(
        "core/block_manager.py",
        " and not seq.num_dropped_tokens:",
        ":",
        "blocks behind dropped ones are cached",
    ),
    Mutation(
        "core/block_manager.py",
        "                pool.release_tables([[table[i] for i in sorted(dropped)]])\n",
        "",
        "dropped blocks are kept",
    ),
    Mutation(
        "core/block_manager.py",
        "        if is_here:\n            self.lost.append(seq)\n",
        "",
        "a sequence keeps its seat when it loses blocks",
    ),
    Mutation(
        "core/preemption.py",
        '        swaps = mode == "swap" or _has_dropped(group)\n',
        '        swaps = mode == "swap"\n',
        "a request with dropped blocks ends though it could be swapped",
    ),
    Mutation(
        "core/preemption.py",
        "return bool(step.swap_in) and _has_dropped(group)",
        "return False",
        "a request with dropped blocks ends in a step that swaps in",
    ),
    Mutation(
        "core/seats.py",
        "token_ids = token_ids + drafts[seq]",
        "token_ids = drafts[seq]",
        "a draft without the token before it",
    ),
    Mutation(
        "core/seats.py",
        "            num_dropped_tokens=seq.num_dropped_tokens,\n",
        "",
        "the executor does not know what was dropped",
    ),
    Mutation(
        "worker/batch_builder.py",
        "        places = positions - batch.num_dropped[token_seats]\n",
        "        places = positions\n",
        "slots of a sequence with dropped blocks",
    ),
    Mutation(
        "worker/batch_builder.py",
        "        places = start - batch.num_dropped[seats]\n        last",
        "        places = start\n        last",
        "a burst of a sequence with dropped blocks is checked at the wrong place",
    ),
    Mutation(
        "worker/input_batch.py",
        "        self.num_dropped[seat] = new.num_dropped_tokens\n",
        "",
        "dropped tokens are not taken in",
    ),
    Mutation(
        "worker/block_mover.py", "pairs = pairs[size:]", "pairs = ()", "copies beyond the first call left out"
    ),
    Mutation(
        "core/step_edits.py",
        "        seat.seq.num_in_flight -= num_tokens\n",
        "",
        "tokens of a dropped row are never computed",
    ),
    Mutation(
        "core/step_edits.py",
        "num_told - len(blocks) for",
        "num_told for",
        "blocks of a dropped row are never told",
    ),
    Mutation(
        "core/step_edits.py",
        "[*row.replaced_blocks, *manager.changed.get(seat.seq, [])]",
        "[*manager.changed.get(seat.seq, [])]",
        "entries that a dropped row replaced are never told",
    ),
    Mutation(
        "core/step_edits.py",
        "seat.seq.num_pending -= dropped[sample.row] if output.burst else 1",
        "seat.seq.num_pending -= 1",
        "a dropped burst counts as one token",
    ),
    Mutation(
        "core/step_edits.py",
        "            manager.free(seat.seq)\n",
        "",
        "blocks of samples that a dropped row forked are lost",
    ),
    Mutation(
        "core/step_edits.py",
        "            seat.group.sequences.remove(seat.seq)\n",
        "",
        "samples that a dropped row forked stay",
    ),
    Mutation(
        "core/step_edits.py",
        "sample._replace(row=new)",
        "sample",
        "samples of a re-ordered row are drawn from another",
    ),
    Mutation(
        "worker/block_mover.py",
        "            to = [host for _, host in chunk]\n",
        "            to = [device for device, _ in chunk]\n",
        "swapped out to the wrong block",
    ),
]


def lay_out(folder: Path) -> Path:
    """Copies package and tests; returns where the package is."""
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(ROOT / "jax_paged", folder / "jax_paged", ignore=ignore)  # links are followed
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder / "jax_paged"


def is_killed(folder: Path, tests: tuple[str, ...]) -> bool:
    """Whether any of the tests fails, or they take too long."""
    names = [f"tests/{name}.py" for name in tests]
    options = ["-x", "-q", "--timeout=60", "-p", "no:cacheprovider"]
    options += [] if "worker/test_block_mover" in tests else ["--noconftest"]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *names]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    assert done.returncode in (0, 1, 2), done.stdout.decode() + done.stderr.decode()
    return done.returncode != 0


def main(words: list[str]) -> int:
    for m in MUTATIONS:
        count = (ROOT / "jax_paged" / m.file).read_text(encoding="utf-8").count(m.old)
        assert count == 1, f"{m.file} ({m.why}): found {count} times, once is allowed: {m.old!r}"
    chosen = [m for m in MUTATIONS if all(word in f"{m.file} {m.why}" for word in words)]
    num_killed = 0
    with tempfile.TemporaryDirectory() as name:
        package = lay_out(Path(name))
        for tests in sorted({TESTS.get(m.file, CORE) for m in chosen}):
            assert not is_killed(Path(name), tests), f"the tests fail without any planted bug: {tests}"
        for m in chosen:
            path = package / m.file
            source = path.read_text(encoding="utf-8")
            path.write_text(source.replace(m.old, m.new), encoding="utf-8")
            start = time.monotonic()
            killed = is_killed(Path(name), TESTS.get(m.file, CORE))
            path.write_text(source, encoding="utf-8")
            num_killed += killed
            word = "killed" if killed else "SURVIVED"
            print(f"{word:8}  {time.monotonic() - start:5.1f} s  {m.file:20}  {m.why}", flush=True)
    print(f"{num_killed} of {len(chosen)} killed")
    return int(num_killed < 0.95 * len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
