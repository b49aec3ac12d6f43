"""What the scheduler hands to the executor: one step, as values. It can be pickled, sent and replayed.

The executor keeps a batch slot for every sequence that holds blocks on the device. A step names sequences by
their ids and contains only changes since the previous step: new sequences (NewSequence), blocks appended to
block tables (ScheduledSequence), and sequences that lose their batch slot (released_seq_ids).
"""

import dataclasses
from typing import Any, NamedTuple

from jax_paged.core.request import Request

# (from, to) block ids.
Copies = list[tuple[int, int]]
# One list of block ids per cache group, in order of position.
BlockTables = list[list[int]]
# End tokens of a sequence that a burst looks for; one with more of them takes part in none.
MAX_END_TOKENS = 8


class NewSequence(NamedTuple):
    """A sequence that takes a batch slot: new, forked, or resumed after it had lost its blocks.

    Args:
        seq_id: Unique in the life of a scheduler; a sequence that takes another batch slot gets a new id.
        request: Its request. Read-only.
        output_token_ids: What it has generated so far.
        seed: Of its random choices; with a position it is the key of one draw.
        end_token_ids: Tokens that end it: the model's, unless ignored, and its stop_token_ids. Held back
            until min_tokens.
        block_tables: All of its blocks, at the time that this step computes. Read-only.
        num_dropped_tokens: By how much the slots of its tokens stand before their positions in the tables:
            tokens whose blocks a user has dropped.
        former_id: Its id in the batch slot that it had before; 0 if it had none.
        adapter_slot: The slot of its adapter; 0 if it has none.
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


class ScheduledSequence(NamedTuple):
    """A row: what one sequence computes in a step (a tuple: a step makes hundreds, and they are cheap).

    Args:
        seq_id: The sequence; it has a batch slot, or takes one in this step.
        start: Position of the first token that the step computes.
        token_ids: The tokens that the step computes, at positions start and on. The last one is NO_TOKEN if
            a step in flight draws it: it is the token that was drawn last for the sequence.
        new_blocks: Per cache group, the blocks appended to its table since its last row (none in the step
            of its NewSequence, which holds them all). Read-only.
        replaced_blocks: (cache group, index, block id) of entries of its table that have changed since its
            last row: copied before a write, or fallen out of a window (the null block).
        state_slot: Where its states lie, if layers keep any; else 0.
        checkpoint: How many of the tokens come before a checkpoint, a copy of the states, and the slot that
            gets it; zeros for none.
    """

    seq_id: int
    start: int
    token_ids: list[int]
    new_blocks: BlockTables
    replaced_blocks: list[tuple[int, int, int]]
    state_slot: int = 0
    checkpoint: tuple[int, int] = (0, 0)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.token_ids)


class Sample(NamedTuple):
    """Tokens to draw in a step, for one sequence.

    Args:
        row: Index in SchedulerOutput.scheduled of the row whose logits they are drawn from.
        seq_id: The sequence that gets the tokens: the row's own, or one that was just forked from it.
        num_logits: How many of the row's last tokens are drawn after, each from its own row of logits.
    """

    row: int
    seq_id: int
    num_logits: int = 1


class TokenMasks(NamedTuple):
    """What may be drawn from some rows of logits.

    Args:
        rows: Which ones, of those that something is drawn from, in the order of SchedulerOutput.samples.
        words: For each, as many int32 words, little-endian: bit i % 32 of word i // 32 is 1 if token i may be
            drawn. There may be more words than the vocabulary has tokens for.
    """

    rows: tuple[int, ...]
    words: bytes


class EncoderInput(NamedTuple):
    """A text for the encoder, and where its output goes.

    Args:
        request_id: Its request.
        token_ids: The text. Read-only.
        block_tables: Of the request's sequence; only those of cross attention are written to.
    """

    request_id: str
    token_ids: list[int]
    block_tables: BlockTables


class AdapterLoad(NamedTuple):
    """An adapter that takes a slot on the device; what was there is not used any more.

    Args:
        slot: From 1.
        adapter: SequenceGroup.adapter of its requests.
        weights: What the executor puts there (an Adapter of models/features/lora/adapter_files.py); the
            engine adds it when the step is scheduled.
    """

    slot: int
    adapter: str
    weights: Any = None


class StateMoves(NamedTuple):
    """Slots of recurrent states that are moved, in this order, before the rows of a step are computed.

    Args:
        swap_out: (device slot, host slot).
        swap_in: (host slot, device slot).
        copies: (from, to) device slots.
    """

    swap_out: Copies
    swap_in: Copies
    copies: Copies


class InspectionInput(NamedTuple):
    """Tokens of a sequence to compute again, beside its steps.

    Args:
        token_ids: The last tokens of the sequence.
        start: Position of the first of them.
        num_computed_tokens: Tokens whose keys and values lie in the pool, those of dropped blocks included.
        num_dropped_tokens: As NewSequence has it.
        num_encoder_tokens: Tokens that its groups of cross attention hold.
        block_tables: Its blocks.
        layers: Whose attention to report.
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
    """One step.

    The executor releases batch slots, loads adapters and gives batch slots to the new sequences. Then it
    swaps out, swaps in, copies blocks and runs encoders, in this order. Then it computes the rows and draws
    the samples.

    Args:
        step_id: Counts the steps of a scheduler, from 0: with step 0 all batch slots are empty, as
            another scheduler may have been there before.
        scheduled: Rows of one token first, then the longer ones; each part in the order of requests.
        samples: What is drawn, in the order of the rows.
        new_sequences: Sequences that take a batch slot.
        released_seq_ids: Sequences that have lost their batch slot since the step before: they ended, or were
            preempted. One that takes another batch slot at once, as after a rollback, is in new_sequences
            too, under its new id.
        blocks_to_swap_out: (device block, host block) ids.
        blocks_to_swap_in: (host block, device block) ids.
        blocks_to_copy: (from, to) device block ids; no block is both.
        to_encode: Texts whose encoder runs before the rows are computed.
        preempted: Ids of the requests that lost their blocks on the device: for observers, as the executor
            goes by released_seq_ids.
        ended: Ids of the requests that ended because they can never run (on).
        num_batched_tokens: Tokens that the rows compute together.
        num_logits_rows: Rows of logits: those of the samples, and one for each row without any: of these
            too the logits are looked at, so that NaN is noticed before a block that holds it is cached.
        burst: Of a burst, how many tokens each sample gets at most: each token is computed before the next
            is drawn, until one ends the sequence. Row i is then that of sample i, has one token, and its
            table has blocks for all of them. Empty for all other steps.
        ended_seq_ids: Sequences that have ended since the step before, by the id that they had last.
        token_masks: Of rows whose request has a form (structured_outputs); put in when the step is
            dispatched, as it takes the tokens before. None if there are none.
        scores_drafts: Whether log-probabilities of the drafts themselves are wanted.
        adapter_loads: Adapters that take a slot, before the rows are computed.
        state_moves: Slots of recurrent states to move.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    samples: tuple[Sample, ...]
    new_sequences: tuple[NewSequence, ...]
    released_seq_ids: tuple[int, ...]
    blocks_to_swap_out: tuple[tuple[int, int], ...]
    blocks_to_swap_in: tuple[tuple[int, int], ...]
    blocks_to_copy: tuple[tuple[int, int], ...]
    to_encode: tuple[EncoderInput, ...]
    preempted: tuple[str, ...]
    ended: tuple[str, ...]
    num_batched_tokens: int
    num_logits_rows: int
    burst: tuple[int, ...] = ()
    ended_seq_ids: tuple[int, ...] = ()
    token_masks: TokenMasks | None = None
    scores_drafts: bool = False
    adapter_loads: tuple[AdapterLoad, ...] = ()
    state_moves: StateMoves = dataclasses.field(default_factory=lambda: StateMoves([], [], []))

    @property
    def num_drafts(self) -> int:
        """Most drafts of a row, in a step that verifies what the engine has drafted; 0 in others."""
        return 0 if self.scores_drafts else max([sample.num_logits - 1 for sample in self.samples], default=0)
