"""The jitted step: weights, pool and one packed buffer in; sampled tokens and the pool out."""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.checks import check_int
from jax_paged.config import EngineArgs, checks_inputs
from jax_paged.core.runner_output import Details, StepOutput, TokenLogprobs, read_details
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import SequenceGroup
from jax_paged.models.attention import Backend
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.encoder_decoder import EncoderDecoderLM
from jax_paged.models.layers import TENSOR
from jax_paged.models.weights import LoadedModel, load_model
from jax_paged.pallas_kernels.ops import resolve_backend
from jax_paged.sampling_params import MAX_LOGPROBS
from jax_paged.worker.batch import (
    MAX_BIAS_IDS,
    BatchBuilder,
    Bucket,
    attention_metadata,
    empty_sampling_inputs,
    layout,
    plan_buckets,
    sampling_batch,
    unpack,
)
from jax_paged.worker.block_mover import BlockMover
from jax_paged.worker.compilation import ONE_GRAPH, CompiledBuckets, use_persistent_cache
from jax_paged.worker.kv_cache import (
    CPU_KV_CACHE_BYTES,
    KVCacheLayout,
    allocate_kv_cache,
    gpu_kv_cache_bytes,
    kv_cache_sharding,
    plan_layout,
)
from jax_paged.worker.prompt_logprobs import PromptLogprobs
from jax_paged.worker.sampler import sample

# Slots of the pool: they are numbered by int32.
MAX_SLOTS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """What a runner has come to: sizes, limits, names."""

    model_name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    backend: str
    block_size: int
    num_blocks: int
    num_swap_blocks: int
    layout: KVCacheLayout
    kv_cache_bytes: int
    weight_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: frozenset[int]
    max_logprobs: int
    sampling_defaults: dict[str, Any]
    decoder_start_token_id: int | None  # of an encoder-decoder model


class ModelRunner:
    """Owns weights and pool, and runs steps.

    Args:
        args: Model and limits.
        loaded: A model in memory to serve, in place of args.model; its weights stay the caller's.

    Raises:
        ValueError: If the model can't be loaded or a limit does not fit it.
    """

    def __init__(self, args: EngineArgs, loaded: LoadedModel | None = None) -> None:
        self._backend: Backend = resolve_backend(args.attention_backend, name="attention_backend")
        use_persistent_cache()
        self._owns_weights = loaded is None
        if loaded is None:
            loaded = load_model(resolve_model_dir(args.model), args.dtype)
        device = jax.devices()[0]
        on_cpu = device.platform == "cpu"
        self._mesh = Mesh(np.array([device]), (TENSOR,))
        self._replicated = NamedSharding(self._mesh, PartitionSpec())
        self._graphdef, state = nnx.split(loaded.model)
        specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, PartitionSpec))
        leaves, self._treedef = jax.tree.flatten(state)
        shardings = [NamedSharding(self._mesh, spec) for spec in specs]
        # A flat list: a nested one costs twice as much to pass, at every step.
        self._weights: list[Array] = jax.device_put(leaves, shardings)
        self._layout = plan_layout(loaded.model.kv_cache_specs())
        encodes = isinstance(loaded.model, EncoderDecoderLM)
        self._hidden_size = loaded.config.hidden_size

        max_model_len = loaded.max_model_len if args.max_model_len is None else args.max_model_len
        check_int("max_model_len", max_model_len, 2, loaded.max_model_len)
        max_num_seqs = args.max_num_seqs or (64 if on_cpu else 256)
        max_num_batched_tokens = args.max_num_batched_tokens or (512 if on_cpu else 2048)
        if not args.enable_chunked_prefill:
            if args.max_num_batched_tokens is None:
                max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
            name = "max_num_batched_tokens (with enable_chunked_prefill=False)"
            check_int(name, max_num_batched_tokens, max_model_len)
        self._max_tokens = max_num_batched_tokens
        self._dtype = loaded.dtype
        self._per_block = self._layout.block_bytes(args.block_size, loaded.dtype)
        self._block_size = args.block_size
        self._vocab_size, self._max_model_len = loaded.vocab_size, max_model_len
        self._max_logprobs = min(MAX_LOGPROBS, loaded.vocab_size)
        self._max_blocks_per_seq = -(-max_model_len // args.block_size)
        self.num_traces = 0
        buckets = plan_buckets(max_num_seqs, max_num_batched_tokens)
        num_blocks = self._num_blocks(args, device, buckets)
        # No more than what all running sequences can fill.
        most_swapped = max_num_seqs * self._max_blocks_per_seq * len(self._layout.groups)
        num_swap_blocks = min(int(args.swap_space * 2**30) // self._per_block, most_swapped)

        self.config = RunnerConfig(
            model_name=args.model,
            architecture=loaded.architecture,
            vocab_size=loaded.vocab_size,
            max_model_len=max_model_len,
            dtype=str(loaded.dtype),
            backend=self._backend,
            block_size=args.block_size,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            layout=self._layout,
            kv_cache_bytes=num_blocks * self._per_block,
            weight_bytes=loaded.weight_bytes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_token_ids=loaded.eos_token_ids,
            max_logprobs=self._max_logprobs,
            sampling_defaults=loaded.sampling_defaults,
            decoder_start_token_id=loaded.config.decoder_start_token_id if encodes else None,
        )
        self._builder = BatchBuilder(
            block_size=args.block_size,
            num_blocks=num_blocks,
            groups=self._layout.groups,
            max_model_len=max_model_len,
            vocab_size=loaded.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            checks_inputs=checks_inputs(),
        )
        self._empty_inputs: dict[int, tuple[Array, Array, Array]] = {}
        self._kv_cache = allocate_kv_cache(self._layout, num_blocks, args.block_size, self._dtype, self._mesh)
        self._mover = BlockMover(
            layout=self._layout,
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            block_size=args.block_size,
            dtype=self._dtype,
            max_copies=max_num_seqs,
            mesh=self._mesh,
            backend=self._backend,
        )
        hidden = self._replicated_shape((max_num_batched_tokens, self._hidden_size), self._dtype)
        with self._precision():
            self._prompt_logprobs = PromptLogprobs(
                self._weights,
                lambda weights, hidden: self._model(weights).logits(hidden),
                hidden,
                self._max_logprobs,
                self._replicated,
            )
        self._encode_lens = _encode_lens(max_model_len) if encodes else []
        encoders = [f"encode {n}" for n in self._encode_lens]

        def lower(key: Bucket | str) -> jax.stages.Lowered:
            if isinstance(key, Bucket):
                return self._lower(key, num_blocks)
            return self._lower_encoder(key, num_blocks) if key in encoders else self._mover.lower(key)

        options = ONE_GRAPH if self._backend == "pallas" else None
        # Last, as it leaves threads behind.
        self._compiled = CompiledBuckets(buckets, [*encoders, *self._mover.programs], lower, options)

    @property
    def buckets(self) -> tuple[str, ...]:
        """Names of the shapes that steps are padded to."""
        return tuple(map(str, self._compiled.buckets))

    def compile_plan(self) -> str:
        """Returns a table of the buckets: shapes, seconds and bytes of what is compiled."""
        return self._compiled.plan()

    def wait_until_compiled(self) -> None:
        """Returns when every bucket is compiled; until then steps may use a larger one than needed."""
        self._compiled.wait()

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """Runs one step: builds the batch, runs the model and samples. The pool is updated in place."""
        rows = output.scheduled
        self._move_blocks(output)
        self._encode(output)
        if not rows:
            return StepOutput([], [], [], [])
        bucket = self._compiled.smallest_ready(
            is_decode=rows[-1].num_tokens == 1,
            num_tokens=output.num_batched_tokens,
            num_seqs=output.num_logits_rows,
        )
        inputs = self._builder.build(output, bucket)
        empty = self._empty(bucket)
        sampling_inputs = [e if x is None else x for x, e in zip(inputs[1:], empty, strict=True)]
        placed = jax.device_put([inputs.packed, *sampling_inputs], self._replicated)
        results, details, hidden, self._kv_cache = self._compiled[bucket].execute(
            self._weights, self._kv_cache, *placed
        )
        token_ids, logprobs, is_finite = np.asarray(results)[:, : output.num_logits_rows]
        token_ids, logprobs = token_ids.tolist(), logprobs.view(np.float32).tolist()
        counts = np.array([len(row.sampling) or 1 for row in rows])
        # How many most likely tokens each sample needs, by its row of logits.
        samples = [row.group if row.sampling else None for row in rows for _ in row.sampling or (None,)]
        wanted = {j: _num_top(group) for j, group in enumerate(samples) if group is not None}
        top = read_details(details) if any(n is not None for n in wanted.values()) else None
        return StepOutput(
            token_ids=[token_ids[j] for j in wanted],
            logprobs=[_token_logprobs(logprobs[j], j, n, top) for j, n in wanted.items()],
            is_finite=is_finite[np.cumsum(counts) - counts].astype(bool).tolist(),
            prompt_logprobs=self._prompt_logprobs.of_step(rows, self._weights, hidden),
        )

    def close(self) -> None:
        """Frees pool and weights (not those of a model that the caller brought); the runner is done."""
        self._compiled.stop()
        arrays = [*self._kv_cache, *(x for inputs in self._empty_inputs.values() for x in inputs)]
        for array in arrays + (self._weights if self._owns_weights else []):
            array.delete()
        self._kv_cache, self._weights, self._empty_inputs = [], [], {}
        del self._compiled, self._prompt_logprobs, self._graphdef

    def _move_blocks(self, output: SchedulerOutput) -> None:
        """Swaps and copies, in this order: blocks swapped out may be taken again in the same step."""

        def run(program: str, *args: Any) -> Any:
            return self._compiled[program].execute(*args)

        if output.blocks_to_swap_out:
            self._mover.swap_out(run, self._kv_cache, output.blocks_to_swap_out)
        if output.blocks_to_swap_in:
            self._kv_cache = self._mover.swap_in(run, self._kv_cache, output.blocks_to_swap_in)
        if output.blocks_to_copy:
            self._kv_cache = self._mover.copy(run, self._kv_cache, output.blocks_to_copy)

    def _encode(self, output: SchedulerOutput) -> None:
        """Runs the encoder for requests that begin: what their decoder attends to is written to the pool."""
        for group, tables in output.to_encode:
            size = next(n for n in self._encode_lens if n >= len(group.encoder_token_ids))
            inputs = self._builder.build_encoder(group.encoder_token_ids, tables, size)
            placed = jax.device_put(inputs, self._replicated)
            program = self._compiled[f"encode {size}"]
            self._kv_cache = program.execute(self._weights, self._kv_cache, *placed)

    def _lower_encoder(self, program: str, num_blocks: int) -> jax.stages.Lowered:
        n, layout = int(program.removeprefix("encode ")), self._layout

        def encode(
            weights: list[Array], pool: list[Array], tokens: Array, length: Array, slots: Array
        ) -> Any:
            self.num_traces += 1
            model = self._model(weights)
            return model.write_encoded(
                tokens, length, pool, slots, places=layout.places, backend=self._backend
            )

        sharding = kv_cache_sharding(self._mesh)
        shape = layout.pool_shape(num_blocks, self._block_size)
        pool = [jax.ShapeDtypeStruct(shape, self._dtype, sharding=sharding)] * layout.num_pools
        shapes = ((n,), (), (len(layout.groups), n))
        inputs = [self._replicated_shape(shape, jnp.int32) for shape in shapes]
        jitted = jax.jit(encode, donate_argnums=1, out_shardings=[sharding] * len(pool))
        with self._precision():
            return jitted.trace(self._weights, pool, *inputs).lower()

    def _step(
        self,
        bucket: Bucket,
        weights: list[Array],
        kv_cache: list[Array],
        packed: Array,
        history: Array,
        bias_ids: Array,
        bias_values: Array,
    ) -> tuple[Array, Array, Array, list[Array]]:
        """The step of one bucket, as it is traced.

        Returns:
            int32 [3, B] token ids, bits of the log-probabilities, whether finite; int32 [B, 1 + 2N] rank,
            most likely ids, bits of their log-probabilities; the hidden states, padded to the largest
            bucket's rows; the pool.
        """
        self.num_traces += 1
        layout = self._layout
        fields = unpack(packed, bucket, self._max_blocks_per_seq, len(layout.groups))
        model = self._model(weights)
        metadata = attention_metadata(fields, bucket, self._backend, layout.places)
        hidden, kv_cache = model.paged(fields["tokens"], kv_cache, metadata)
        logits = model.logits(hidden[fields["logits_rows"]])
        batch = sampling_batch(fields, history, bias_ids, bias_values)
        sampled = sample(logits, batch, max_logprobs=self._max_logprobs)
        results = jnp.stack([sampled.token_ids, _bits(sampled.logprob), sampled.is_finite.astype(jnp.int32)])
        details = jnp.concatenate(
            [sampled.rank[:, None], sampled.top_token_ids, _bits(sampled.top_logprobs)], axis=1
        )
        padding = 0 if bucket.is_decode else self._max_tokens - bucket.num_tokens
        return results, details, jnp.pad(hidden, ((0, padding), (0, 0))), kv_cache

    def _model(self, weights: list[Array]) -> Any:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, weights))

    def _lower(self, bucket: Bucket, num_blocks: int) -> jax.stages.Lowered:
        def step(*args: Any) -> tuple[Array, Array, Array, list[Array]]:
            return self._step(bucket, *args)

        _, size = layout(bucket, self._max_blocks_per_seq, len(self._layout.groups))
        pool_sharding = kv_cache_sharding(self._mesh)
        shape = self._layout.pool_shape(num_blocks, self._block_size)
        pool = [jax.ShapeDtypeStruct(shape, self._dtype, sharding=pool_sharding)] * self._layout.num_pools
        b = bucket.num_seqs
        inputs = [
            self._replicated_shape((size,), jnp.int32),
            self._replicated_shape((b, self._max_model_len), jnp.int32),
            self._replicated_shape((b, MAX_BIAS_IDS), jnp.int32),
            self._replicated_shape((b, MAX_BIAS_IDS), jnp.float32),
        ]
        out_shardings = (self._replicated,) * 3 + ([pool_sharding] * len(pool),)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=out_shardings)
        with self._precision():
            return jitted.trace(self._weights, pool, *inputs).lower()

    def _precision(self) -> AbstractContextManager[None]:
        # float32 means float32: GPUs would multiply in TF32, which is not exact to the token.
        return jax.default_matmul_precision("highest" if self._dtype == jnp.float32 else "default")

    def _replicated_shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)

    def _num_blocks(self, args: EngineArgs, device: Any, buckets: list[Bucket]) -> int:
        if args.num_gpu_blocks_override is not None:
            most = MAX_SLOTS // args.block_size
            check_int("num_gpu_blocks_override", args.num_gpu_blocks_override, 2, most)
            return args.num_gpu_blocks_override
        if args.kv_cache_memory_bytes is not None:
            num_bytes = args.kv_cache_memory_bytes
        elif device.platform == "cpu":
            num_bytes = CPU_KV_CACHE_BYTES
        else:
            stats = device.memory_stats()
            if stats is None:
                raise ValueError(
                    "kv_cache_memory_bytes is None, and this device's allocator does not tell how much "
                    "memory is left; allowed: a number of bytes"
                )
            num_bytes = gpu_kv_cache_bytes(stats, self._step_bytes(buckets), args.gpu_memory_utilization)
        num_blocks = num_bytes // self._per_block
        if num_blocks < 2:
            raise ValueError(
                f"the pool would have {num_bytes} bytes; allowed: at least two blocks of {self._per_block} "
                "bytes (kv_cache_memory_bytes)"
            )
        return min(num_blocks, MAX_SLOTS // args.block_size)

    def _step_bytes(self, buckets: list[Bucket]) -> int:
        """Returns the memory that steps need beside weights and pool: the largest tells, with a tiny pool."""
        largest = max(buckets, key=lambda b: b.num_tokens)
        memory = self._lower(largest, num_blocks=2).compile().memory_analysis()
        assert memory is not None, "a GPU's compiler tells what a program needs"
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        row_bytes = 4 * (self._max_model_len + 2 * MAX_BIAS_IDS)
        empty_inputs = row_bytes * sum({bucket.num_seqs for bucket in buckets})
        return memory.temp_size_in_bytes + results + memory.generated_code_size_in_bytes + empty_inputs

    def _empty(self, bucket: Bucket) -> tuple[Array, Array, Array]:
        if bucket.num_seqs not in self._empty_inputs:
            self._empty_inputs[bucket.num_seqs] = jax.device_put(
                empty_sampling_inputs(bucket, self._max_model_len, self._vocab_size), self._replicated
            )
        return self._empty_inputs[bucket.num_seqs]


def _encode_lens(max_model_len: int) -> list[int]:
    """Returns the few lengths that texts for an encoder are padded to."""
    lens = [n for n in (32, 128, 512, 2048) if n < max_model_len]
    return [*lens, max_model_len]


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _num_top(group: SequenceGroup) -> int | None:
    """Returns how many most likely tokens a request needs at each step; None if no log-probabilities."""
    return 2 * group.beam_params.beam_width if group.beam_params else group.sampling_params.logprobs


def _token_logprobs(logprob: float, i: int, num_top: int | None, top: Details | None) -> TokenLogprobs:
    if num_top is None or top is None:
        return TokenLogprobs(logprob, 0, [], [])
    rank, ids, logprobs = top
    return TokenLogprobs(logprob, rank[i], ids[i][:num_top], logprobs[i][:num_top])
