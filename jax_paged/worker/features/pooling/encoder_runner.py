"""Model runner for encoder-only models, which compute whole texts in one step and have no KV cache."""

import collections
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.scheduler_output import NewSequence, ScheduledSequence, SchedulerOutput
from jax_paged.errors import check
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.checkpoint import read_config, resolve_model_dir
from jax_paged.models.families.encoder import EncoderModel
from jax_paged.models.features.pooling import PoolingSpec
from jax_paged.models.quantization.quantize import choose_online_dtype, has_quantized
from jax_paged.models.registry import POOLING_MODELS, get_architecture
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.compilation.compiler import CompiledPrograms, trim_heap
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.compilation.persistent_cache import use_persistent_cache
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.features.pooling.pooler import HIDDEN, POOLED, pooling_of
from jax_paged.worker.kv_cache import KVCacheLayout
from jax_paged.worker.loading.caller_parts import CustomComponents
from jax_paged.worker.loading.mesh import choose_matmul_backend, choose_packing, device_grids
from jax_paged.worker.loading.resolve_config import ModelProperties, resolve_config
from jax_paged.worker.loading.weights import ServedWeights, load
from jax_paged.worker.sampling.sampler import SamplerOptions

# Number of KV blocks that the scheduler sees. Texts do not use them. The scheduler needs some because it
# keeps a share of its blocks free.
_NUM_BLOCKS = 16
# Smallest padded length (tokens). Each larger one is twice as long as the one before.
_MIN_LENGTH = 16
# Numbers of texts per program. Batches are split into these sizes, so that no text is padding.
_BATCH_SIZES = (64, 16, 4, 1)


@dataclasses.dataclass(frozen=True, order=True)
class EncodeTextsProgram(Program):
    """Program that encodes and pools B texts of up to N tokens.

    Its arguments are the weights, int32 tokens [B, N], and int32 [3, B]: the number of tokens of each text,
    the start of its second text, and the token whose hidden state is taken (-1 for the mean of all). It
    returns the pooled values, float32 [B, P], and the hidden states [B, N, E].

    Args:
        num_tokens: Padded length of the texts, N (tokens).
        num_texts: Number of texts, B.
    """

    num_tokens: int
    num_texts: int

    def __str__(self) -> str:
        return f"encode {self.num_tokens}x{self.num_texts}"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""

        def encode(weights: list[Array], tokens: Array, texts: Array) -> tuple[Array, Array]:
            model: Any = context.merge(weights)
            lens, second_texts, pooled_tokens = texts
            hidden = model.encode(tokens, lens, second_texts)
            position = jnp.arange(self.num_tokens)
            is_live = position < lens[:, None]
            mean = is_live / lens[:, None]
            shares = jnp.where(pooled_tokens[:, None] < 0, mean, position == pooled_tokens[:, None])
            states = jnp.where(is_live[:, :, None], hidden.astype(jnp.float32), 0)
            return model.pooled_output(jnp.einsum("bn,bne->be", shares.astype(jnp.float32), states)), hidden

        shapes = (self.num_texts, self.num_tokens), (3, self.num_texts)
        inputs = [context.shape(shape, jnp.int32) for shape in shapes]
        return jax.jit(encode, out_shardings=context.replicated).trace(context.weights, *inputs)


@dataclasses.dataclass(frozen=True, eq=False)
class _PendingBatch:
    """A batch of texts that the device is computing.

    Args:
        rows: Indices of the texts in SchedulerOutput.scheduled.
        pooling_types: SamplingParams.pooling of each text.
        pooled: Pooled values, from EncodeTextsProgram.
        hidden: Hidden states, from EncodeTextsProgram.
    """

    rows: list[int]
    pooling_types: list[str | None]
    pooled: Array
    hidden: Array


class EncoderRunner:
    """Model runner for an encoder-only model on one device. Each scheduled sequence is a whole text.

    It has the interface of ModelRunner that LocalExecutor uses. A step draws no tokens: the tokens in its
    result are placeholders.

    Args:
        args: Engine arguments.
        loaded: A model in memory to serve instead of args.model; the caller keeps its weights.
        first_device: Index of the device in JAX's list of devices.

    Raises:
        ValueError: If the model can't be loaded, or an argument does not fit it.
    """

    def __init__(
        self,
        args: EngineArgs,
        loaded: LoadedModel | LanguageModel | None,
        first_device: int,
    ) -> None:
        use_persistent_cache()
        _check_single_device(args)
        (grid,) = device_grids(args, first_device, 1)
        owns_weights, (loaded,) = loaded is None, load(args, loaded, (grid,), (0,))
        allowed = "False because encoder-only models run different programs for different batch sizes"
        check(not args.batch_invariant, "batch_invariant", True, allowed)
        self._replicated = NamedSharding(grid.mesh, PartitionSpec())
        matmul_backend = choose_matmul_backend(args, loaded.dtype)
        quantized = choose_online_dtype([loaded.model], args.quantization)
        self.served = ServedWeights(
            loaded.model,
            owns_weights=owns_weights,
            packing=choose_packing(
                args, matmul_backend, is_quantized=has_quantized([loaded.model], quantized)
            ),
            quantized_dtype=quantized,
            grid=grid,
            extra=[],
        )
        pooling = pooling_of(args, loaded, is_from_checkpoint=owns_weights)
        self.config = _resolve_config(args, loaded, pooling, grid.devices[0].platform, matmul_backend)
        weakref.finalize(self, self.served.close).atexit = False
        self.context = context = TraceContext(
            model=self.served.model,
            weights=self.served.arrays,
            layout=KVCacheLayout((), (), 0, 1, 1, loaded.dtype),
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            dtype=loaded.dtype,
            vocab_size=loaded.vocab_size,
            max_model_len=self.config.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            backend="xla",
            batch_invariant=False,
            mesh=grid.mesh,
            features=FeatureSet(),
            sampling=SamplerOptions(max_logprobs=0),
        )
        self.arrays: dict[str, list[Array]] = {"weights": self.served.arrays, "kv_cache": []}
        self.host_blocks: list[np.ndarray] = []
        self._texts: dict[int, NewSequence] = {}
        self._pending: collections.deque[tuple[SchedulerOutput, list[_PendingBatch]]] = collections.deque()
        self.buckets = plan_texts(self.config.max_model_len, self.config.max_num_batched_tokens)
        self.compiled = CompiledPrograms([], list(self.buckets), lambda p: p.lower(context))
        weakref.finalize(self, self.compiled.stop_without_waiting).atexit = False

    def dispatch(self, output: SchedulerOutput) -> None:
        """Starts a step. Texts of similar length are computed together."""
        if output.step_id == 0:
            self._texts.clear()
        for seq_id in output.released_seq_ids:
            del self._texts[seq_id]
        self._texts |= {new.seq_id: new for new in output.new_sequences}
        order = sorted(range(len(output.scheduled)), key=lambda i: output.scheduled[i].num_tokens)
        batches = []
        while order:
            longest = output.scheduled[order[-1]].num_tokens
            size = min(p.num_tokens for p in self.buckets if p.num_tokens >= longest)
            # Texts of at most half the size use a smaller program.
            fitting = [i for i in order if 2 * output.scheduled[i].num_tokens > size or size == _MIN_LENGTH]
            sizes = [p.num_texts for p in self.buckets if p.num_tokens == size]
            num = max(n for n in sizes if n <= len(fitting))
            batches.append(self._encode(fitting[:num], output.scheduled, EncodeTextsProgram(size, num)))
            order = [i for i in order if i not in fitting[:num]]
        self._pending.append((output, batches))

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest dispatched step, and returns its result."""
        output, batches = self._pending.popleft()
        captured: dict[int, dict[str, np.ndarray]] = {}
        for batch in batches:
            pooled = np.asarray(batch.pooled)
            hidden = np.asarray(batch.hidden).astype(np.float32) if "ALL" in batch.pooling_types else None
            for j, (i, pooling_type) in enumerate(zip(batch.rows, batch.pooling_types, strict=True)):
                captured[i] = {POOLED: pooled[j]}
                if pooling_type == "ALL" and hidden is not None:
                    captured[i] = {HIDDEN: hidden[j, : output.scheduled[i].num_tokens]}
        num_rows, num_samples = len(output.scheduled), len(output.samples)
        return ModelRunnerOutput(
            step_id=output.step_id,
            token_ids=[[0]] * num_samples,
            logprobs=[[TokenLogprobs(0.0, 0, [], [])]] * num_samples,
            is_finite=[True] * num_rows,
            prompt_logprobs=[[] for _ in range(num_rows)],
            captured=captured,
        )

    def check_weights(self) -> None:
        """Raises RuntimeError if the weights of a model in memory were replaced or deleted."""
        self.served.check()

    def forget_images(self) -> None:
        """Does nothing, because texts contain no images."""

    def allocate(self) -> None:
        """Does nothing, because there is no KV cache."""

    def free(self) -> None:
        """Does nothing, because there is no KV cache."""

    def close(self) -> None:
        """Frees the weights, unless they belong to the caller. The runner can't be used afterwards."""
        self.compiled.stop()
        self.served.close()
        self._pending.clear()
        trim_heap()

    def _encode(
        self, rows: list[int], scheduled: Sequence[ScheduledSequence], program: EncodeTextsProgram
    ) -> _PendingBatch:
        """Starts computing a batch of texts.

        Args:
            rows: Indices of the texts in `scheduled`.
            scheduled: The scheduled sequences of the step.
            program: The program for this number and length of texts.
        """
        tokens = np.zeros((len(rows), program.num_tokens), np.int32)
        texts, pooling_types = np.zeros((3, len(rows)), np.int32), []
        for j, i in enumerate(rows):
            n, params = scheduled[i].num_tokens, self._texts[scheduled[i].seq_id].request.sampling_params
            pooling_types.append(params.pooling)
            tokens[j, :n] = scheduled[i].token_ids
            pooled_token = {"LAST": n - 1, "CLS": 0}.get(params.pooling or "", -1)
            texts[:, j] = n, n if params.second_text is None else params.second_text, pooled_token
        inputs = jax.device_put((tokens, texts), self._replicated)
        pooled, hidden = self.compiled.run(program, self.served.arrays, *inputs)
        pooled.copy_to_host_async()
        return _PendingBatch(rows, pooling_types, pooled, hidden)


def _check_single_device(args: EngineArgs) -> None:
    """Raises ValueError if the arguments ask for several devices."""
    allowed = "1 because encoder-only models run on one device"
    check(args.tensor_parallel_size == 1, "tensor_parallel_size", args.tensor_parallel_size, allowed)
    num_stages = args.pipeline_parallel_size
    check(num_stages == 1, "pipeline_parallel_size", num_stages, allowed)


def _resolve_config(
    args: EngineArgs,
    loaded: LoadedModel,
    pooling: PoolingSpec | None,
    platform: str,
    matmul_backend: str,
) -> EngineConfig:
    """Returns the configuration of an engine that computes each text in one step and caches nothing."""
    properties = ModelProperties(
        architecture=loaded.architecture,
        dtype=str(loaded.dtype),
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        weight_bytes=loaded.weight_bytes,
        cache_groups=(),
        block_bytes=1,
        eos_token_ids=frozenset(),
        sampling_defaults={},
        pooling=pooling,
    )
    args = dataclasses.replace(
        args,
        num_gpu_blocks_override=_NUM_BLOCKS,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        num_scheduler_steps=1,
    )
    return resolve_config(
        args,
        properties,
        platform=platform,
        backend="xla",
        matmul_backend=matmul_backend,
        free_bytes=lambda _: 0,
    )


def is_encoder(args: EngineArgs, loaded: LoadedModel | LanguageModel | None) -> bool:
    """Returns whether the engine's model is an encoder-only model; reads no weights."""
    if loaded is not None:
        model = loaded.model if isinstance(loaded, LoadedModel) else loaded
        return isinstance(model, EncoderModel)
    hf_config = read_config(resolve_model_dir(args.model), args.hf_overrides or {})
    return POOLING_MODELS.get(get_architecture(hf_config)) == "encoder"


def check_encoder_args(args: EngineArgs, custom: CustomComponents) -> None:
    """Checks that no feature is requested that only generative models support.

    Raises:
        ValueError: If such a feature is requested.
    """
    unsupported: dict[str, Any] = {
        "hooks": list(custom.hooks) or None,
        "attend": custom.attend,
        "sampler": custom.sampler,
        "logits_processors": list(custom.logits_processors) or None,
        "enable_lora": args.enable_lora or None,
        "enable_prompt_embeds": args.enable_prompt_embeds or None,
        "speculative_config": args.speculative_config,
    }
    for name, value in unsupported.items():
        check(value is None, name, value, "None because the model is encoder-only")


def plan_texts(max_model_len: int, max_num_batched_tokens: int) -> list[EncodeTextsProgram]:
    """Returns the programs for all padded lengths and batch sizes, in ascending order."""
    lengths = [_MIN_LENGTH]
    while lengths[-1] < max_model_len:
        lengths.append(2 * lengths[-1])
    return [
        EncodeTextsProgram(n, b)
        for n in (*lengths[:-1], max_model_len)
        for b in reversed(_BATCH_SIZES)
        if b == 1 or b * (n // 2 + 1) <= max_num_batched_tokens
    ]
