"""SchedulerOutput -> padded arrays: one int32 buffer a step, moved to the device in one transfer.

A bucket is a shape that steps are padded to. Its buffer holds these fields one after the other (floats
as their bits); T token rows, B sequences, G cache groups, M columns of block tables. The last three fields
are those of the samples, of which one sequence may have several:

    tokens [T] | positions [T] | slot_mapping [G, T] | block_tables [G, B, M] | context_lens [G, B]
    | query_start_loc [B + 1] | logits_rows [B] | total_len [B] | sampling [B, 12]
"""

import dataclasses
import math
import weakref
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from jax_paged.core.block_manager import BlockTables, CacheGroup
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import Sequence, SequenceGroup
from jax_paged.models.attention import AttentionMetadata, Backend
from jax_paged.pallas_kernels import ops
from jax_paged.sampling_params import MAX_BIAS_IDS, SamplingParams
from jax_paged.worker.sampler import SamplingBatch

# Columns of the field `sampling`; the order of _sampling_row.
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprob_temperature",
)
_INTS = ("top_k", "seed_low", "seed_high", "prompt_len", "wants_logprobs")


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """A shape that a step is padded to.

    Args:
        is_decode: Whether every sequence has just one token row, and sequence b the row b.
        num_tokens: Token rows.
        num_seqs: Sequences.
    """

    is_decode: bool
    num_tokens: int
    num_seqs: int

    def __str__(self) -> str:
        return f"decode {self.num_seqs}" if self.is_decode else f"mixed {self.num_tokens}x{self.num_seqs}"


def plan_buckets(max_num_seqs: int, max_num_batched_tokens: int) -> list[Bucket]:
    """Returns the few shapes that serve every step, largest of each kind last.

    Decode steps double from 1 to max_num_seqs. Mixed steps (prefill chunks and decodes together) go in
    steps of four to a quarter of the token budget, then double: small prompts stay quick, large steps are
    nearly full anyway.
    """
    most = min(max_num_seqs, max_num_batched_tokens)
    decode = [*(2**i for i in range(max_num_seqs.bit_length()) if 2**i < most), most]
    mixed = {max_num_batched_tokens, max_num_batched_tokens // 2, max_num_batched_tokens // 4}
    size = max_num_batched_tokens // 16
    while size >= 16:
        mixed.add(size)
        size //= 4
    buckets = [Bucket(True, n, n) for n in decode]
    buckets += [Bucket(False, t, min(t, max_num_seqs)) for t in sorted(mixed) if t > 1]
    return buckets


class Field(NamedTuple):
    """Where a field lies in a bucket's buffer."""

    start: int
    shape: tuple[int, ...]


def layout(bucket: Bucket, max_blocks_per_seq: int, num_groups: int) -> tuple[dict[str, Field], int]:
    """Returns the fields of a bucket's buffer, and the buffer's length."""
    t, b, g = bucket.num_tokens, bucket.num_seqs, num_groups
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (t,),
        "positions": (t,),
        "slot_mapping": (g, t),
        "block_tables": (g, b, max_blocks_per_seq),
        "context_lens": (g, b),
        "query_start_loc": (b + 1,),
        "logits_rows": (b,),
        "total_len": (b,),
        "sampling": (b, len(_FLOATS) + len(_INTS)),
    }
    fields, start = {}, 0
    for name, shape in shapes.items():
        fields[name] = Field(start, shape)
        start += math.prod(shape)
    return fields, start


class StepInputs(NamedTuple):
    """What the jitted step reads besides weights and pool; history and biases are None if no row needs them.

    Args:
        packed: int32, the bucket's buffer.
        history: int32 [B, max_model_len], see SamplingBatch.
        bias_ids: int32 [B, MAX_BIAS_IDS].
        bias_values: float32 [B, MAX_BIAS_IDS].
    """

    packed: np.ndarray
    history: np.ndarray | None
    bias_ids: np.ndarray | None
    bias_values: np.ndarray | None


# Row that it is drawn from, request, sequence that gets the token; None where the row doesn't sample.
Sample = tuple[int, SequenceGroup, Sequence | None]


class BatchBuilder:
    """Builds the inputs of steps.

    Args:
        block_size: Tokens a block.
        num_blocks: Blocks of the pool; slots from num_blocks * block_size on are not written.
        groups: Cache groups, each with block tables of its own.
        max_model_len: Most tokens of a sequence.
        vocab_size: Ids from here on pad history and biases.
        eos_token_ids: Tokens that min_tokens holds back.
        checks_inputs: Whether to assert all that the kernels take for granted.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        groups: tuple[CacheGroup, ...],
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        checks_inputs: bool = False,
    ) -> None:
        self._checks_inputs = checks_inputs
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.groups = groups
        self.max_model_len = max_model_len
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        # A sequence's sampling fields never change: they are packed once.
        self._sampling_rows: weakref.WeakKeyDictionary[Sequence, np.ndarray] = weakref.WeakKeyDictionary()
        self._neutral = _pack_sampling(SamplingParams(temperature=0.0), 0, 0, 1.0)

    def build(self, output: SchedulerOutput, bucket: Bucket) -> StepInputs:
        """Pads a step to a bucket.

        Args:
            output: At most bucket.num_seqs sequences, as many samples, and bucket.num_tokens tokens; one
                token each if bucket.is_decode. Is not modified.
            bucket: The shape.
        """
        rows = output.scheduled
        samples = [(i, row.group, seq) for i, row in enumerate(rows) for seq in row.sampling or (None,)]
        assert max(len(rows), len(samples)) <= bucket.num_seqs, (len(rows), len(samples), bucket)
        assert output.num_batched_tokens <= bucket.num_tokens, (output.num_batched_tokens, bucket)
        fields, size = layout(bucket, self.max_blocks_per_seq, len(self.groups))
        packed = np.zeros(size, np.int32)

        def view(name: str) -> np.ndarray:
            start, shape = fields[name]
            return packed[start : start + math.prod(shape)].reshape(shape)

        num_tokens = np.fromiter((row.num_tokens for row in rows), np.int32, len(rows))
        start = np.fromiter((row.start for row in rows), np.int32, len(rows))
        end_loc = np.cumsum(num_tokens, dtype=np.int32)
        total = int(end_loc[-1])
        if bucket.is_decode:
            assert total == len(rows), "a decode step has one token a sequence"
            seq_of_row, positions = np.arange(total), start
        else:
            seq_of_row = np.repeat(np.arange(len(rows)), num_tokens)
            positions = np.arange(total, dtype=np.int32) + (start - end_loc + num_tokens)[seq_of_row]
        view("tokens")[:total] = [
            token for row in rows for token in row.seq.tokens(row.start, row.start + row.num_tokens)
        ]
        view("positions")[:total] = positions
        view("query_start_loc")[1 : len(rows) + 1] = end_loc
        view("query_start_loc")[len(rows) + 1 :] = total
        out_of_range = self.num_blocks * self.block_size
        for g, group in enumerate(self.groups):
            tables, slots, lens = (view(x)[g] for x in ("block_tables", "slot_mapping", "context_lens"))
            for i, row in enumerate(rows):
                table = row.block_tables[g]
                tables[i, : len(table)] = table
            assert tables.min() >= 0, "a block id is negative"
            assert tables.max() < self.num_blocks, "a block id is out of the pool"
            slots[:] = out_of_range
            if group.is_cross:
                lens[: len(rows)] = [len(row.group.encoder_token_ids) for row in rows]
            else:
                blocks = tables[seq_of_row, positions // self.block_size]
                assert blocks.min() > 0, "a token would be written to the null block"
                slots[:total] = blocks * self.block_size + positions % self.block_size
                lens[: len(rows)] = start + num_tokens

            if self._checks_inputs:
                copies = np.array(output.blocks_to_copy, np.int32).reshape(-1, 2)
                shape = self.num_blocks, self.block_size
                # Cross attention has no causal order: a query may stand anywhere.
                starts = view("query_start_loc") * (not group.is_cross)
                ops.check_inputs(*shape, tables, lens, starts, slots, *copies.T)

        sampling, row_of_sample = view("sampling"), np.array([i for i, _, _ in samples], np.int64)
        for j, (_, group, seq) in enumerate(samples):
            sampling[j] = self._neutral if seq is None else self._sampling_row(group, seq)
        sampling[len(samples) :] = self._neutral
        view("logits_rows")[: len(samples)] = end_loc[row_of_sample] - 1
        view("total_len")[: len(samples)] = (start + num_tokens)[row_of_sample]
        return StepInputs(packed, self._history(samples, bucket), *self._bias(samples, bucket))

    def build_encoder(
        self, token_ids: list[int], block_tables: BlockTables, size: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pads a text for the encoder: int32 tokens [N], length [] and slots [G, N].

        Args:
            token_ids: The text.
            block_tables: Of its request; only those of cross attention are written.
            size: N.
        """
        tokens = np.zeros(size, np.int32)
        tokens[: len(token_ids)] = token_ids
        slots = np.full((len(self.groups), size), self.num_blocks * self.block_size, np.int32)
        position = np.arange(len(token_ids))
        for g, group in enumerate(self.groups):
            if group.is_cross:
                blocks = np.array(block_tables[g], np.int32)[position // self.block_size]
                assert blocks.min() > 0, "a token would be written to the null block"
                slots[g, : len(token_ids)] = blocks * self.block_size + position % self.block_size
        return tokens, np.array(len(token_ids), np.int32), slots

    def _sampling_row(self, group: SequenceGroup, seq: Sequence) -> np.ndarray:
        row = self._sampling_rows.get(seq)
        if row is None:
            temperature = (group.beam_params.temperature if group.beam_params else 0) or 1.0
            row = _pack_sampling(group.sampling_params, seq.seed, len(seq.prompt_token_ids), temperature)
            self._sampling_rows[seq] = row
        return row

    def _history(self, samples: list[Sample], bucket: Bucket) -> np.ndarray | None:
        if not any(seq is not None and _has_penalty(group.sampling_params) for _, group, seq in samples):
            return None
        history = np.full((bucket.num_seqs, self.max_model_len), self.vocab_size, np.int32)
        for j, (_, group, seq) in enumerate(samples):
            if seq is not None and _has_penalty(group.sampling_params):
                history[j, : len(seq)] = seq.tokens(0, len(seq))
        return history

    def _bias(self, samples: list[Sample], bucket: Bucket) -> tuple[np.ndarray | None, np.ndarray | None]:
        biases = [
            {} if seq is None else self._bias_of(group.sampling_params, seq) for _, group, seq in samples
        ]
        if not any(biases):
            return None, None
        ids = np.full((bucket.num_seqs, MAX_BIAS_IDS), self.vocab_size, np.int32)
        values = np.zeros((bucket.num_seqs, MAX_BIAS_IDS), np.float32)
        for j, bias in enumerate(biases):
            ids[j, : len(bias)] = list(bias)
            values[j, : len(bias)] = list(bias.values())
        return ids, values

    def _bias_of(self, params: SamplingParams, seq: Sequence) -> dict[int, float]:
        bias = dict(params.logit_bias or {})
        if len(seq.output_token_ids) < params.min_tokens:
            held_back = set(params.stop_token_ids or ())
            if not params.ignore_eos:
                held_back |= self.eos_token_ids
            bias.update(dict.fromkeys(held_back, -math.inf))
        return bias


def unpack(packed: Array, bucket: Bucket, max_blocks_per_seq: int, num_groups: int) -> dict[str, Array]:
    """Returns the fields of a bucket's buffer, on the device; `sampling` stays packed."""
    fields, _ = layout(bucket, max_blocks_per_seq, num_groups)
    return {
        name: lax.slice_in_dim(packed, start, start + math.prod(shape)).reshape(shape)
        for name, (start, shape) in fields.items()
    }


def attention_metadata(
    fields: dict[str, Array], bucket: Bucket, backend: Backend, places: tuple[tuple[int, int], ...]
) -> AttentionMetadata:
    """Returns the part of an unpacked buffer that the model reads."""
    names = ("positions", "slot_mapping", "block_tables", "context_lens", "query_start_loc")
    fields = {name: fields[name] for name in names}
    return AttentionMetadata(**fields, is_decode=bucket.is_decode, backend=backend, places=places)


def sampling_batch(
    fields: dict[str, Array], history: Array, bias_ids: Array, bias_values: Array
) -> SamplingBatch:
    """Returns the part of an unpacked buffer that the sampler reads."""
    columns = fields["sampling"].T
    floats = lax.bitcast_convert_type(columns[: len(_FLOATS)], jnp.float32)
    ints = dict(zip(_INTS, columns[len(_FLOATS) :], strict=True))
    seed = jnp.stack([ints["seed_low"], ints["seed_high"]], axis=1)
    return SamplingBatch(
        **dict(zip(_FLOATS, floats, strict=True)),
        top_k=ints["top_k"],
        seed=lax.bitcast_convert_type(seed, jnp.uint32),
        position=fields["total_len"],
        prompt_len=ints["prompt_len"],
        total_len=fields["total_len"],
        wants_logprobs=ints["wants_logprobs"] != 0,
        history=history,
        bias_ids=bias_ids,
        bias_values=bias_values,
    )


def empty_sampling_inputs(
    bucket: Bucket, max_model_len: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns history, bias_ids and bias_values without any effect, for the steps that need none."""
    return (
        np.full((bucket.num_seqs, max_model_len), vocab_size, np.int32),
        np.full((bucket.num_seqs, MAX_BIAS_IDS), vocab_size, np.int32),
        np.zeros((bucket.num_seqs, MAX_BIAS_IDS), np.float32),
    )


def _has_penalty(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def _pack_sampling(
    params: SamplingParams, seed: int, prompt_len: int, logprob_temperature: float
) -> np.ndarray:
    floats = [getattr(params, name) for name in _FLOATS[:-1]]
    floats = np.array([*floats, logprob_temperature], np.float32).view(np.int32)
    seed_words = np.array([seed], np.uint64).view(np.int32)
    ints = [max(params.top_k, 0), *seed_words, prompt_len, params.logprobs is not None]
    return np.concatenate([floats, np.array(ints, np.int32)])
