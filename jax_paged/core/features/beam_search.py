"""Beam search: selects the beams that continue after each step."""

import heapq
from collections.abc import Sequence as Items
from typing import NamedTuple

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.model_runner_output import TokenLogprobs
from jax_paged.core.request import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.stop_conditions import StopConditions


class Candidate(NamedTuple):
    """A beam extended by one token.

    Args:
        parent: The beam.
        token_id: The additional token.
        cumulative_logprob: Sum of the log-probabilities of all output tokens, including the additional one.
    """

    parent: Sequence
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """Selection of beams after each step of a beam search.

    Args:
        block_manager: Owner of the blocks.
        stop_conditions: Provides the end tokens and the maximum length of a hypothesis.
    """

    def __init__(self, block_manager: BlockManager, stop_conditions: StopConditions) -> None:
        self._manager = block_manager
        self._stop_conditions = stop_conditions

    def advance(self, group: SequenceGroup, beams: list[tuple[Sequence, TokenLogprobs]]) -> bool:
        """Replaces the beams of a request by the best continuations. Forks some beams and frees others.

        Args:
            group: The request.
            beams: All beams of the request, each with its most likely next tokens.

        Returns:
            True if the search has finished.
        """
        assert group.beam_params is not None, "the request is not a beam search"
        eos_token_ids = self._stop_conditions.eos_of(group)
        tops = [(seq, top.top_token_ids, top.top_logprobs) for seq, top in beams]
        continuing, ending = select(group, tops, eos_token_ids)
        ended = [_extended(c.parent.fork(0, 0), c, SequenceStatus.FINISHED_STOPPED) for c in ending]
        complete(group, ended, eos_token_ids)
        parents: set[Sequence] = set()
        continued: list[tuple[Sequence, Candidate]] = []
        for candidate in continuing:
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
        is_done = not continuing or len(group.sequences[0]) >= max_len
        return is_done or is_decided(group, max_len, eos_token_ids)

    def finish(self, group: SequenceGroup, seqs: list[Sequence]) -> None:
        """Keeps the best hypotheses of a request. Its unfinished beams `seqs` count as hypotheses."""
        complete(group, seqs, self._stop_conditions.eos_of(group))
        group.sequences = group.completed


def select(
    group: SequenceGroup, beams: Items[tuple[Sequence, list[int], list[float]]], eos_token_ids: frozenset[int]
) -> tuple[list[Candidate], list[Candidate]]:
    """Selects among the continuations of all beams of a request. Changes nothing.

    Args:
        group: The request.
        beams: Each beam with its 2 * beam_width most likely next tokens and their log-probabilities. Even if
            beam_width of these tokens end a hypothesis, beam_width others remain.
        eos_token_ids: Tokens that end a hypothesis.

    Returns:
        The continuations to keep as beams, best first and at most beam_width; and the hypotheses that end.

    Source: vLLM's LLM.beam_search.
    """
    assert group.beam_params is not None, "the request is not a beam search"
    every = [
        Candidate(seq, token_id, seq.cumulative_logprob + logprob)
        for seq, token_ids, logprobs in beams
        for token_id, logprob in zip(token_ids, logprobs, strict=True)
    ]
    ending = [c for c in every if c.token_id in eos_token_ids]
    others = [c for c in every if c.token_id not in eos_token_ids]
    # All candidates have the same length, so the length penalty does not change their order. The sort is
    # stable: among equal candidates, the one of the earlier beam comes first.
    best = heapq.nsmallest(group.beam_params.beam_width, others, key=lambda c: -c.cumulative_logprob)
    return best, ending


def score(group: SequenceGroup, seq: Sequence, eos_token_ids: frozenset[int]) -> float:
    """Returns the score by which hypotheses are ranked; see BeamSearchParams.length_penalty."""
    assert group.beam_params is not None, "the request is not a beam search"
    ends = bool(seq.output_token_ids) and seq.output_token_ids[-1] in eos_token_ids
    return seq.cumulative_logprob / (len(seq) - ends) ** group.beam_params.length_penalty


def complete(group: SequenceGroup, seqs: list[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Adds ended hypotheses to `group.completed`, and removes hypotheses that cannot be among the best."""
    assert group.beam_params is not None, "the request is not a beam search"
    every = [*group.completed, *seqs]
    every.sort(key=lambda seq: score(group, seq, eos_token_ids), reverse=True)
    group.completed = every[: group.beam_params.beam_width]


def is_decided(group: SequenceGroup, max_len: int, eos_token_ids: frozenset[int]) -> bool:
    """Returns whether no beam of a request can still become one of the best hypotheses.

    Log-probabilities only decrease. A beam's best possible score is therefore its current log-probability at
    its current or its maximum length, whichever gives the higher score.

    Args:
        group: The request. Its sequences are the current beams.
        max_len: Maximum number of tokens in a hypothesis, including its prompt.
        eos_token_ids: Tokens that end a hypothesis.
    """
    params = group.beam_params
    assert params is not None, "the request is not a beam search"
    if len(group.completed) < params.beam_width:
        return False
    worst = score(group, group.completed[-1], eos_token_ids)
    lengths = [(b.cumulative_logprob, n) for b in group.sequences for n in (len(b), max_len)]
    return all(logprob / n**params.length_penalty < worst for logprob, n in lengths)


def _extended(seq: Sequence, candidate: Candidate, status: SequenceStatus) -> Sequence:
    """Appends a candidate's token to a sequence with the tokens of its parent. Returns the sequence."""
    seq.output_token_ids.append(candidate.token_id)
    seq.cumulative_logprobs.append(candidate.cumulative_logprob)
    seq.status = status
    return seq
