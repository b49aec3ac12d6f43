"""SchedulerOutput: one step as the scheduler passes it to the executor. It can be pickled, sent and replayed.

The executor keeps a batch slot for every sequence that holds blocks on the device. A step refers to sequences
by id and contains only the changes since the previous step: new sequences (NewSequence), blocks appended to
block tables (ScheduledSequence), and sequences that lose their batch slot (released_seq_ids).
"""

import dataclasses
from typing import Any, NamedTuple

from jax_paged.core.request import Request

# (source, destination) block ids.
Copies = list[tuple[int, int]]
# One list of block ids per cache group, in order of position.
BlockTables = list[list[int]]
# Maximum number of end tokens per sequence that the device can check in multi-step decoding. Sequences with
# more end tokens are excluded from it.
MAX_END_TOKENS = 8


class NewSequence(NamedTuple):
    """A sequence that takes a batch slot because it is new, forked, or resumed after a preemption.

    Args:
        seq_id: Unique for the lifetime of a scheduler. A sequence gets a new id with each batch slot.
        request: The request of the sequence. Read-only.
        output_token_ids: Output tokens so far.
        seed: Random seed. Each draw is keyed by the seed and the position of the token.
        end_token_ids: Tokens that end the sequence: the end tokens of the model, unless ignored, and the
            request's stop_token_ids. They are not sampled before min_tokens.
        block_tables: All blocks of the sequence, including the blocks for this step. Read-only.
        num_dropped_tokens: Number of tokens whose blocks the user has dropped. The token at position p after
            them has the index p - num_dropped_tokens among the tokens of the block table.
        former_id: Id of the sequence in its previous batch slot; 0 if there was none.
        adapter_slot: Device slot of its LoRA adapter; 0 without an adapter.
    """

    seq_id: int
    request: Request
    output_token_ids: list[int]
    seed: int
    end_token_ids: frozenset[int]
    block_tables: BlockTables
    num_dropped_tokens: int = 0
    former_id: int = 0
    adapter_slot: int = 0


class StateCheckpoint(NamedTuple):
    """A checkpoint of recurrent states to make while a sequence is computed.

    A checkpoint is a copy of the states after a whole number of blocks.

    Args:
        num_tokens: Number of tokens that the step computes before the checkpoint.
        slot: State slot that receives the checkpoint; 0 if none is made.
    """

    num_tokens: int = 0
    slot: int = 0


NO_CHECKPOINT = StateCheckpoint()


class ScheduledSequence(NamedTuple):
    """The tokens that one sequence computes in a step.

    This is a named tuple because tuples are cheap to create, and a step contains hundreds.

    Args:
        seq_id: The sequence. It has a batch slot or takes one in this step.
        start: Position of the first token to compute.
        token_ids: The tokens to compute, at positions start, start + 1, ... The last one is NO_TOKEN if a
            step in flight samples it. The device then inserts the token that was last sampled for the
            sequence. Draft tokens are NO_TOKEN if a draft model on the device proposes them.
        new_blocks: Per cache group, the blocks appended to the block table since the sequence was last
            scheduled. Empty in the step of its NewSequence, which contains all blocks. Read-only.
        replaced_blocks: (cache group, index, block id) of block table entries that have changed since the
            sequence was last scheduled: the block was copied before a write, or it fell out of a window and
            was replaced by the null block.
        state_slot: Slot of its recurrent states; 0 if no layer has any.
        checkpoint: Checkpoint of the recurrent states to make; NO_CHECKPOINT for none.
    """

    seq_id: int
    start: int
    token_ids: list[int]
    new_blocks: BlockTables
    replaced_blocks: list[tuple[int, int, int]]
    state_slot: int = 0
    checkpoint: StateCheckpoint = NO_CHECKPOINT

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute."""
        return len(self.token_ids)


class Sample(NamedTuple):
    """The tokens to sample for one sequence in a step.

    Args:
        scheduled_index: Index into SchedulerOutput.scheduled of the sequence whose logits are used.
        seq_id: The sequence that receives the tokens: the scheduled sequence itself, or a new fork of it.
        num_logits: Number of logits rows. One token is sampled after each of the last num_logits tokens of
            the scheduled sequence.
    """

    scheduled_index: int
    seq_id: int
    num_logits: int = 1


class TokenMasks(NamedTuple):
    """The tokens that grammars allow, for some logits rows of a step.

    Args:
        rows: Indices of the masked rows among all logits rows that are sampled from, in the order of
            SchedulerOutput.samples.
        words: One bit mask per row, all of equal length, as little-endian int32 words. Token i is allowed if
            bit i % 32 of word i // 32 is 1. A mask may have more bits than the vocabulary has tokens.
    """

    rows: tuple[int, ...]
    words: bytes


class EncoderInput(NamedTuple):
    """Input tokens of the encoder, and the blocks that its output is written to.

    Args:
        request_id: The request.
        token_ids: The input tokens. Read-only.
        block_tables: Block tables of the request's sequence. Only the tables of cross-attention groups are
            used.
    """

    request_id: str
    token_ids: list[int]
    block_tables: BlockTables


class AdapterLoad(NamedTuple):
    """A LoRA adapter to load into a device slot. The previous adapter in the slot is no longer used.

    Args:
        slot: The slot, from 1.
        adapter: Content hash of the adapter (SequenceGroup.adapter).
        weights: The weights (an Adapter of models/features/lora/adapter_files.py). The engine adds them after
            the step is scheduled.
    """

    slot: int
    adapter: str
    weights: Any = None


class StateMoves(NamedTuple):
    """Copies between slots of recurrent states, made in this order before the step computes any tokens.

    Args:
        swap_out: (device slot, host slot) pairs.
        swap_in: (host slot, device slot) pairs.
        copies: (source, destination) pairs of device slots.
    """

    swap_out: Copies
    swap_in: Copies
    copies: Copies


class InspectionInput(NamedTuple):
    """Input of Executor.inspect: tokens of a sequence to recompute outside of the steps.

    Args:
        token_ids: The last tokens of the sequence.
        start: Position of the first of these tokens.
        num_computed_tokens: Number of tokens that have been computed, including tokens in dropped blocks.
        num_dropped_tokens: See NewSequence.
        num_encoder_tokens: Number of encoder tokens in the blocks of cross-attention groups.
        block_tables: Block tables of the sequence.
        layers: Indices of the layers whose attention probabilities are returned.
    """

    token_ids: list[int]
    start: int
    num_computed_tokens: int
    num_dropped_tokens: int
    num_encoder_tokens: int
    block_tables: BlockTables
    layers: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The work of one step.

    The executor first releases batch slots, loads adapters and assigns batch slots to the new sequences. Then
    it swaps out, swaps in, copies blocks and runs encoders, in this order. Finally it computes the scheduled
    sequences and samples tokens.

    Args:
        step_id: Number of the step, from 0. The executor empties all batch slots in step 0, because it may
            have served another scheduler before.
        scheduled: Sequences that compute one token, then sequences that compute several tokens. Both parts
            are in the order of the requests.
        samples: The tokens to sample, in the order of the scheduled sequences.
        new_sequences: Sequences that take a batch slot.
        released_seq_ids: Sequences that have lost their batch slot since the previous step, because they
            ended or were preempted. A sequence that takes another batch slot at once, for example after a
            rollback, is also in new_sequences with its new id.
        blocks_to_swap_out: (device block, host block) pairs.
        blocks_to_swap_in: (host block, device block) pairs.
        blocks_to_copy: (source, destination) pairs of device blocks. No block is both a source and a
            destination.
        encoder_inputs: Encoder inputs to run before the sequences are computed.
        preempted: Ids of the requests that were preempted. For observers only; the executor uses
            released_seq_ids.
        ended: Ids of the requests that ended because they could never run or continue.
        num_batched_tokens: Total number of tokens of the scheduled sequences.
        num_logits_rows: Number of logits rows: the rows of all samples, and one row for each sequence without
            a sample. Logits of the latter are only checked, so that NaN is noticed before the blocks are
            cached.
        num_multi_step_tokens: For multi-step decoding, the maximum number of tokens of each sample; empty for
            all other steps. Each token is computed before the next one is sampled, until one ends the
            sequence. Sample i belongs to scheduled sequence i, which has one token and blocks for all of
            these tokens.
        ended_seq_ids: Sequences that have ended since the previous step, by their last id.
        token_masks: Masks for requests with structured output; None without such requests. They are added
            when the step is dispatched, because they depend on the tokens of earlier steps.
        scores_drafts: Whether log-probabilities of the draft tokens themselves are requested.
        adapter_loads: LoRA adapters to load before the sequences are computed.
        state_moves: Copies between slots of recurrent states.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    samples: tuple[Sample, ...]
    new_sequences: tuple[NewSequence, ...]
    released_seq_ids: tuple[int, ...]
    blocks_to_swap_out: tuple[tuple[int, int], ...]
    blocks_to_swap_in: tuple[tuple[int, int], ...]
    blocks_to_copy: tuple[tuple[int, int], ...]
    encoder_inputs: tuple[EncoderInput, ...]
    preempted: tuple[str, ...]
    ended: tuple[str, ...]
    num_batched_tokens: int
    num_logits_rows: int
    num_multi_step_tokens: tuple[int, ...] = ()
    ended_seq_ids: tuple[int, ...] = ()
    token_masks: TokenMasks | None = None
    scores_drafts: bool = False
    adapter_loads: tuple[AdapterLoad, ...] = ()
    state_moves: StateMoves = dataclasses.field(default_factory=lambda: StateMoves([], [], []))

    @property
    def max_num_drafts(self) -> int:
        """The largest number of draft tokens of a sequence in speculative decoding; 0 in other steps.

        Draft tokens of LLMEngine.verify (`scores_drafts`) are not counted.
        """
        return 0 if self.scores_drafts else max([sample.num_logits - 1 for sample in self.samples], default=0)
