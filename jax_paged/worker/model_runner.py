"""The device side of an engine: owns weights, pool and seats, and runs steps on them."""

import collections
import dataclasses
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.config import EngineArgs, EngineConfig, checks_inputs
from jax_paged.core.runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.attention import Attend
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.encoder_decoder import EncoderDecoderLM
from jax_paged.models.hooks import Hook, check_hooks
from jax_paged.models.weights import LoadedModel
from jax_paged.pallas_kernels.native import products
from jax_paged.pallas_kernels.quantization import DTYPES
from jax_paged.worker import host_processors, kv_cache, prompt_logprobs
from jax_paged.worker.adapters import AdapterArrays, LoadAdapterProgram, plan_additions
from jax_paged.worker.batch_builder import BatchBuilder, empty_sampling_inputs
from jax_paged.worker.block_mover import BlockMover
from jax_paged.worker.block_tables import WriteBlockTablesProgram, write_block_tables
from jax_paged.worker.buckets import Bucket, plan_verifying
from jax_paged.worker.compilation import ONE_GRAPH, WIDE_VECTORS, CompiledPrograms, use_persistent_cache
from jax_paged.worker.encoder import encode, plan_encoders
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.kept_states import KeptStates
from jax_paged.worker.kernel_check import choose_backend
from jax_paged.worker.load_drafter import load_drafter
from jax_paged.worker.logits_processors import LogitsProcessor, check_processors
from jax_paged.worker.logits_rows import LogitsRows, plan_logits_rows
from jax_paged.worker.mesh import device_mesh
from jax_paged.worker.plan_steps import plan_steps
from jax_paged.worker.pooling import PoolProgram, plan_pooling
from jax_paged.worker.programs import Program, TraceContext
from jax_paged.worker.prompt_logprobs import PromptLogprobsProgram
from jax_paged.worker.resolve_config import ModelFacts, resolve_config
from jax_paged.worker.results import PendingStep
from jax_paged.worker.sampler import Sampler
from jax_paged.worker.step import StepProgram, step_bytes
from jax_paged.worker.token_counts import ResetTokenCountsProgram, reset_token_counts
from jax_paged.worker.weights import ServedWeights, load, pooling_of

_LOGGER = logging.getLogger(__name__)


class ModelRunner:
    """Runs the steps of one scheduler on one device.

    Args:
        args: Model and limits.
        loaded: A model in memory to serve, in place of args.model; its weights stay the caller's.
        hooks: What requests may ask for by name.
        attend: Attends in place of args.attention_backend.
        sampler: Chooses tokens in place of the sampler.
        logits_processors: What requests may ask for by name, ahead of the sampler.
        first_device: The first of its devices, among those that JAX sees.

    Attributes:
        config: What the settings have come to.
        builder: Builds the inputs of steps.
        served: The weights; they may be exchanged between steps.

    Raises:
        ValueError: If the model can't be loaded or a limit does not fit it.
    """

    def __init__(
        self,
        args: EngineArgs,
        loaded: LoadedModel | LanguageModel | None = None,
        hooks: Sequence[Hook] = (),
        attend: Attend | None = None,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        first_device: int = 0,
    ) -> None:
        # Before the weights take the GPU's memory.
        backend, backend_reason = choose_backend(args, loaded, attend)
        use_persistent_cache()
        self._mesh = mesh = device_mesh(args.tensor_parallel_size, first_device, args.data_parallel_size)
        device = mesh.devices[0]
        with jax.default_device(device):
            is_own, loaded = loaded is None, load(args, loaded)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        matmul_backend = products.resolve_products(args.matmul_backend, loaded.dtype, name="matmul_backend")
        if args.matmul_backend == "auto" and matmul_backend == "xla" and device.platform == "cpu":
            problem = products.problem(loaded.dtype)
            _LOGGER.warning("XLA packs the weights in every step; oneDNN does it once, but %s", problem)
        layout = kv_cache.plan_layout(
            loaded.model.kv_cache_specs(), DTYPES.get(args.kv_cache_dtype, loaded.dtype)
        )
        packs = matmul_backend == "onednn"
        captured = check_hooks(loaded.model, hooks)
        check_processors(logits_processors, loaded.vocab_size)
        additions = plan_additions(args, loaded)
        hook_params, params_def = jax.tree.flatten([hook.params for hook in hooks])
        draft, draft_weights = load_drafter(args, loaded, layout, mesh, packs=packs)
        extra = [*hook_params, *draft_weights]
        self.served = ServedWeights(loaded.model, is_own=is_own, packs=packs, mesh=mesh, extra=extra)
        self._weights = self.served.arrays
        layouts = (layout,) if draft is None else (layout, draft.layout)
        self._adapters = AdapterArrays(additions.lora, self._replicated)
        self._encodes = isinstance(loaded.model, EncoderDecoderLM)
        facts = ModelFacts(
            architecture=loaded.architecture,
            dtype=str(loaded.dtype),
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            weight_bytes=loaded.weight_bytes,
            cache_groups=layout.groups,
            block_bytes=sum(x.block_bytes(args.block_size) for x in layouts),
            eos_token_ids=loaded.eos_token_ids,
            sampling_defaults=loaded.sampling_defaults,
            decoder_start_token_id=loaded.config.decoder_start_token_id if self._encodes else None,
            pooling=pooling_of(args, loaded, is_own=is_own),
            draft_cost=min(1.0, sum(x.nbytes for x in draft_weights) / loaded.weight_bytes),
        )

        def context_of(config: EngineConfig, num_blocks: int) -> TraceContext:
            return TraceContext(
                model=self.served.model,
                weights=self._weights,
                layout=layout,
                num_blocks=num_blocks,
                block_size=config.block_size,
                dtype=loaded.dtype,
                vocab_size=config.vocab_size,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_logprobs=config.max_logprobs,
                backend=backend,
                batch_invariant=config.batch_invariant,
                mesh=mesh,
                is_processed=args.logprobs_mode == "processed_logprobs",
                attend=attend,
                sampler=sampler,
                processors=tuple(logits_processors),
                hooks=tuple(hooks),
                hook_params=params_def,
                captured=captured,
                shares_prefixes=config.cascade_attention and attend is None,
                pooling=facts.pooling,
                draft=draft,
                **additions._asdict(),
            )

        memory = kv_cache.device_memory(device)

        def free_bytes(config: EngineConfig) -> int:
            # What the largest step needs is found out with a tiny pool.
            needed = step_bytes(context_of(config, 2), config.num_scheduler_steps, plan_verifying(config))
            return kv_cache.free_kv_cache_bytes(memory, needed, args.gpu_memory_utilization)

        chosen = {"backend": backend, "matmul_backend": matmul_backend, "free_bytes": free_bytes}
        self.config = dataclasses.replace(
            resolve_config(args, facts, platform=memory.platform, **chosen),
            backend_reason=backend_reason,
            hooks={hook.name: hook.num_args for hook in hooks},
            capturing=frozenset(captured),
            logits_processors={p.name: p.num_args for p in logits_processors},
            stateful=frozenset(p.name for p in logits_processors if p.has_state),
            **additions.settings(args),
        )
        self._context = context_of(self.config, self.config.num_blocks)
        self._encoders = plan_encoders(self.config.max_model_len) if self._encodes else []
        self._prompt_logprobs = PromptLogprobsProgram(loaded.config.hidden_size)
        self._input_batch = InputBatch(
            max_num_seqs=self.config.max_num_seqs,
            num_groups=len(layout.groups),
            max_blocks_per_seq=self._context.max_blocks_per_seq,
            num_blocks=self.config.num_blocks,
            vocab_size=self.config.vocab_size,
            hooks=self.config.hooks,
            processors=self.config.logits_processors,
        )
        self.builder = BatchBuilder(
            self._input_batch,
            block_size=self.config.block_size,
            num_blocks=self.config.num_blocks,
            groups=layout.groups,
            vocab_size=self.config.vocab_size,
            checks_inputs=checks_inputs(),
            shares_prefixes=self._context.shares_prefixes,
            embed_size=self.config.embed_size,
        )
        self._mover = BlockMover(
            layouts=layouts,
            num_blocks=self.config.num_blocks,
            num_swap_blocks=self.config.num_swap_blocks,
            block_size=self.config.block_size,
            max_copies=self.config.max_num_seqs,
            mesh=mesh,
        )
        self._states_on_host: list[np.ndarray] = []
        self.allocate()
        self._kept_states = KeptStates()
        self._pending: collections.deque[PendingStep] = collections.deque()
        context, on_cpu = self._context, memory.platform == "cpu"
        is_bfloat16 = on_cpu and loaded.dtype == jnp.bfloat16
        options = WIDE_VECTORS if is_bfloat16 else ONE_GRAPH if backend == "pallas" else None
        buckets = plan_steps(self.config, on_cpu=on_cpu, packs=packs)
        self._has_mixed = any(not bucket.is_decode and not bucket.num_drafts for bucket in buckets)
        # Last, as it leaves threads behind.
        self._compiled = CompiledPrograms(
            buckets,
            [
                *self._encoders,
                *self._mover.programs,
                WriteBlockTablesProgram(),
                ResetTokenCountsProgram(),
                self._prompt_logprobs,
                *([PoolProgram(loaded.config.hidden_size)] if facts.pooling else ()),
                *([LoadAdapterProgram()] if self.config.max_loras else ()),
            ],
            lambda program: program.lower(context),
            options,
            math.inf if args.max_compile_s is None else args.max_compile_s,
        )

    @property
    def buckets(self) -> list[Bucket]:
        """The shapes that steps are padded to."""
        return self._compiled.buckets

    @property
    def compiled(self) -> CompiledPrograms:
        """Everything that this runner has compiled."""
        return self._compiled

    @property
    def context(self) -> TraceContext:
        """What its programs are traced for."""
        return self._context

    @property
    def arrays(self) -> dict[str, list[Array]]:
        """What lies on the device between steps, in the runner's own lists, by name."""
        return {
            "weights": self._weights,
            "kv_cache": self._kv_cache,
            **{name: jax.tree.leaves(kept) for name, kept in self._seat_arrays._asdict().items()},
        }

    @property
    def host_blocks(self) -> list[np.ndarray]:
        """Host memory for blocks that are swapped out, an array per array of the pool."""
        return self._mover.host

    def wait_until_compiled(self) -> None:
        """Returns when everything is compiled; until then steps may use a larger bucket than needed."""
        self._compiled.wait()

    def dispatch(self, output: SchedulerOutput) -> None:
        """Begins a step: updates the seats, moves blocks, runs encoders, then the model.

        Only swapping out waits for the device, which runs the steps that are dispatched in order.
        """
        states, batch = self._seat_arrays.processor_states, self._input_batch
        self._kept_states.keep(output, batch, states)
        resets = batch.update(output)
        states = self._kept_states.bring_back(output, batch, states, self._place)
        self._kv_cache = self._mover.move(self._run, self._kv_cache, output)
        held = self._weights, self._kv_cache
        self._kv_cache = encode(self._run, self._encoders, output, self.config, *held, self._place)
        self._adapters.load(self._run, output.adapter_loads)
        counts = reset_token_counts(self._run, self._seat_arrays.token_counts, resets, self._place)
        self._seat_arrays = self._seat_arrays._replace(token_counts=counts, processor_states=states)
        logits_rows = plan_logits_rows(output)
        if output.scheduled:
            pending = self._step(output, logits_rows)
            pending.begin_transfer()
        else:
            pending = PendingStep(output.step_id, 0, 0, logits_rows, np.empty(0, np.int32), None, None, [])
        self._pending.append(pending)

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was dispatched, and returns its result."""
        assert self._pending, "no step was dispatched whose result was not asked for yet"
        return self._pending.popleft().read()

    def fill_kv_cache(self, value: float) -> None:
        """Overwrites the whole pool, whatever sequences keep there: to see that nobody reads stale blocks."""
        self._kv_cache = [kv_cache.filled(array, value) for array in self._kv_cache]

    def allocate(self) -> None:
        """Takes memory for the pool and for what is kept by seat: zeros, but for states of processors."""
        self._adapters.restore()
        context, zeros = self._context, functools.partial(jnp.zeros, device=self._replicated)
        self._kv_cache = kv_cache.allocate_kv_cache(
            context.layouts, context.num_blocks, context.block_size, self._mesh
        )
        seats: SeatArrays[Array] = jax.tree.map(lambda x: zeros(x.shape, x.dtype), context.seat_arrays())
        kept = [self._place(states) for states in self._states_on_host] or seats.processor_states
        self._seat_arrays = seats._replace(processor_states=kept)
        self._empty_inputs: dict[int, tuple[Array, Array, Array]] = {}

    def free(self) -> None:
        """Frees what `allocate` has taken, between two steps; no sequence goes on in its seat."""
        self._adapters.free()
        self._states_on_host = [np.array(states) for states in self._seat_arrays.processor_states]
        for array in jax.tree.leaves([self._kv_cache, self._seat_arrays, self._empty_inputs]):
            array.delete()
        self._kv_cache, self._empty_inputs = [], {}

    def close(self) -> None:
        """Frees pool and weights (not those of a model that the caller brought); the runner is done."""
        self._compiled.stop()
        if self._kv_cache:
            self.free()
        self.served.close()
        self._weights = []
        self._pending.clear()
        del self._compiled, self._context, self._seat_arrays

    def _step(self, output: SchedulerOutput, logits_rows: LogitsRows) -> PendingStep:
        targets = prompt_logprobs.row_targets(output, self._input_batch)
        functions = self._input_batch.functions
        pooling = plan_pooling(output, self._input_batch, self._context)
        bucket = self._bucket(output, wants_hidden=bool(targets or functions or pooling))
        inputs = self.builder.build(output, logits_rows, bucket)
        tables = self._seat_arrays.block_tables
        tables = write_block_tables(self._run, tables, inputs.changes_ahead, self._place)
        self._seat_arrays = self._seat_arrays._replace(block_tables=tables)
        given = inputs.bias_ids, inputs.bias_values, inputs.token_mask
        sampling_inputs = [e if x is None else x for x, e in zip(given, self._empty(bucket), strict=True)]
        more = [self._adapters.arrays] if bucket.has_adapters else []
        more += [] if inputs.embeds is None else [self._place(inputs.embeds)]
        held = self._weights, self._kv_cache, self._seat_arrays
        results, details, hidden, self._kv_cache, self._seat_arrays, captured = self._run(
            StepProgram(bucket), *held, inputs.packed, *sampling_inputs, *more
        )
        redrawn = {}
        if functions:
            args = self._input_batch, self.builder.fields(inputs, bucket), sampling_inputs
            redrawn = host_processors.redraw(self._compiled, self._weights, hidden, *args)
        seats = self._input_batch.seats_of([sample.seq_id for sample in output.samples])
        num_top = self._input_batch.num_top_logprobs[seats][logits_rows.samples]
        return PendingStep(
            step_id=output.step_id,
            num_rows=len(output.scheduled),
            num_samples=len(output.samples),
            logits_rows=logits_rows,
            num_top=num_top,
            results=results,
            details=details if (num_top >= 0).any() else None,
            prompt_logprobs=prompt_logprobs.begin_rows(
                self._run, self._prompt_logprobs, self._weights, hidden, output, targets, self._place
            ),
            redrawn=redrawn,
            captured=captured,
            capturing=self._input_batch.capturing(output, self.config.capturing) if captured else {},
            num_shared_tokens=inputs.num_shared_tokens,
            pooled=pooling and pooling.begin(self._run, self._weights, hidden, self._place),
        )

    def _bucket(self, output: SchedulerOutput, *, wants_hidden: bool) -> Bucket:
        """Returns the shape for a step; hidden states are read of mixed steps, if there are any."""
        num_tokens, batch = output.num_batched_tokens, self._input_batch
        has_embeds = batch.has_embeds(output)
        is_mixed = self._has_mixed and (wants_hidden or has_embeds or num_tokens > len(output.scheduled))
        if self.config.batch_invariant:  # one program serves all
            has_embeds = self.config.embed_size > 0 and (is_mixed or not self._has_mixed)
        return self._compiled.smallest_ready(
            is_decode=not is_mixed,
            num_tokens=num_tokens,
            num_seqs=len(output.scheduled),
            num_logits=output.num_logits_rows,
            num_steps=self.config.num_scheduler_steps if output.burst else 1,
            num_drafts=output.num_drafts if self.config.speculation else 0,
            has_adapters=self.config.max_loras > 0
            and (self.config.batch_invariant or has_embeds or batch.has_adapters(output)),
            has_embeds=has_embeds,
        )

    def _run(self, program: Program, *args: Any) -> Any:
        return self._compiled.run(program, *args)

    def _place(self, array: Any) -> Any:
        return jax.device_put(array, self._replicated)

    def _empty(self, bucket: Bucket) -> tuple[Array, Array, Array]:
        if bucket.num_logits not in self._empty_inputs:
            inputs = empty_sampling_inputs(
                bucket.num_logits, self.config.vocab_size, self._context.num_mask_words
            )
            self._empty_inputs[bucket.num_logits] = jax.device_put(inputs, self._replicated)
        return self._empty_inputs[bucket.num_logits]
