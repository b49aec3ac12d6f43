"""The batch builder against a loop over tokens that is written from the meaning of each field."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.steps import make_output, make_row, new_sequence

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.scheduler_output import (
    MAX_END_TOKENS,
    BlockTables,
    EncoderInput,
    NewSequence,
    Sample,
    SchedulerOutput,
)
from jax_paged.sampling_params import MAX_BIAS_IDS, SamplingParams
from jax_paged.worker.batch_builder import BatchBuilder, StepInputs
from jax_paged.worker.block_tables import tables_of, write_changes
from jax_paged.worker.compilation.buckets import Bucket, plan_buckets, plan_multi_step
from jax_paged.worker.features.encoder_decoder import build_encoder_inputs
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.packed_buffer import FLOATS, INTS, BufferOptions, layout, sampling_batch, unpack
from jax_paged.worker.sampling.token_rules import pack_token_mask
from jax_paged.worker.step_features import StepFields
from jax_paged.worker.step_rows import plan_logits_rows

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN, VOCAB_SIZE, EOS = 4, 50, 30, 100, 9
MAX_BLOCKS_PER_SEQ, NUM_BATCH_SLOTS, NUM_WORDS = 8, 10, 4
SEED_COLUMN = len(FLOATS) + INTS.index("seed_low")
FULL, WINDOW, CROSS = CacheGroup(), CacheGroup(window=6), CacheGroup(is_cross=True)


class Worker:
    """Batch slots and builder of a runner."""

    def __init__(self, *groups: CacheGroup, checks_inputs: bool = True) -> None:
        self.num_groups = len(groups)
        shape = self.num_groups, NUM_BATCH_SLOTS, MAX_BLOCKS_PER_SEQ
        # What the device has, garbage at first.
        self.device_tables = jnp.full(shape, NUM_BLOCKS + 7, jnp.int32)
        self.input_batch = InputBatch(
            max_num_seqs=NUM_BATCH_SLOTS,
            num_groups=len(groups),
            max_blocks_per_seq=MAX_BLOCKS_PER_SEQ,
            num_blocks=NUM_BLOCKS,
            vocab_size=VOCAB_SIZE,
            features=FeatureRows(NUM_BATCH_SLOTS),
            is_cross=[group.is_cross for group in groups],
        )
        self.builder = BatchBuilder(
            self.input_batch,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            groups=groups,
            vocab_size=VOCAB_SIZE,
            checks_inputs=checks_inputs,
            features=StepFields(input_batch=self.input_batch, block_size=BLOCK_SIZE),
        )

    def build(self, output: SchedulerOutput, bucket: Bucket) -> StepInputs:
        self.input_batch.update(output)
        self.input_batch.check_integrity()
        return self.builder.build(output, plan_logits_rows(output), bucket)

    def fields(self, inputs: StepInputs, bucket: Bucket) -> dict[str, np.ndarray]:
        """What the device makes of a step: its fields, and the block tables of its rows."""
        fields = unpack(jnp.asarray(inputs.packed), bucket, BufferOptions(self.num_groups))
        for changes in (jnp.asarray(inputs.changes_before_step), fields["table_changes"]):
            self.device_tables = write_changes(self.device_tables, changes)
        fields["block_tables"] = tables_of(self.device_tables, fields["batch_slots"])
        return {k: np.asarray(v) for k, v in fields.items()}

    def sampling_batch(self, output: SchedulerOutput, bucket: Bucket) -> dict[str, np.ndarray]:
        """What the sampler reads of a step; token_counts are left out."""
        inputs = self.build(output, bucket)
        fields = unpack(jnp.asarray(inputs.packed), bucket, BufferOptions(self.num_groups))
        empty = self.builder.empty_sampling_inputs(bucket.num_seqs)
        extra = [jnp.asarray(e if x is None else x) for x, e in zip(optional(inputs), empty, strict=True)]
        batch = sampling_batch(fields, jnp.zeros((NUM_BATCH_SLOTS, VOCAB_SIZE), jnp.int32), *extra)
        return {f.name: np.asarray(getattr(batch, f.name)) for f in dataclasses.fields(batch)}


@pytest.fixture
def worker() -> Worker:
    return Worker(FULL)


@dataclasses.dataclass
class Text:
    """A row of a step and all that stands behind it."""

    new: NewSequence
    tokens: list[int]
    start: int
    num_tokens: int
    samples: list[Sample]
    forks: list[NewSequence]


def random_step(
    rng: np.random.Generator, bucket: Bucket, groups: tuple[CacheGroup, ...], first_id: int
) -> tuple[list[Text], SchedulerOutput]:
    """Sequences anywhere in prompt or output, in blocks of their own, that fit the bucket.

    Some have all the blocks of their text from the start, as prompts do that are computed in chunks.
    """
    blocks = list(rng.permutation(np.arange(1, NUM_BLOCKS)))
    texts: list[Text] = []
    left, num_logits_left = bucket.num_tokens, bucket.num_seqs
    while num_logits_left and rng.random() < 0.8:
        length = int(rng.integers(1, MAX_LEN + 1))
        num_prompt = int(rng.integers(1, length + 1))
        start = int(rng.integers(0, length))
        num_tokens = 1 if bucket.is_decode else min(int(rng.integers(1, length - start + 1)), left)
        num_encoded = int(rng.integers(1, 10)) if CROSS in groups else 0
        tables: BlockTables = []
        for group in groups:
            stop = num_encoded if group.is_cross else start + num_tokens
            if group is FULL and rng.random() < 0.5:
                stop = length
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
        seq_id = first_id + 100 * len(texts)
        new = new_sequence(
            seq_id,
            tokens[:num_prompt],
            tokens[num_prompt:],
            tables=tables,
            num_encoder_tokens=num_encoded,
            seed=seq_id,
        )
        row, stop = len(texts), start + num_tokens
        samples, forks = [], []
        if stop == length == num_prompt:
            for i in range(int(rng.integers(1, num_logits_left + 1))):
                if i:
                    forks.append(new._replace(seq_id=seq_id + i, seed=seq_id + i))
                samples.append(Sample(row, seq_id + i))
        elif stop == length:
            num_logits = int(rng.integers(1, min(num_tokens, num_logits_left) + 1))
            samples.append(Sample(row, seq_id, num_logits))
        num_logits_left -= max(1, sum(sample.num_logits for sample in samples))
        texts.append(Text(new, tokens, start, num_tokens, samples, forks))
    rows = [make_row(t.new.seq_id, t.start, t.tokens[t.start : t.start + t.num_tokens]) for t in texts]
    new = [seq for text in texts for seq in (text.new, *text.forks)]
    return texts, make_output(rows, [s for text in texts for s in text.samples], new=new)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (CROSS, WINDOW, FULL)])
@pytest.mark.parametrize("bucket", [Bucket(True, 6, 6), Bucket(False, 32, 6), Bucket(False, 16, 1)])
def test_every_token_stands_where_it_belongs(bucket: Bucket, groups: tuple[CacheGroup, ...]) -> None:
    rng = np.random.default_rng(0)
    worker, out_of_pool = Worker(*groups), NUM_BLOCKS * BLOCK_SIZE
    num_seen = num_longer = num_several = 0
    seated: list[int] = []
    for step_id in range(100):
        texts, step = random_step(rng, bucket, groups, first_id=10_000 * step_id)
        if not texts:
            continue
        step = dataclasses.replace(step, released_seq_ids=tuple(seated))
        seated = [new.seq_id for new in step.new_sequences]
        fields = worker.fields(worker.build(step, bucket), bucket)
        i = drawn = 0
        unsampled = []
        for b, text in enumerate(texts):
            assert fields["query_start_loc"][b] == i
            stop = text.start + text.num_tokens
            for position in range(text.start, stop):
                assert fields["tokens"][i] == text.tokens[position]
                assert fields["positions"][i] == position
                for g, group in enumerate(groups):
                    table = text.new.block_tables[g]
                    # The decoder writes nothing for cross attention.
                    block = None if group.is_cross else table[position // BLOCK_SIZE]
                    slot = out_of_pool if block is None else block * BLOCK_SIZE + position % BLOCK_SIZE
                    assert fields["slot_mapping"][g, i] == slot
                i += 1
            for sample in text.samples:
                num_several += sample.num_logits > 1
                for back in reversed(range(sample.num_logits)):  # a row of logits after each given token
                    assert fields["logits_rows"][drawn] == i - 1 - back
                    assert fields["sample_positions"][drawn] == stop - back
                    # The low word of the seed, which is the sequence's id here.
                    assert fields["sampling"][drawn, SEED_COLUMN] == sample.seq_id
                    drawn += 1
            if not text.samples:
                unsampled.append(i - 1)
            for g, group in enumerate(groups):
                context_len = len(text.new.request.encoder_token_ids) if group.is_cross else stop
                assert fields["context_lens"][g, b] == context_len
                table = text.new.block_tables[g]
                num_longer += len(table) > -(-context_len // BLOCK_SIZE)
                assert fields["block_tables"][g, b, : len(table)].tolist() == table
        n, num_logits = len(texts), drawn + len(unsampled)
        # Rows without a sample have logits too, that are looked at for NaN.
        assert fields["logits_rows"][drawn:num_logits].tolist() == unsampled
        assert (fields["query_start_loc"][n:] == i).all()
        assert (fields["slot_mapping"][:, i:] >= out_of_pool).all()
        assert (fields["tokens"][i:] == 0).all()
        assert (fields["context_lens"][:, n:] == 0).all()
        assert (fields["block_tables"][:, n:] == 0).all()
        assert (fields["sample_positions"][drawn:] == 0).all()
        assert (fields["logits_rows"][num_logits:] == 0).all()
        assert (fields["count_slots"] == NUM_BATCH_SLOTS).all()
        assert num_logits == step.num_logits_rows
        num_seen += n
    assert num_seen > 60
    assert num_longer > 10, "tables that hold more blocks than are read"
    assert bucket.is_decode or bucket.num_seqs == 1 or num_several > 5


def test_layout_covers_the_buffer_once() -> None:
    buckets = plan_buckets(16, 128)
    for bucket in [*buckets, *plan_multi_step(buckets, 8)]:
        fields, size = layout(bucket, BufferOptions(2))
        owners = np.zeros(size, int)
        for field in fields.values():
            owners[field.start : field.start + math.prod(field.shape)] += 1
        assert (owners == 1).all()


def test_the_fields_of_a_burst() -> None:
    worker, bucket = Worker(FULL, CROSS), Bucket(True, 4, 4, 8)
    many = list(range(20, 20 + MAX_END_TOKENS))
    new = [
        new_sequence(1, [1, 2, 3], [4], tables=[[7, 8], [3]], end_token_ids=[EOS, 4], num_encoder_tokens=2),
        new_sequence(2, [6], [5], tables=[[9, 10, 11], [4]], end_token_ids=many, num_encoder_tokens=3),
        new_sequence(3, [6], [5], tables=[[12], [5]], num_encoder_tokens=3),
    ]
    rows, samples = [make_row(i, 1, [5]) for i in (2, 3)], [Sample(0, 2), Sample(1, 3)]
    output = dataclasses.replace(make_output(rows, samples, new=new), num_multi_step_tokens=(8, 3))
    fields = worker.fields(worker.build(output, bucket), bucket)
    assert fields["max_draws"].tolist() == [8, 3, 0, 0]
    assert fields["end_tokens"][:2].tolist() == [many, [-1] * MAX_END_TOKENS]
    assert worker.input_batch.end_tokens[worker.input_batch.slots_of([1])[0]].tolist() == [4, EOS] + [-1] * 6
    too_long = dataclasses.replace(output, num_multi_step_tokens=(8, 4), new_sequences=())
    with pytest.raises(AssertionError, match="null block"):
        worker.build(too_long, bucket)


def test_sampling_fields(worker: Worker) -> None:
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
        "allowed_token_ids": [3, 64, 99],
    }
    new = [
        new_sequence(1, [1, 2, 3], [4], tables=[[7]], **params),
        new_sequence(2, [6], tables=[[9]], top_k=-1),
        new_sequence(3, [1, 2, 3], tables=[[8]], **params),
    ]
    rows = [make_row(1, 3, [4]), make_row(2, 0, [6]), make_row(3, 0, [1, 2])]
    bucket = Bucket(False, 8, 4)
    batch = worker.sampling_batch(make_output(rows, [Sample(0, 1), Sample(1, 2)], new=new), bucket)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ):
        assert batch[name][0] == np.float32(params[name]), name
        # A chunk that does not reach the end, and padding, are greedy and ask for nothing.
        off = 1 if name in ("top_p", "repetition_penalty") else 0
        assert batch[name][1:].tolist() == [off] * 3, name
    assert batch["seed"][0].tolist() == [0xFFFFFFFE, 5]
    assert batch["wants_logprobs"].tolist() == [True, False, False, False]
    assert batch["position"].tolist() == [4, 1, 0, 0]
    (batch_slot,) = worker.input_batch.slots_of([1]).tolist()
    assert batch["count_slots"].tolist() == [batch_slot, NUM_BATCH_SLOTS, NUM_BATCH_SLOTS, NUM_BATCH_SLOTS]
    assert batch["has_token_mask"].tolist() == [True, False, False, False]
    assert batch["token_mask"][0].tolist() == pack_token_mask([3, 64, 99], VOCAB_SIZE).tolist()
    assert (batch["token_mask"][1:] == -1).all()
    assert batch["bias_ids"].shape == (4, MAX_BIAS_IDS)
    assert batch["bias_ids"][0, :3].tolist() == [3, 99, VOCAB_SIZE]
    assert batch["bias_values"][0, :3].tolist() == [1.5, -2.0, 0.0]
    assert (batch["bias_ids"][1:] == VOCAB_SIZE).all()
    assert (batch["bias_values"][1:] == 0).all()


def test_plain_steps_move_one_array(worker: Worker) -> None:
    new = [
        new_sequence(1, [1, 2], tables=[[1]], temperature=0.5, top_k=3, logprobs=2, presence_penalty=1.0),
        new_sequence(2, [1, 2], tables=[[2]], min_tokens=2, allowed_token_ids=[1], end_token_ids=[EOS]),
    ]
    rows = [make_row(1, 0, [1, 2]), make_row(2, 0, [1])]
    bucket = Bucket(False, 4, 2)
    inputs = worker.build(make_output(rows, [Sample(0, 1)], new=new), bucket)
    assert optional(inputs) == (None, None, None)
    ids, values, mask = worker.builder.empty_sampling_inputs(2)
    assert (ids == VOCAB_SIZE).all()
    assert (values == 0).all()
    assert mask.shape == (2, NUM_WORDS)
    assert (mask == -1).all()


def optional(inputs: StepInputs) -> tuple[np.ndarray | None, ...]:
    return inputs.bias_ids, inputs.bias_values, inputs.token_mask


def bias_of(inputs: StepInputs, row: int) -> dict[int, float]:
    """The biases of one row of logits."""
    if inputs.bias_ids is None or inputs.bias_values is None:
        return {}
    bias = dict(zip(inputs.bias_ids[row].tolist(), inputs.bias_values[row].tolist(), strict=True))
    bias.pop(VOCAB_SIZE, None)
    return bias


@pytest.mark.parametrize(
    ("num_output", "min_tokens", "end_token_ids", "held_back"),
    [
        (0, 2, {EOS}, {EOS}),
        (1, 2, {EOS}, {EOS}),
        (2, 2, {EOS}, set()),
        (0, 2, {EOS, 4, 5}, {EOS, 4, 5}),
        (0, 2, {4}, {4}),
        (0, 0, {EOS, 4}, set()),
    ],
)
def test_min_tokens(
    worker: Worker, num_output: int, min_tokens: int, end_token_ids: set[int], held_back: set[int]
) -> None:
    # The bias asked for on a held-back token does not free it.
    new = new_sequence(
        1,
        [1],
        [2] * num_output,
        tables=[[1]],
        end_token_ids=end_token_ids,
        min_tokens=min_tokens,
        logit_bias={EOS: 50.0, 7: 1.0},
    )
    row = make_row(1, num_output, [2 if num_output else 1])
    inputs = worker.build(make_output([row], [Sample(0, 1)], new=[new]), Bucket(True, 1, 1))
    assert bias_of(inputs, 0) == {EOS: 50.0, 7: 1.0}
    assert forbidden(inputs, 0) == held_back


def test_min_tokens_count_from_each_row_of_logits(worker: Worker) -> None:
    new = new_sequence(1, [1, 2], tables=[[1, 2]], end_token_ids=[EOS], min_tokens=2)
    first = make_output([make_row(1, 0, [1, 2])], [Sample(0, 1)], new=[new])
    worker.build(first, Bucket(False, 4, 4))
    # The second to fifth token of the output: only the second is one of the first two.
    step = make_output([make_row(1, 2, [5, 6, 7, 8])], [Sample(0, 1, 4)])
    inputs = worker.build(step, Bucket(False, 4, 4))
    assert [forbidden(inputs, j) for j in range(4)] == [{EOS}, set(), set(), set()]


def forbidden(inputs: StepInputs, row: int) -> set[int]:
    """The tokens that the mask of a row of logits leaves out."""
    if inputs.token_mask is None:
        return set()
    bits = np.unpackbits(inputs.token_mask[row].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE] == 0).tolist())


def banned(words: list[list[int]], text: list[int]) -> set[int]:
    """The tokens that would complete a bad word after a text."""
    return {w[-1] for w in words if len(w) - 1 <= len(text) and text[len(text) - len(w) + 1 :] == w[:-1]}


@pytest.mark.parametrize("seed", range(15))
def test_bad_words(seed: int) -> None:
    """Through chunks of the prompt, single tokens, rows of several given tokens of which some are taken
    back, forks and preemptions: what is banned follows from the text alone."""
    rng = np.random.default_rng(seed)
    worker = Worker(FULL)
    words = [[int(t) for t in rng.integers(0, 3, rng.integers(1, 5))] for _ in range(4)]
    text = [int(t) for t in rng.integers(0, 3, 6)]
    params: dict[str, Any] = {"bad_words_token_ids": words, "logit_bias": {50: 1.0}}
    table, bucket = [[1, 2, 3, 4, 5, 6, 7, 8]], Bucket(False, 32, 8)
    seq_id, start, num_prompt = 1, int(rng.integers(0, 3)), len(text)  # the first tokens may be cached
    new, released = [new_sequence(1, text[:], tables=table, **params)], []
    num_banned = 0
    while len(text) < MAX_LEN - 4:
        if start < len(text) - 1 and rng.random() < 0.5:  # a chunk
            row = make_row(seq_id, start, text[start : start + 1])
            worker.build(make_output([row], new=new, released=released), bucket)
            start, new, released = start + 1, [], []
            continue
        given = [int(t) for t in rng.integers(0, 3, rng.integers(0, 3))]
        row = make_row(seq_id, start, [*text[start:], *given])
        sample = Sample(0, seq_id, 1 + len(given))
        inputs = worker.build(make_output([row], [sample], new=new, released=released), bucket)
        new, released = [], []
        for j in range(1 + len(given)):
            expected = banned(words, text + given[:j])
            num_banned += bool(expected)
            assert (bias_of(inputs, j), forbidden(inputs, j)) == ({50: 1.0}, expected)
        start = len(text) + int(rng.integers(0, len(given) + 1))
        text = [*(text + given)[:start], int(rng.integers(0, 3))]
        if rng.random() < 0.2:  # preempted, or a fork that goes on in its place
            released, seq_id = [seq_id], seq_id + 1
            new = [new_sequence(seq_id, text[:num_prompt], text[num_prompt:], tables=table, **params)]
            start = int(rng.integers(0, len(text)))
    assert num_banned > 0


def test_wrong_blocks_do_not_reach_the_device(worker: Worker) -> None:
    for seq_id, table in enumerate(([0], [-1], [NUM_BLOCKS])):
        new = new_sequence(seq_id, [1], tables=[table])
        output = make_output([make_row(seq_id, 0, [1])], [Sample(0, seq_id)], new=[new])
        with pytest.raises(AssertionError, match="block"):
            worker.build(output, Bucket(True, 1, 1))


def test_a_step_that_does_not_fit_its_bucket_is_not_built(worker: Worker) -> None:
    new = new_sequence(1, [1, 2, 3], tables=[[1]])
    step = make_output([make_row(1, 0, [1, 2, 3])], [Sample(0, 1, 3)], new=[new])
    worker.input_batch.update(step)
    for bucket in (Bucket(False, 2, 3), Bucket(False, 4, 2), Bucket(True, 4, 4)):
        with pytest.raises(AssertionError):
            worker.builder.build(step, plan_logits_rows(step), bucket)


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


def test_samples_differ_in_their_seeds_alone(worker: Worker) -> None:
    params = SamplingParams(seed=5, n=3)
    new = [
        new_sequence(
            i,
            [1, 2, 3],
            tables=[[7]],
            seed=params.seed_of(i),
            temperature=0.5,
            min_tokens=2,
            end_token_ids=[EOS],
        )
        for i in range(3)
    ]
    new.append(new_sequence(9, [4], tables=[[8]]))
    rows = [make_row(9, 0, [4]), make_row(0, 0, [1, 2, 3])]
    samples = [Sample(0, 9), *(Sample(1, i) for i in range(3))]
    batch = worker.sampling_batch(make_output(rows, samples, new=new), Bucket(False, 8, 6))
    seeds = [int(low) + (int(high) << 32) for low, high in batch["seed"]]
    assert seeds == [0, *(params.seed_of(i) for i in range(3)), 0, 0]
    assert batch["temperature"].tolist() == [0, 0.5, 0.5, 0.5, 0, 0]
    assert batch["position"].tolist() == [1, 3, 3, 3, 0, 0]
    assert batch["has_token_mask"].tolist() == [False, True, True, True, False, False]
    word, bit = EOS // 32, EOS % 32
    is_allowed = batch["token_mask"][:, word] >> bit & 1
    assert is_allowed.tolist() == [1, 0, 0, 0, 1, 1]  # min_tokens holds it back from each


def test_penalties_see_each_samples_own_counts(worker: Worker) -> None:
    new = [
        new_sequence(i, [1, 2], [5 + i], tables=[[1 + i]], frequency_penalty=float(i != 1)) for i in range(3)
    ]
    rows, samples = [make_row(i, 2, [5 + i]) for i in range(3)], [Sample(i, i) for i in range(3)]
    batch = worker.sampling_batch(make_output(rows, samples, new=new), Bucket(True, 4, 4))
    batch_slots = worker.input_batch.slots_of([0, 1, 2]).tolist()
    assert batch["count_slots"].tolist() == [batch_slots[0], NUM_BATCH_SLOTS, batch_slots[2], NUM_BATCH_SLOTS]


def test_penalties_with_several_rows_of_logits_are_not_built(worker: Worker) -> None:
    new = new_sequence(1, [1, 2, 3], tables=[[1]], repetition_penalty=1.5)
    step = make_output([make_row(1, 0, [1, 2, 3])], [Sample(0, 1, 2)], new=[new])
    with pytest.raises(AssertionError, match="penalties"):
        worker.build(step, Bucket(False, 4, 4))


def test_the_temperature_of_beams_changes_their_log_probabilities_alone(worker: Worker) -> None:
    new = [
        new_sequence(i, [1], tables=[[1 + i]], logprob_temperature=t) for i, t in enumerate((1.0, 1.0, 2.5))
    ]
    new.append(new_sequence(3, [1], tables=[[9]], temperature=2.5))
    rows, samples = [make_row(i, 0, [1]) for i in range(4)], [Sample(i, i) for i in range(4)]
    batch = worker.sampling_batch(make_output(rows, samples, new=new), Bucket(True, 6, 6))
    assert batch["logprob_temperature"].tolist() == [1, 1, 2.5, 1, 1, 1]
    assert batch["temperature"].tolist() == [0, 0, 0, 2.5, 0, 0]


def test_the_encoder_writes_to_cross_attention_alone() -> None:
    def build(token_ids: list[int], tables: BlockTables) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        text = EncoderInput("r", token_ids, tables)
        return build_encoder_inputs(
            text, 8, groups=(CROSS, FULL), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
        )

    tokens, length, slots = build([11, 12, 13, 14, 15], [[7, 3], [9]])
    out_of_pool = NUM_BLOCKS * BLOCK_SIZE
    assert tokens.tolist() == [11, 12, 13, 14, 15, 0, 0, 0]
    assert int(length) == 5
    assert slots[0, :5].tolist() == [28, 29, 30, 31, 12]
    assert (slots[0, 5:] >= out_of_pool).all()
    assert (slots[1] >= out_of_pool).all()
    with pytest.raises(AssertionError, match="null block"):
        build([11], [[0], [9]])


def test_a_token_outside_its_window_may_not_be_written() -> None:
    new = new_sequence(1, [1] * 5, tables=[[1, 2], [3, 0]])
    step = make_output([make_row(1, 4, [1])], [Sample(0, 1)], new=[new])
    with pytest.raises(AssertionError, match="null block"):
        Worker(FULL, WINDOW).build(step, Bucket(True, 1, 1))
