"""The batch builder against a loop over tokens that is written from the meaning of each field."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.core.block_manager import BlockTables, CacheGroup
from jax_paged.core.scheduler_output import ScheduledSequence, SchedulerOutput, StepBuilder
from jax_paged.core.sequence import RequestMetrics, Sequence, SequenceGroup
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.worker.batch import (
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

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, VOCAB_SIZE, EOS = 4, 50, 30, 100, 9
MAX_BLOCKS_PER_SEQ = 8
FULL, WINDOW, CROSS = CacheGroup(), CacheGroup(window=6), CacheGroup(is_cross=True)


def make_builder(*groups: CacheGroup) -> BatchBuilder:
    return BatchBuilder(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        groups=groups,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
    )


@pytest.fixture
def builder() -> BatchBuilder:
    return make_builder(FULL)


def make_row(
    prompt: list[int],
    output: Iterable[int] = (),
    *,
    start: int,
    num_tokens: int,
    tables: BlockTables,
    beams: BeamSearchParams | None = None,
    encoder: Iterable[int] = (),
    num_samples: int | None = None,
    **params: Any,
) -> ScheduledSequence:
    """A row; it samples at the end of its tokens, unless num_samples says else."""
    seq = Sequence(prompt, output_token_ids=list(output), seed=params.get("seed", 0))
    settings: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_tokens": 20} | params
    if num_samples is None:
        num_samples = int(start + num_tokens == len(seq))
    params_of_group = SamplingParams(**settings)
    sampling = [seq, *(seq.fork(i, params_of_group.seed_of(i)) for i in range(1, num_samples))][:num_samples]
    group = SequenceGroup(
        "r",
        [seq],
        params_of_group,
        RequestMetrics(0.0),
        beam_params=beams,
        encoder_token_ids=list(encoder),
    )
    return ScheduledSequence(group, seq, start, num_tokens, tables, tuple(sampling))


def make_output(*rows: ScheduledSequence) -> SchedulerOutput:
    step = StepBuilder(100)
    step.rows = list(rows)
    return dataclasses.replace(step.build(), scheduled=tuple(rows))  # in the order given


def fields_of(inputs: StepInputs, bucket: Bucket, num_groups: int = 1) -> dict[str, np.ndarray]:
    fields = unpack(jnp.asarray(inputs.packed), bucket, MAX_BLOCKS_PER_SEQ, num_groups)
    return {k: np.asarray(v) for k, v in fields.items()}


def random_step(rng: np.random.Generator, bucket: Bucket, groups: tuple[CacheGroup, ...]) -> SchedulerOutput:
    """Sequences anywhere in prompt or output, in blocks of their own, that fit the bucket."""
    blocks = list(rng.permutation(np.arange(1, NUM_BLOCKS)))
    rows, left, seats = [], bucket.num_tokens, bucket.num_seqs
    while seats and rng.random() < 0.8:
        length = int(rng.integers(1, MAX_LEN + 1))
        num_prompt = int(rng.integers(1, length + 1))
        start = int(rng.integers(0, length))
        num_tokens = 1 if bucket.is_decode else min(int(rng.integers(1, length - start + 1)), left)
        encoder = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 10)) if CROSS in groups else 0).tolist()
        num_samples = int(rng.integers(1, seats + 1)) if start + num_tokens == length == num_prompt else None
        tables: BlockTables = []
        for group in groups:
            stop = len(encoder) if group.is_cross else start + num_tokens
            dead = 0 if group.window is None else max(0, start - group.window + 1) // BLOCK_SIZE
            num_blocks = -(-stop // BLOCK_SIZE) - dead
            tables.append([0] * dead + [int(b) for b in blocks[:num_blocks]])
            if num_blocks > len(blocks):
                num_tokens = 0
            del blocks[:num_blocks]
        if not num_tokens:
            break
        left -= num_tokens
        tokens = rng.integers(0, VOCAB_SIZE, length).tolist()
        rows.append(
            make_row(
                tokens[:num_prompt],
                tokens[num_prompt:],
                start=start,
                num_tokens=num_tokens,
                tables=tables,
                encoder=encoder,
                num_samples=num_samples,
            )
        )
        seats -= num_samples or 1
    return make_output(*rows)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (CROSS, WINDOW, FULL)])
@pytest.mark.parametrize("bucket", [Bucket(True, 6, 6), Bucket(False, 32, 6), Bucket(False, 16, 1)])
def test_every_token_stands_where_it_belongs(bucket: Bucket, groups: tuple[CacheGroup, ...]) -> None:
    rng = np.random.default_rng(0)
    builder, out_of_pool = make_builder(*groups), NUM_BLOCKS * BLOCK_SIZE
    num_seen = 0
    for _ in range(100):
        step = random_step(rng, bucket, groups)
        if not step.scheduled:
            continue
        fields = fields_of(builder.build(step, bucket), bucket, len(groups))
        i = sample = 0
        for b, row in enumerate(step.scheduled):
            text = row.seq.prompt_token_ids + row.seq.output_token_ids
            assert fields["query_start_loc"][b] == i
            for position in range(row.start, row.start + row.num_tokens):
                assert fields["tokens"][i] == text[position]
                assert fields["positions"][i] == position
                for g, group in enumerate(groups):
                    block = row.block_tables[g][position // BLOCK_SIZE] if not group.is_cross else None
                    slot = out_of_pool if block is None else block * BLOCK_SIZE + position % BLOCK_SIZE
                    assert (
                        fields["slot_mapping"][g, i] == slot
                    )  # the decoder writes nothing for cross attention
                i += 1
            for _ in range(len(row.sampling) or 1):  # all samples of a row from its last token's logits
                assert fields["logits_rows"][sample] == i - 1
                assert fields["total_len"][sample] == row.start + row.num_tokens
                sample += 1
            for g, group in enumerate(groups):
                context_len = (
                    len(row.group.encoder_token_ids) if group.is_cross else row.start + row.num_tokens
                )
                assert fields["context_lens"][g, b] == context_len
                table = row.block_tables[g]
                assert fields["block_tables"][g, b].tolist() == table + [0] * (
                    MAX_BLOCKS_PER_SEQ - len(table)
                )
        n = len(step.scheduled)
        assert (fields["query_start_loc"][n:] == i).all()
        assert (fields["slot_mapping"][:, i:] >= out_of_pool).all()
        assert (fields["tokens"][i:] == 0).all()
        assert (fields["context_lens"][:, n:] == 0).all()
        assert (fields["block_tables"][:, n:] == 0).all()
        assert (fields["total_len"][sample:] == 0).all()
        assert (fields["logits_rows"][sample:] == 0).all()
        assert sample == step.num_logits_rows
        num_seen += n
    assert num_seen > 60


def test_layout_covers_the_buffer_once() -> None:
    for bucket in plan_buckets(16, 128):
        fields, size = layout(bucket, MAX_BLOCKS_PER_SEQ, 2)
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
    sampling = make_row([1, 2, 3], [4], start=3, num_tokens=1, tables=[[7]], **params)
    chunk = make_row([1, 2, 3], start=0, num_tokens=2, tables=[[8]], **params)
    top_k_off = make_row([6], start=0, num_tokens=1, tables=[[9]], top_k=-1)
    bucket = Bucket(False, 8, 4)
    inputs = builder.build(make_output(sampling, top_k_off, chunk), bucket)
    fields = unpack(jnp.asarray(inputs.packed), bucket, MAX_BLOCKS_PER_SEQ, 1)
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
    row = make_row([1, 2], start=0, num_tokens=2, tables=[[1]], temperature=0.5, top_k=3, logprobs=2)
    chunk = make_row([1, 2], start=0, num_tokens=1, tables=[[1]], presence_penalty=1.0, min_tokens=2)
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
        tables=[[1]],
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
            builder.build(
                make_output(make_row([1], start=0, num_tokens=1, tables=[table])), Bucket(True, 1, 1)
            )


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


def sampling_batch_of(
    builder: BatchBuilder, bucket: Bucket, *rows: ScheduledSequence
) -> dict[str, np.ndarray]:
    inputs = builder.build(make_output(*rows), bucket)
    fields = unpack(jnp.asarray(inputs.packed), bucket, MAX_BLOCKS_PER_SEQ, 1)
    empty = empty_sampling_inputs(bucket, MAX_LEN, VOCAB_SIZE)
    extra = [jnp.asarray(e if x is None else x) for x, e in zip(inputs[1:], empty, strict=True)]
    batch = sampling_batch(fields, *extra)
    return {f.name: np.asarray(getattr(batch, f.name)) for f in dataclasses.fields(batch)}


def test_samples_differ_in_their_seeds_alone(builder: BatchBuilder) -> None:
    row = make_row(
        [1, 2, 3],
        start=0,
        num_tokens=3,
        tables=[[7]],
        num_samples=3,
        seed=5,
        n=3,
        temperature=0.5,
        min_tokens=2,
    )
    other = make_row([4], start=0, num_tokens=1, tables=[[8]])
    batch = sampling_batch_of(builder, Bucket(False, 8, 6), other, row)
    seeds = [int(low) + (int(high) << 32) for low, high in batch["seed"]]
    params = row.group.sampling_params
    assert seeds == [0, *(params.seed_of(i) for i in range(3)), 0, 0]
    assert batch["temperature"].tolist() == [0, 0.5, 0.5, 0.5, 0, 0]
    assert batch["prompt_len"].tolist() == [1, 3, 3, 3, 0, 0]
    assert batch["position"].tolist() == [1, 3, 3, 3, 0, 0]
    assert (batch["bias_ids"][1:4, 0] == EOS).all()  # min_tokens holds it back from each
    assert (batch["bias_ids"][4:] == VOCAB_SIZE).all()


def test_penalties_see_each_samples_own_history(builder: BatchBuilder) -> None:
    rows = [
        make_row([1, 2], [out], start=2, num_tokens=1, tables=[[b]], frequency_penalty=1.0)
        for b, out in ((1, 5), (2, 6))
    ]
    history = sampling_batch_of(builder, Bucket(True, 2, 2), *rows)["history"]
    assert history[:, :4].tolist() == [[1, 2, 5, VOCAB_SIZE], [1, 2, 6, VOCAB_SIZE]]


def test_the_temperature_of_beams_changes_their_log_probabilities_alone(builder: BatchBuilder) -> None:
    beams = [BeamSearchParams(beam_width=2, temperature=t) for t in (0.0, 2.5)]
    rows = [
        make_row([1], start=0, num_tokens=1, tables=[[1 + i]], beams=b) for i, b in enumerate((None, *beams))
    ]
    rows.append(make_row([1], start=0, num_tokens=1, tables=[[9]], temperature=2.5))
    batch = sampling_batch_of(builder, Bucket(True, 6, 6), *rows)
    assert batch["logprob_temperature"].tolist() == [1, 1, 2.5, 1, 1, 1]
    assert batch["temperature"].tolist() == [0, 0, 0, 2.5, 0, 0]


def test_the_encoder_writes_to_cross_attention_alone() -> None:
    builder = make_builder(CROSS, FULL)
    tokens, length, slots = builder.build_encoder([11, 12, 13, 14, 15], [[7, 3], [9]], 8)
    out_of_pool = NUM_BLOCKS * BLOCK_SIZE
    assert tokens.tolist() == [11, 12, 13, 14, 15, 0, 0, 0]
    assert int(length) == 5
    assert slots[0, :5].tolist() == [28, 29, 30, 31, 12]
    assert (slots[0, 5:] >= out_of_pool).all()
    assert (slots[1] >= out_of_pool).all()
    with pytest.raises(AssertionError, match="null block"):
        builder.build_encoder([11], [[0], [9]], 8)


def test_a_token_outside_its_window_may_not_be_written() -> None:
    row = make_row([1] * 5, start=4, num_tokens=1, tables=[[1, 2], [3, 0]])
    with pytest.raises(AssertionError, match="null block"):
        make_builder(FULL, WINDOW).build(make_output(row), Bucket(True, 1, 1))
