"""The batch builder against a loop over tokens that is written from the meaning of each field."""

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.batch import (
    MAX_BIAS_IDS,
    BatchBuilder,
    Bucket,
    StepInputs,
    empty_sampling_inputs,
    layout,
    plan_buckets,
    sampling_batch,
    unpack,
)
from jax_paged.sampling_params import SamplingParams
from jax_paged.scheduler import ScheduledSequence, SchedulerOutput
from jax_paged.sequence import RequestMetrics, Sequence, SequenceGroup

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, VOCAB_SIZE, EOS = 4, 50, 30, 100, 9
MAX_BLOCKS_PER_SEQ = 8


@pytest.fixture
def builder() -> BatchBuilder:
    return BatchBuilder(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
    )


def make_row(
    prompt: list[int],
    output: Iterable[int] = (),
    *,
    start: int,
    num_tokens: int,
    table: list[int],
    **params: Any,
) -> ScheduledSequence:
    seq = Sequence(0, prompt, list(output))
    settings: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": 20} | params
    group = SequenceGroup("r", [seq], SamplingParams(**settings), RequestMetrics(0.0))
    return ScheduledSequence(group, seq, start, num_tokens, table)


def make_output(*rows: ScheduledSequence) -> SchedulerOutput:
    return SchedulerOutput(tuple(rows), (), (), (), sum(row.num_tokens for row in rows))


def fields_of(inputs: StepInputs, bucket: Bucket) -> dict[str, np.ndarray]:
    return {
        k: np.asarray(v) for k, v in unpack(jnp.asarray(inputs.packed), bucket, MAX_BLOCKS_PER_SEQ).items()
    }


def random_step(rng: np.random.Generator, bucket: Bucket) -> SchedulerOutput:
    """Sequences anywhere in prompt or output, in blocks of their own, that fit the bucket."""
    blocks = list(rng.permutation(np.arange(1, NUM_BLOCKS)))
    rows, left = [], bucket.num_tokens
    for _ in range(rng.integers(1, bucket.num_seqs + 1)):
        length = int(rng.integers(1, MAX_LEN + 1))
        num_prompt = int(rng.integers(1, length + 1))
        start = int(rng.integers(0, length))
        num_tokens = 1 if bucket.is_decode else min(int(rng.integers(1, length - start + 1)), left)
        num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
        if not num_tokens or num_blocks > len(blocks):
            break
        left -= num_tokens
        table = [int(blocks.pop()) for _ in range(num_blocks)]
        tokens = rng.integers(0, VOCAB_SIZE, length).tolist()
        rows.append(
            make_row(
                tokens[:num_prompt], tokens[num_prompt:], start=start, num_tokens=num_tokens, table=table
            )
        )
    return make_output(*rows)


@pytest.mark.parametrize("bucket", [Bucket(True, 6, 6), Bucket(False, 32, 6), Bucket(False, 16, 1)])
def test_every_token_stands_where_it_belongs(builder: BatchBuilder, bucket: Bucket) -> None:
    rng = np.random.default_rng(0)
    out_of_pool = NUM_BLOCKS * BLOCK_SIZE
    for _ in range(100):
        step = random_step(rng, bucket)
        fields = fields_of(builder.build(step, bucket), bucket)
        i = 0
        for b, row in enumerate(step.scheduled):
            text = row.seq.prompt_token_ids + row.seq.output_token_ids
            assert fields["query_start_loc"][b] == i
            for position in range(row.start, row.start + row.num_tokens):
                assert fields["tokens"][i] == text[position]
                assert fields["positions"][i] == position
                block = row.block_table[position // BLOCK_SIZE]
                assert fields["slot_mapping"][i] == block * BLOCK_SIZE + position % BLOCK_SIZE
                i += 1
            assert fields["logits_rows"][b] == i - 1
            assert fields["context_lens"][b] == fields["total_len"][b] == row.start + row.num_tokens
            table = fields["block_tables"][b].tolist()
            assert table == row.block_table + [0] * (MAX_BLOCKS_PER_SEQ - len(row.block_table))
        n = len(step.scheduled)
        assert (fields["query_start_loc"][n:] == i).all()
        assert (fields["slot_mapping"][i:] >= out_of_pool).all()
        assert (fields["tokens"][i:] == 0).all()
        assert (fields["context_lens"][n:] == 0).all()
        assert (fields["block_tables"][n:] == 0).all()


def test_layout_covers_the_buffer_once() -> None:
    for bucket in plan_buckets(16, 128):
        fields, size = layout(bucket, MAX_BLOCKS_PER_SEQ)
        owners = np.zeros(size, int)
        for field in fields.values():
            owners[field.start : field.start + math.prod(field.shape)] += 1
        assert (owners == 1).all()


def test_sampling_fields(builder: BatchBuilder) -> None:
    params: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.4,
        "seed": (5 << 32) + 0xFFFFFFFE,
        "logprobs": 0,
        "logit_bias": {3: 1.5, 99: -2.0},
    }
    sampling = make_row([1, 2, 3], [4], start=3, num_tokens=1, table=[7], **params)
    chunk = make_row([1, 2, 3], start=0, num_tokens=2, table=[8], **params)
    top_k_off = make_row([6], start=0, num_tokens=1, table=[9], top_k=-1)
    bucket = Bucket(False, 8, 4)
    inputs = builder.build(make_output(sampling, top_k_off, chunk), bucket)
    fields = unpack(jnp.asarray(inputs.packed), bucket, MAX_BLOCKS_PER_SEQ)
    assert inputs.history is not None
    assert inputs.bias_ids is not None
    assert inputs.bias_values is not None
    arrays = (inputs.history, inputs.bias_ids, inputs.bias_values)
    batch = sampling_batch(fields, *map(jnp.asarray, arrays))
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        values = np.asarray(getattr(batch, name))
        assert values[0] == np.float32(params[name]), name
        # A chunk that does not reach the end, and padding, are greedy and ask for nothing.
        off = 1 if name in ("top_p", "repetition_penalty") else 0
        assert values[1:].tolist() == [off] * 3, name
    assert np.asarray(batch.seed)[0].tolist() == [0xFFFFFFFE, 5]
    assert np.asarray(batch.wants_logprobs).tolist() == [True, False, False, False]
    assert np.asarray(batch.prompt_len)[:2].tolist() == [3, 1]
    assert np.asarray(batch.position)[:3].tolist() == [4, 1, 2]
    assert np.asarray(batch.total_len)[:3].tolist() == [4, 1, 2]
    assert inputs.history.tolist() == [
        [1, 2, 3, 4] + [VOCAB_SIZE] * (MAX_LEN - 4),
        *([[VOCAB_SIZE] * MAX_LEN] * 3),
    ]
    assert inputs.bias_ids.shape == (4, MAX_BIAS_IDS)
    assert inputs.bias_ids[0, :3].tolist() == [3, 99, VOCAB_SIZE]
    assert inputs.bias_values[0, :3].tolist() == [1.5, -2.0, 0.0]
    assert (inputs.bias_ids[1:] == VOCAB_SIZE).all()
    assert (inputs.bias_values[1:] == 0).all()


def test_plain_steps_move_one_array(builder: BatchBuilder) -> None:
    row = make_row([1, 2], start=0, num_tokens=2, table=[1], temperature=0.5, top_k=3, logprobs=2)
    chunk = make_row([1, 2], start=0, num_tokens=1, table=[1], presence_penalty=1.0, min_tokens=2)
    bucket = Bucket(False, 4, 2)
    inputs = builder.build(make_output(row, chunk), bucket)
    assert inputs[1:] == (None, None, None)
    history, ids, values = map(np.asarray, empty_sampling_inputs(bucket, MAX_LEN, VOCAB_SIZE))
    assert history.shape == (2, MAX_LEN)
    assert (history == VOCAB_SIZE).all()
    assert (ids == VOCAB_SIZE).all()
    assert (values == 0).all()


@pytest.mark.parametrize(
    ("num_output", "params", "held_back"),
    [
        (0, {"min_tokens": 2}, {EOS}),
        (1, {"min_tokens": 2}, {EOS}),
        (2, {"min_tokens": 2}, set()),
        (0, {"min_tokens": 2, "stop_token_ids": [4, 5]}, {EOS, 4, 5}),
        (0, {"min_tokens": 2, "stop_token_ids": [4], "ignore_eos": True}, {4}),
        (0, {"stop_token_ids": [4]}, set()),
    ],
)
def test_min_tokens(
    builder: BatchBuilder, num_output: int, params: dict[str, Any], held_back: set[int]
) -> None:
    # The bias asked for on a held-back token does not free it.
    row = make_row(
        [1],
        [2] * num_output,
        start=num_output,
        num_tokens=1,
        table=[1],
        logit_bias={EOS: 50.0, 7: 1.0},
        **params,
    )
    inputs = builder.build(make_output(row), Bucket(True, 1, 1))
    assert inputs.bias_ids is not None
    assert inputs.bias_values is not None
    bias = dict(zip(inputs.bias_ids[0].tolist(), inputs.bias_values[0].tolist(), strict=True))
    del bias[VOCAB_SIZE]
    assert bias == {EOS: 50.0, 7: 1.0} | dict.fromkeys(held_back, -math.inf)


def test_wrong_blocks_do_not_reach_the_device(builder: BatchBuilder) -> None:
    for table in ([0], [-1], [NUM_BLOCKS]):
        with pytest.raises(AssertionError, match="block"):
            builder.build(make_output(make_row([1], start=0, num_tokens=1, table=table)), Bucket(True, 1, 1))


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 16, 17, 256])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 2, 5, 16, 100, 512, 8192])
def test_some_bucket_fits_every_step(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    buckets = plan_buckets(max_num_seqs, max_num_batched_tokens)
    assert len(set(buckets)) == len(buckets) <= 20
    for kind in (True, False):
        of_kind = [b for b in buckets if b.is_decode is kind]
        assert of_kind == sorted(of_kind)
        assert all(b.num_seqs <= b.num_tokens <= max_num_batched_tokens for b in of_kind)
        assert all(b.num_seqs == min(b.num_tokens, max_num_seqs) for b in of_kind)
    decode, mixed = ([b for b in buckets if b.is_decode is kind] for kind in (True, False))
    most = min(max_num_seqs, max_num_batched_tokens)
    assert decode[-1].num_seqs == most
    # No decode step is padded to twice its rows or more.
    for n in range(1, most + 1):
        assert next(b.num_seqs for b in decode if b.num_seqs >= n) < 2 * n
    assert not mixed or mixed[-1] == Bucket(False, max_num_batched_tokens, most)
    assert bool(mixed) == (max_num_batched_tokens > 1)
