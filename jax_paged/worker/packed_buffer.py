"""The packed buffer: all small inputs of a step in one int32 array, so that one transfer moves them.

The fields lie one after the other. Floats are stored as their bits. Sizes: T token rows, B scheduled
sequences, L logits rows (L = B, or L = T in steps that verify drafts), G cache groups, C block table changes,
S batch slots.

    token rows:          tokens [T] | positions [T] | slot_mapping [G, T]
    sequences:           batch_slots [B] | context_lens [G, B] | query_start_loc [B + 1] | shared_blocks [B]
    block tables:        table_changes [2, C]
    logits rows:         logits_rows [L] | sample_positions [L] | sample_slots [L] | count_slots [L]
                         | sampling [L, NUM_SAMPLING_COLUMNS] | forced_tokens [L, K]
    hooks, processors:   hook_args [B, A] | processor_args [L, P]
    recurrent states:    state_slots [3, B]
    multi-step decoding: max_draws [B] | end_tokens [B, E]
    drafts:              num_drafts [L]
    adapters:            adapter_slots [B]
    prompt embeddings:   has_embeds [T]
    M-RoPE:              mrope_positions [3, T]

The block tables themselves stay on the device, by batch slot (block_tables.py). The batch slot of an unused
row is S, which does not exist.

    tokens            NO_TOKEN if the host does not know the token yet; only the last token of a sequence or
                      drafts that the device makes can be unknown
    slot_mapping,     see AttentionMetadata
    context_lens,
    query_start_loc,
    shared_blocks
    table_changes     flattened indices and new block ids, see block_tables.py
    logits_rows       the token row whose hidden state the logits are computed from
    sample_positions  the position of the token that is drawn from a logits row
    sample_slots      the batch slot of the sequence that receives this token
    count_slots       the batch slot whose token counts the penalties read; S without penalties
    sampling          the columns FLOATS, then INTS
    forced_tokens     tokens that replace the drawn ones in each of the K decode steps, -1 for none; K is 1
                      without multi-step decoding
    hook_args         for each hook, whether it is on, and its arguments (A columns in total)
    processor_args    for each logits processor, whether it is on (2 to initialize its state), and its
                      arguments (P columns in total)
    max_draws         the maximum number of tokens that a sequence draws in multi-step decoding
    end_tokens        E = MAX_END_TOKENS tokens after which a sequence draws no more, padded with -1
    num_drafts        the number n of drafts that precede the token drawn from a logits row; these drafts are
                      the tokens of n consecutive token rows, the last of which is the logits row's token row
    adapter_slots     the slot of a sequence's adapter, 0 for none
    has_embeds        whether an embedding replaces the token of a token row
    state_slots       see AttentionMetadata; empty if no layer has a recurrent state
    mrope_positions   only for models whose image tokens have row and column positions
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

# Options of SamplingParams that are packed unchanged. Each must be a number. SamplingBatch has fields of the
# same names.
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
# Value of MASK_COLUMN for rows with a structured output mask. Such a row first draws without the mask, and
# keeps the token if the mask allows it (SamplingBatch.keeps_draw). Rows with any other mask have 1, rows
# without a mask have 0.
MASK_KEEPS_DRAW = 2


def num_step_changes(bucket: Bucket, num_groups: int) -> int:
    """Returns C, the number of block table changes for which the buffer of a step has room.

    In a decode step, each sequence may append one block per cache group and replace one that has left a
    window. Additional changes are written before the step.
    """
    return 2 * num_groups * bucket.num_seqs


class Field(NamedTuple):
    """Offset and shape of a field in the packed buffer."""

    start: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class BufferOptions:
    """Properties of an engine that determine the fields of its packed buffers.

    Args:
        num_groups: Number of cache groups, G.
        num_hook_columns: Number of columns of hook_args, A.
        num_processor_columns: Number of columns of processor_args, P.
        has_states: Whether layers keep a recurrent state for each sequence.
        has_mrope: Whether image tokens have M-RoPE positions.
    """

    num_groups: int
    num_hook_columns: int = 0
    num_processor_columns: int = 0
    has_states: bool = False
    has_mrope: bool = False


@functools.cache
def layout(bucket: Bucket, options: BufferOptions) -> tuple[dict[str, Field], int]:
    """Returns the fields of a bucket's packed buffer by name, and the length of the buffer."""
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
    """Returns writable views of the fields of a packed buffer on the host."""
    return {
        name: packed[start : start + math.prod(shape)].reshape(shape)
        for name, (start, shape) in fields.items()
    }


def unpack(packed: Array, bucket: Bucket, options: BufferOptions) -> dict[str, Array]:
    """Returns the fields of a packed buffer on the device; `sampling` stays packed."""
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
    """Returns the row of the field `sampling` for a sequence.

    All columns except MASK_COLUMN stay the same while the sequence runs.

    Args:
        params: Sampling parameters of the request.
        seed: Seed of the sequence, 64 bits.
        wants_logprobs: Whether log-probabilities are returned.
        logprob_temperature: Temperature of the log-probabilities, see SamplingBatch.

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
    assert not np.isnan(packed).any(), "a sampling option is None or NaN"
    return np.concatenate([packed.view(np.int32), np.array([ints[name] for name in INTS], np.int32)])


def neutral_sampling() -> np.ndarray:
    """Returns the row of `sampling` for logits rows from which no token is drawn.

    Such a row is greedy and has no penalties, filters or masks.
    """
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
    """Returns the inputs of the sampler.

    Args:
        fields: The unpacked buffer.
        token_counts: int32 [S, V].
        bias_ids: int32 [L, MAX_BIAS_IDS].
        bias_values: float32 [L, MAX_BIAS_IDS].
        token_mask: int32 [L, ceil(V / 32)].
        drafts: int32 [L, K], the drafts that precede each logits row, padded with V; None for none.
    """
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
        keeps_draw=ints["has_token_mask"] == MASK_KEEPS_DRAW,
        token_mask=token_mask,
        bias_ids=bias_ids,
        bias_values=bias_values,
        drafts=drafts,
    )
