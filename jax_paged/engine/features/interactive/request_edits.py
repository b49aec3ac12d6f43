"""Edits of running requests, such as tree search needs: forks, rollbacks and verification of draft tokens."""

import dataclasses
import time
from collections.abc import Iterable

import numpy as np

from jax_paged.core.features.interactive.request_edits import Fork, Rollback, max_rollback_tokens
from jax_paged.core.request import Sequence, SequenceStatus
from jax_paged.engine.engine_core import EngineCore
from jax_paged.engine.feature import EngineFeature
from jax_paged.engine.output_processor import RequestState
from jax_paged.errors import check, check_int
from jax_paged.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Verification:
    """Result of verifying draft tokens for a request.

    Args:
        num_accepted: Number of leading draft tokens that the request has drawn itself.
        token_ids: The tokens added to the request: the accepted ones, followed by the token drawn after them
            unless an accepted token ended the request.
        logprobs: Natural log-probability of each draft token, given the tokens before it.
    """

    num_accepted: int
    token_ids: list[int]
    logprobs: list[float]


def settled_state(core: EngineCore, request_id: str) -> RequestState:
    """Waits for the steps in flight; returns the state of a request that is still unfinished after them.

    Raises:
        ValueError: If there is no such request, or a planned step has not run.
    """
    core.wait_for_steps()
    if core.planned is not None:
        raise ValueError("the plan of schedule() has not run; call run() or step() first")
    state = core.requests.get(request_id)
    names = ", ".join(map(repr, list(core.requests)[:8])) or "there is none"
    check(state is not None, "request_id", request_id, f"the id of an unfinished request ({names})")
    assert state is not None, "the request has no state"
    return state


def only_sequence(core: EngineCore, state: RequestState) -> Sequence:
    """Returns the sequence of a request that can never have more than one.

    Raises:
        ValueError: If the request has several samples or beams, or uses a stateful logits processor.
    """
    group = state.group
    stateful = core.config.stateful_processors.intersection(group.sampling_params.extra_args or ())
    allowed = f"the id of a request without stateful logits processors ({', '.join(sorted(stateful))})"
    check(not stateful, "request_id", group.request_id, allowed)
    check(not group.beam_params, "request_id", group.request_id, "the id of a request without beam search")
    ok, allowed = group.max_num_seqs == 1, "the id of a request with n=1 and best_of=1"
    check(ok, "request_id", group.request_id, allowed)
    return group.sequences[0]


def decoding_sequence(core: EngineCore, state: RequestState) -> Sequence:
    """Returns the only sequence of a request whose next step decodes: one token is left to compute."""
    seq = only_sequence(core, state)
    decodes = seq.status is SequenceStatus.RUNNING and seq.num_new_tokens == 1
    what = f"it is {seq.status.name.lower()} and has {seq.num_new_tokens}"
    allowed = f"the id of a running request with one token left to compute ({what})"
    check(decodes, "request_id", state.group.request_id, allowed)
    return seq


class RequestEdits(EngineFeature):
    """Methods of LLMEngine that fork and roll back running requests, and verify draft tokens for them."""

    def fork(self, request_id: str, new_id: str | None = None, seed: int | None = None) -> str:
        """Adds a request that continues from the current state of another one, and returns its id.

        The two requests share their blocks. If no batch slot is free, the fork waits in the queue, and tokens
        that are not in the prefix cache are recomputed. Like the other methods of this class, `fork` first
        waits for the steps in flight. The next call of `step` returns their outputs. A request with dropped
        blocks can only be forked if a batch slot is free, because its fork can't be recomputed.

        Args:
            request_id: The request to fork.
            new_id: Id of the new request; None for a generated id.
            seed: Seed of the new request; None for a generated seed.

        Raises:
            ValueError: If the request can't be forked. Nothing has changed then.
        """
        core = self._core
        core.check_can_run()
        new_id = core.new_name(f"{request_id}-fork") if new_id is None else new_id
        seed = SamplingParams(seed=seed).seed
        seed = core.new_seed() if seed is None else seed
        ok = isinstance(new_id, str) and new_id not in core.requests
        check(ok, "new_id", new_id, "a string that is not the id of another unfinished request")
        state = settled_state(core, request_id)
        only_sequence(core, state)
        editor = core.scheduler.editor
        allowed = (
            "the id of a request without dropped blocks because no batch slot is free (max_num_seqs), and a "
            "fork that waits would have to be recomputed"
        )
        check(editor.can_fork(state.group), "request_id", request_id, allowed)
        group = core.scheduler.edit_request(Fork(request_id, new_id, seed, time.monotonic()))
        core.requests[new_id] = state.forked(group)
        return new_id

    def rollback(self, request_id: str, num_tokens: int) -> None:
        """Takes back the last output tokens of a request with one sequence, as if they had never been drawn.

        Output that was already returned as a delta is not revoked: the next delta starts after the remaining
        tokens.

        Args:
            request_id: The request.
            num_tokens: Number of tokens to take back.

        Raises:
            ValueError: If the tokens can't be taken back. Nothing has changed then.
        """
        core = self._core
        core.check_can_run()
        state = settled_state(core, request_id)
        most = max_rollback_tokens(only_sequence(core, state), core.scheduler.block_manager.block_size)
        num_tokens = check_int("num_tokens", num_tokens, 0, most)
        if num_tokens:
            core.scheduler.edit_request(Rollback(request_id, num_tokens))
            state.roll_back()
            core.changed[state] = None

    def verify(self, request_id: str, draft: Iterable[int]) -> Verification:
        """Verifies draft tokens in one step, and accepts the leading ones that the request draws itself.

        The output of the request is the same as without drafts. No other request advances in this step.

        Args:
            request_id: A request with one sequence and no penalties.
            draft: Token ids. Their number must be less than max_num_seqs and max_num_batched_tokens, and must
                fit into max_model_len.

        Raises:
            ValueError: If the draft can't be verified. Nothing has changed then.
        """
        core = self._core
        core.check_can_run()
        draft = list(draft)
        state = settled_state(core, request_id)
        core.check_not_recurrent("verify()", "recurrent states can't be rolled back after a rejection")
        seq, params, scheduler = decoding_sequence(core, state), state.group.sampling_params, core.scheduler
        vocab_size = core.config.vocab_size
        room = scheduler.max_model_len - len(seq)
        most = min(scheduler.max_num_seqs - 1, scheduler.max_num_batched_tokens - 1, room)
        allowed = (
            f"1 to {most} token ids in [0, {vocab_size - 1}] (limited by max_num_seqs, "
            "max_num_batched_tokens and max_model_len)"
        )
        token_ids = np.asarray(draft)
        ok = token_ids.ndim == 1 and token_ids.dtype.kind in "iu" and 1 <= len(token_ids) <= most
        ok = ok and bool(token_ids.min() >= 0 and token_ids.max() < vocab_size)
        check(ok, "draft", draft, allowed)
        has_penalty = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        allowed = "the id of a request without penalties"
        check(not has_penalty, "request_id", request_id, allowed)
        drafted, num_before = token_ids.tolist(), len(seq.output_token_ids)
        result = core.run_draft(request_id, drafted)
        num_free = scheduler.block_manager.num_free_blocks
        check(result is not None, "draft", draft, f"a draft that fits into the {num_free} free KV blocks")
        assert result is not None, "the step has no result"
        drawn = seq.output_token_ids[num_before:]
        (entries,), (scores,) = result.logprobs, result.prompt_logprobs
        pairs = zip(drawn, drafted, strict=False)
        num_accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drawn), len(drafted)))
        # `scores` are the log-probabilities of all draft tokens. For accepted tokens, the result contains the
        # log-probabilities that the request reports instead.
        own = [entry.logprob for entry in entries[:num_accepted]]
        return Verification(num_accepted, drawn, own + [entry.logprob for entry in scores[num_accepted:]])
