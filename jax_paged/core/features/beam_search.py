"""Beam search: which continuations go on after each step. Pure Python on the top tokens of each beam."""

import heapq
from collections.abc import Sequence as Items
from typing import NamedTuple

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.model_runner_output import TokenLogprobs
from jax_paged.core.request import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.stop_conditions import StopConditions


class Candidate(NamedTuple):
    """One more token for a beam."""

    parent: Sequence
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """Replaces the beams of requests after each step.

    Args:
        block_manager: Owner of the blocks.
        stop_conditions: Tells the end tokens and the maximum length of a hypothesis.
    """

    def __init__(self, block_manager: BlockManager, stop_conditions: StopConditions) -> None:
        self._manager = block_manager
        self._stop_conditions = stop_conditions

    def advance(self, group: SequenceGroup, beams: list[tuple[Sequence, TokenLogprobs]]) -> bool:
        """Replaces the beams of a request by the best continuations: forks some beams, frees others.

        Args:
            group: The request.
            beams: All of its beams, each with its most likely next tokens.

        Returns:
            True if the search is over.
        """
        assert group.beam_params is not None, "a beam search"
        eos_token_ids = self._stop_conditions.eos_of(group)
        tops = [(seq, top.top_token_ids, top.top_logprobs) for seq, top in beams]
        going, ending = select(group, tops, eos_token_ids)
        ended = [_extended(c.parent.fork(0, 0), c, SequenceStatus.FINISHED_STOPPED) for c in ending]
        complete(group, ended, eos_token_ids)
        parents: set[Sequence] = set()
        continued: list[tuple[Sequence, Candidate]] = []
        for candidate in going:
            seq = parent = candidate.parent
            if parent in parents:
                seq = parent.fork(0, 0)
                self._manager.fork(parent, seq, parent.num_computed_tokens)
            parents.add(parent)
            continued.append((seq, candidate))
        for seq, _ in beams:
            if seq not in parents:
                self._manager.free(seq)
        group.sequences = [_extended(seq, c, SequenceStatus.RUNNING) for seq, c in continued]
        prompt_len = len(beams[0][0].prompt_token_ids)
        max_len = min(self._stop_conditions.max_model_len, prompt_len + group.beam_params.max_tokens)
        is_done = not going or len(group.sequences[0]) >= max_len
        return is_done or is_decided(group, max_len, eos_token_ids)

    def finish(self, group: SequenceGroup, seqs: list[Sequence]) -> None:
        """Leaves the best hypotheses of a request, among them the beams that went on until now."""
        complete(group, seqs, self._stop_conditions.eos_of(group))
        group.sequences = group.completed


def select(
    group: SequenceGroup, beams: Items[tuple[Sequence, list[int], list[float]]], eos_token_ids: frozenset[int]
) -> tuple[list[Candidate], list[Candidate]]:
    """Chooses among the continuations of all beams of a request; changes nothing.

    Args:
        group: The request.
        beams: Each beam with its 2 * beam_width most likely next tokens and their log-probabilities: even
            if beam_width of them end a hypothesis, as many are left to go on.
        eos_token_ids: Tokens that end a hypothesis.

    Returns:
        Those that go on, best first and at most beam_width; and those that are complete.

    Source: vLLM's LLM.beam_search.
    """
    assert group.beam_params is not None, "a beam search"
    every = [
        Candidate(seq, token_id, seq.cumulative_logprob + logprob)
        for seq, token_ids, logprobs in beams
        for token_id, logprob in zip(token_ids, logprobs, strict=True)
    ]
    complete = [c for c in every if c.token_id in eos_token_ids]
    others = [c for c in every if c.token_id not in eos_token_ids]
    # All are of one length: the penalty changes nothing. Stable, so that ties go to the earlier beam.
    best = heapq.nsmallest(group.beam_params.beam_width, others, key=lambda c: -c.cumulative_logprob)
    return best, complete


def score(group: SequenceGroup, seq: Sequence, eos_token_ids: frozenset[int]) -> float:
    """Returns what the hypotheses of a request are ranked by; see BeamSearchParams.length_penalty."""
    assert group.beam_params is not None, "a beam search"
    ends = bool(seq.output_token_ids) and seq.output_token_ids[-1] in eos_token_ids
    return seq.cumulative_logprob / (len(seq) - ends) ** group.beam_params.length_penalty


def complete(group: SequenceGroup, seqs: list[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Adds hypotheses that ended to `group.completed`, and drops those that can't be among the best."""
    assert group.beam_params is not None, "a beam search"
    every = [*group.completed, *seqs]
    every.sort(key=lambda seq: score(group, seq, eos_token_ids), reverse=True)
    group.completed = every[: group.beam_params.beam_width]


def is_decided(group: SequenceGroup, max_len: int, eos_token_ids: frozenset[int]) -> bool:
    """Whether no beam of a request can still end among the best.

    A log-probability only falls. So the best that a beam can score is what it has now, at the length that
    the penalty likes best.

    Args:
        group: Its sequences are the beams that go on.
        max_len: Maximum tokens of a hypothesis, its prompt included.
        eos_token_ids: Tokens that end a hypothesis.
    """
    params = group.beam_params
    assert params is not None, "a beam search"
    if len(group.completed) < params.beam_width:
        return False
    worst = score(group, group.completed[-1], eos_token_ids)
    lengths = [(b.cumulative_logprob, n) for b in group.sequences for n in (len(b), max_len)]
    return all(logprob / n**params.length_penalty < worst for logprob, n in lengths)


def _extended(seq: Sequence, candidate: Candidate, status: SequenceStatus) -> Sequence:
    """Appends a candidate's token to a sequence with its parent's tokens; returns the sequence."""
    seq.output_token_ids.append(candidate.token_id)
    seq.cumulative_logprobs.append(candidate.cumulative_logprob)
    seq.status = status
    return seq
