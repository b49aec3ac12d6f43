"""One int32 buffer per step, moved to the device in one transfer: its fields, and how the device reads them.

The fields lie one after the other (floats as their bits). T token rows, B scheduled sequences (rows), L
logits rows (B of them, but T in steps with drafts), G cache groups, C changes of block tables:

    of the token rows:   tokens [T] | positions [T] | slot_mapping [G, T]
    of the rows:         batch_slots [B] | context_lens [G, B] | query_start_loc [B + 1] | shared_blocks [B]
    of the block tables: table_changes [2, C]
    of the logits rows:  logits_rows [L] | sample_positions [L] | sample_slots [L] | count_slots [L]
                         | sampling [L, NUM_SAMPLING_COLUMNS] | forced_tokens [L, K]
    of hooks:            hook_args [B, A] | processor_args [L, P]
    of multi-step:       max_draws [B] | end_tokens [B, E]
    of drafts:           num_drafts [L]
    of adapters:         adapter_slots [B]
    of embeddings:       has_embeds [T]
    of states:           state_slots [3, B]
    of M-RoPE:           mrope_positions [3, T]

The block tables stay on the device, by batch slot (block_tables.py). An unused row has a batch slot that does
not exist.

    tokens            NO_TOKEN for a token that the host does not know yet, always the last one of its row
    logits_rows       the token row after which a logits row stands
    sample_positions  the position of the token that is drawn from it
    sample_slots      the batch slot that gets this token
    count_slots       the batch slot whose token counts its penalties read; without penalties, one that does
                      not exist
    sampling          the columns FLOATS, then INTS
    forced_tokens     tokens that replace the drawn ones in each of the K decode steps, -1 for none; K is 1
                      without multi-step decoding
    hook_args         for each hook, whether it is on, and its arguments: A columns in all
    processor_args    the same for each logits processor; 2 in place of 1 if its state begins
    max_draws         the maximum number of tokens that a sequence draws in multi-step decoding
    end_tokens        E = MAX_END_TOKENS tokens after which it draws no more, padded with -1
    num_drafts        the number of drafts that precede a logits row: the token rows up to its own, and their
                      logits rows
    adapter_slots     the slot of a sequence's adapter, 0 for none
    has_embeds        whether a token row has a vector in place of its token
    state_slots       that of AttentionMetadata; empty if no layer has a recurrent state
    mrope_positions   only for models whose image tokens have positions in rows and columns
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_paged.core.scheduler_output import MAX_END_TOKENS
from jax_paged.sampling_params import SamplingParams
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.sampling.sampler import SamplingBatch

# Options of SamplingParams, packed as they are: none may be None. SamplingBatch has the same names.
OPTION_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
FLOATS = (*OPTION_FLOATS, "logprob_temperature")
INTS = ("top_k", "seed_low", "seed_high", "wants_logprobs", "has_token_mask")
NUM_SAMPLING_COLUMNS = len(FLOATS) + len(INTS)
MASK_COLUMN = len(FLOATS) + INTS.index("has_token_mask")
# In that column: of the mask of a form; 1 is another mask.
KEEPS_DRAW = 2


def num_step_changes(bucket: Bucket, num_groups: int) -> int:
    """Returns C, how many changes of block tables a step takes along.

    In a decode step each row may append a block and lose one that has left a window, in each group. More
    changes than these are written ahead of a step.
    """
    return 2 * num_groups * bucket.num_seqs


class Field(NamedTuple):
    """Where a field lies in a bucket's buffer."""

    start: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BufferOptions:
    """Properties of an engine that the fields of its buffers depend on.

    Args:
        num_groups: Cache groups, G.
        num_hook_columns: Columns of hook_args, A.
        num_processor_columns: Columns of processor_args, P.
        has_states: Whether layers keep a recurrent state of each sequence.
        has_mrope: Whether tokens of images have rotary positions of their own.
    """

    num_groups: int
    num_hook_columns: int = 0
    num_processor_columns: int = 0
    has_states: bool = False
    has_mrope: bool = False


@functools.cache
def layout(bucket: Bucket, options: BufferOptions) -> tuple[dict[str, Field], int]:
    """Returns the fields of a bucket's buffer, and the buffer's length."""
    t, b, g = bucket.num_tokens, bucket.num_seqs, options.num_groups
    num_logits = bucket.num_logits
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (t,),
        "positions": (t,),
        "slot_mapping": (g, t),
        "batch_slots": (b,),
        "context_lens": (g, b),
        "query_start_loc": (b + 1,),
        "shared_blocks": (b,),
        "table_changes": (2, num_step_changes(bucket, g)),
        "logits_rows": (num_logits,),
        "sample_positions": (num_logits,),
        "sample_slots": (num_logits,),
        "count_slots": (num_logits,),
        "sampling": (num_logits, NUM_SAMPLING_COLUMNS),
        "forced_tokens": (num_logits, bucket.num_steps),
        "hook_args": (b, options.num_hook_columns),
        "processor_args": (num_logits, options.num_processor_columns),
        "state_slots": (3 * options.has_states, b),
    }
    if bucket.num_steps > 1:
        shapes |= {"max_draws": (b,), "end_tokens": (b, MAX_END_TOKENS)}
    if bucket.num_drafts:
        shapes["num_drafts"] = (num_logits,)
    if bucket.has_adapters:
        shapes["adapter_slots"] = (b,)
    if bucket.has_embeds:
        shapes["has_embeds"] = (t,)
    if options.has_mrope:
        shapes["mrope_positions"] = (3, t)
    fields, start = {}, 0
    for name, shape in shapes.items():
        fields[name] = Field(start, shape)
        start += math.prod(shape)
    return fields, start


def views(packed: np.ndarray, fields: dict[str, Field]) -> dict[str, np.ndarray]:
    """Returns the fields of a buffer on the host, to be written to."""
    return {
        name: packed[start : start + math.prod(shape)].reshape(shape)
        for name, (start, shape) in fields.items()
    }


def unpack(packed: Array, bucket: Bucket, options: BufferOptions) -> dict[str, Array]:
    """Returns the fields of a bucket's buffer, on the device; `sampling` stays packed."""
    fields, _ = layout(bucket, options)
    return {
        name: lax.slice_in_dim(packed, start, start + math.prod(shape)).reshape(shape)
        for name, (start, shape) in fields.items()
    }


def pack_sampling(
    params: SamplingParams,
    *,
    seed: int,
    wants_logprobs: bool,
    logprob_temperature: float,
) -> np.ndarray:
    """Returns a row of the field `sampling`; all but MASK_COLUMN stays while a sequence lives.

    Returns:
        int32 [NUM_SAMPLING_COLUMNS].
    """
    floats = {name: getattr(params, name) for name in OPTION_FLOATS}
    floats["logprob_temperature"] = logprob_temperature
    seed_low, seed_high = np.array([seed], np.uint64).view(np.int32)
    ints = {
        "top_k": max(params.top_k, 0),
        "seed_low": seed_low,
        "seed_high": seed_high,
        "wants_logprobs": wants_logprobs,
        "has_token_mask": False,
    }
    packed = np.array([floats[name] for name in FLOATS], np.float32)
    assert not np.isnan(packed).any(), "an option that may be None is packed as a number without effect"
    return np.concatenate([packed.view(np.int32), np.array([ints[name] for name in INTS], np.int32)])


def neutral_sampling() -> np.ndarray:
    """Returns the row of `sampling` of logits that nothing is drawn from: greedy, and without effects."""
    return pack_sampling(
        SamplingParams(temperature=0.0),
        seed=0,
        wants_logprobs=False,
        logprob_temperature=1.0,
    )


def sampling_batch(
    fields: dict[str, Array],
    token_counts: Array,
    bias_ids: Array,
    bias_values: Array,
    token_mask: Array,
    drafts: Array | None = None,
) -> SamplingBatch:
    """Returns what the sampler reads: part of an unpacked buffer, and the arrays beside it."""
    columns = fields["sampling"].T
    floats = lax.bitcast_convert_type(columns[: len(FLOATS)], jnp.float32)
    ints = dict(zip(INTS, columns[len(FLOATS) :], strict=True))
    seed = jnp.stack([ints["seed_low"], ints["seed_high"]], axis=1)
    return SamplingBatch(
        **dict(zip(FLOATS, floats, strict=True)),
        top_k=ints["top_k"],
        seed=lax.bitcast_convert_type(seed, jnp.uint32),
        position=fields["sample_positions"],
        wants_logprobs=ints["wants_logprobs"] != 0,
        count_slots=fields["count_slots"],
        token_counts=token_counts,
        has_token_mask=ints["has_token_mask"] != 0,
        keeps_draw=ints["has_token_mask"] == KEEPS_DRAW,
        token_mask=token_mask,
        bias_ids=bias_ids,
        bias_values=bias_values,
        drafts=drafts,
    )
