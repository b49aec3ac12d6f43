"""Stop conditions: when and why sequences end."""

from jax_paged.core.request import Sequence, SequenceGroup, SequenceStatus

# Stop reasons of requests that ended because of an error.
POOL_TOO_SMALL = "the KV cache is too small for the request; increase kv_cache_memory_bytes"
HOST_TOO_SMALL = "host memory is too small to swap out a request with dropped blocks; increase swap_space"
NON_FINITE = "non-finite logits"
NO_TOKEN_ALLOWED = "no token is allowed by the sampling parameters"

# Final status and stop reason of a sequence.
Ending = tuple[SequenceStatus, int | str | None]


class StopConditions:
    """End conditions of sequences, checked after each token.

    Args:
        eos_token_ids: End tokens of the model.
        max_model_len: Maximum number of tokens in a prompt and its output together.
    """

    def __init__(self, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len

    def eos_of(self, group: SequenceGroup) -> frozenset[int]:
        """Returns the end tokens of the model, or none if the request ignores them."""
        return frozenset() if group.sampling_params.ignore_eos else self.eos_token_ids

    def end_token_ids(self, group: SequenceGroup) -> frozenset[int]:
        """Returns all tokens that end the sequences of a request. They are not sampled before min_tokens."""
        return self.eos_of(group) | frozenset(group.sampling_params.stop_token_ids or ())

    def after_token(self, group: SequenceGroup, seq: Sequence) -> Ending | None:
        """Returns the status and stop reason if the last token of a sequence ends it, otherwise None.

        The conditions are checked in this order: an end token of the model, a stop token of the request,
        max_tokens or max_model_len. Tokens do not end a sequence before min_tokens.
        """
        params, token_id = group.sampling_params, seq.output_token_ids[-1]
        num_output_tokens = len(seq.output_token_ids)
        if num_output_tokens >= params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return SequenceStatus.FINISHED_STOPPED, None
            if params.stop_token_ids and token_id in params.stop_token_ids:
                return SequenceStatus.FINISHED_STOPPED, token_id
        if num_output_tokens == params.max_tokens or len(seq) >= self.max_model_len:
            return SequenceStatus.FINISHED_LENGTH_CAPPED, None
        return None

    def num_left(self, group: SequenceGroup, seq: Sequence) -> int:
        """Returns how many more tokens a sequence may receive after its pending tokens."""
        max_tokens, num_output_tokens = group.sampling_params.max_tokens, seq.num_output_tokens
        num_left = self.max_model_len - len(seq.prompt_token_ids) - num_output_tokens
        return num_left if max_tokens is None else min(num_left, max_tokens - num_output_tokens)

    def can_run_ahead(self, group: SequenceGroup, seq: Sequence) -> bool:
        """Returns whether a sequence may be scheduled while its last token is pending.

        False if the request needs its tokens on the host, or if the pending tokens certainly end the
        sequence.
        """
        return not group.needs_tokens_on_host and self.num_left(group, seq) > 0

    @staticmethod
    def unschedulable_status(group: SequenceGroup) -> SequenceStatus:
        """Returns the final status of a request that cannot run, or continue, even in an empty KV cache."""
        has_output = any(seq.output_token_ids for seq in group.sequences)
        return SequenceStatus.FINISHED_LENGTH_CAPPED if has_output else SequenceStatus.FINISHED_IGNORED
