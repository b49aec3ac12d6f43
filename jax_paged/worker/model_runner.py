"""The device side of an engine: owns weights, pool and seats, and runs steps on them."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.config.engine_args import EngineArgs, checks_inputs
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.attention import Attend
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.features.hooks import Hook
from jax_paged.models.weights import LoadedModel
from jax_paged.worker import kv_cache
from jax_paged.worker.batch_builder import BatchBuilder, empty_sampling_inputs
from jax_paged.worker.block_mover import BlockMover
from jax_paged.worker.block_tables import write_block_tables
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.compiler import CompiledPrograms, trim_heap
from jax_paged.worker.compilation.programs import SeatArrays, TraceContext
from jax_paged.worker.distributed.process_group import OneProcess, ProcessGroup
from jax_paged.worker.features import prompt_logprobs
from jax_paged.worker.features.encoder_decoder import encode
from jax_paged.worker.features.lora import AdapterArrays
from jax_paged.worker.features.multimodal.image_encoder import ImageEncoder
from jax_paged.worker.features.pooling.pooler import plan_pooling
from jax_paged.worker.features.user_functions import host_processors
from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor
from jax_paged.worker.features.user_functions.processor_states import KeptStates
from jax_paged.worker.host_blocks import HostBlocks
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.pipeline.own_stage import OwnStage
from jax_paged.worker.pipeline.stages import seat_shapes
from jax_paged.worker.sampling.logits_rows import LogitsRows, plan_logits_rows
from jax_paged.worker.sampling.sampler import Sampler
from jax_paged.worker.sampling.token_counts import reset_token_counts
from jax_paged.worker.served_model import ServedModel
from jax_paged.worker.step_result import PendingStep
from jax_paged.worker.traced_step import StepProgram


class ModelRunner:
    """Runs the steps of one scheduler, on one device or several.

    Args:
        args: Model and limits.
        loaded: A model in memory to serve, in place of args.model; its weights stay the caller's.
        hooks: What requests may ask for by name.
        attend: Attends in place of args.attention_backend.
        sampler: Chooses tokens in place of the sampler.
        logits_processors: What requests may ask for by name, ahead of the sampler.
        first_device: The first of its devices, among those that JAX sees.
        group: The processes whose devices they are; None for this one alone.
        beside: A runner of the same arguments, whose weights and programs it shares; its pool is its own.

    Attributes:
        config: What the settings have come to.
        builder: Builds the inputs of steps.
        image_encoder: What it has made of images must be forgotten when the weights are exchanged.
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
        group: ProcessGroup | None = None,
        beside: "ModelRunner | None" = None,
    ) -> None:
        self._group = group = group or OneProcess()
        parts = loaded, hooks, attend, sampler, logits_processors
        self._shared = model = beside._shared if beside else ServedModel(args, *parts, first_device, group)
        self.config, self._stages, self._context = model.config, model.stages, model.stages[-1]
        self.served, self._weights = model.served[0], model.weights
        self._replicated = NamedSharding(model.grids[-1].mesh, PartitionSpec())
        self._adapters = AdapterArrays(self._context.lora, model.grids[0])
        self._input_batch = InputBatch(
            max_num_seqs=self.config.max_num_seqs,
            num_groups=len(self._context.layout.groups),
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
            groups=self._context.layout.groups,
            vocab_size=self.config.vocab_size,
            checks_inputs=checks_inputs(),
            shares_prefixes=self._context.shares_prefixes,
            embed_size=self._context.embeds_size,
            num_state_slots=self.config.state_slots[0],
            has_mrope=self._context.has_mrope,
        )
        # One more than can be swapped: block 0 stays unused.
        num_swapped = self.config.num_swap_blocks + 1
        swapped = [x for stage in self._stages for x in stage.pool(num_swapped)] if num_swapped > 1 else []
        self._host = HostBlocks(swapped)
        self._mover = BlockMover(
            num_blocks=self.config.num_blocks,
            max_copies=self.config.max_num_seqs,
            store=group.everywhere("store", self._host.store) if swapped else None,
            load=group.everywhere("load", self._host.load) if swapped else None,
        )
        num_slots, num_swapped = self.config.state_slots
        swapped = self._context.states(num_swapped + 1) if num_swapped else []
        self._host_states = HostBlocks(swapped)
        self._state_mover = BlockMover(
            num_blocks=num_slots,
            max_copies=self.config.max_num_seqs,
            store=group.everywhere("store states", self._host_states.store) if swapped else None,
            load=group.everywhere("load states", self._host_states.load) if swapped else None,
            of_states=True,
        )
        self._place = group.everywhere("place", functools.partial(_placed, sharding=self._replicated))
        self._states_on_host: list[np.ndarray] = []
        self.allocate()
        self._kept_states = KeptStates()
        images, is_invariant = self.config.images, self.config.batch_invariant
        self.image_encoder = ImageEncoder(images.cache_bytes if images else 0, batch_invariant=is_invariant)
        self._pending: collections.deque[PendingStep] = collections.deque()
        # Last, as it leaves threads behind.
        movers = [*self._mover.programs, *(self._state_mover.programs if num_slots else [])]
        self._compiled = model.compiled(movers)
        self._has_mixed = any(not b.is_decode and not b.num_drafts for b in self._compiled.buckets)
        kept = self._kv_cache, self._seat_arrays, self._adapters.arrays
        run = self._compiled.run
        if group.links is not None:
            run = OwnStage(group.engine, group.links, self._context, self._compiled).run
        self._run = group.begin(self._compiled, run, self._weights, kept)
        model.num_users += 1

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
        return self._host.arrays

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
        self._kv_cache = self._state_mover.move(self._run, self._kv_cache, output)
        held = self._weights, self._kv_cache
        self._kv_cache = encode(self._run, self._shared.encoders, output, self.config, *held)
        failed = self.image_encoder.encode(self._run, self._weights, output, batch)
        self._adapters.load(self._run, output.adapter_loads)
        counts = reset_token_counts(self._run, self._seat_arrays.token_counts, resets)
        self._seat_arrays = self._seat_arrays._replace(token_counts=counts, processor_states=states)
        logits_rows = plan_logits_rows(output)
        if output.scheduled:
            pending = self._step(output, logits_rows)
            if failed:
                seats = batch.seats_of(row.seq_id for row in output.scheduled).tolist()
                errors = {i: failed[seat] for i, seat in enumerate(seats) if seat in failed}
                pending = dataclasses.replace(pending, errors=errors)
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
        first = len(self._kv_cache) - len(self._context.layout.states)
        blocks, states = self._kv_cache[:first], self._kv_cache[first:]
        self._kv_cache = [kv_cache.filled(array, value) for array in blocks]
        self._kv_cache += [jnp.full_like(array, value) for array in states]

    def allocate(self) -> None:
        """Takes memory for the pool and for what is kept by seat: zeros, but for states of processors."""
        self._adapters.restore()
        shapes = [x for stage in self._stages for x in stage.kv_cache()], seat_shapes(self._stages)
        make = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding))
        seats: SeatArrays[Any]
        self._kv_cache, seats = make(shapes)
        kept = _placed(*self._states_on_host, sharding=self._replicated) or seats.processor_states
        self._seat_arrays = seats._replace(processor_states=list(kept))
        self._empty_inputs: dict[int, tuple[Array, ...]] = {}

    def free(self) -> None:
        """Frees what `allocate` has taken, between two steps; no sequence goes on in its seat."""
        self._adapters.free()
        self._states_on_host = [np.array(states) for states in self._seat_arrays.processor_states]
        for array in jax.tree.leaves([self._kv_cache, self._seat_arrays, self._empty_inputs]):
            array.delete()
        self._kv_cache, self._empty_inputs = [], {}

    def close(self) -> None:
        """Frees pool and weights (not those of a model that the caller brought); the runner is done."""
        self._shared.close()
        if self._kv_cache:
            self.free()
        self._weights = []
        self._pending.clear()
        del self._compiled, self._context, self._stages, self._seat_arrays, self._shared, self._run
        trim_heap()

    def _step(self, output: SchedulerOutput, logits_rows: LogitsRows) -> PendingStep:
        targets = prompt_logprobs.row_targets(output, self._input_batch)
        functions = self._input_batch.functions
        pooling = plan_pooling(output, self._input_batch, self._context)
        bucket = self._bucket(output, wants_hidden=bool(targets or functions or pooling))
        inputs = self.builder.build(output, logits_rows, bucket)
        tables = self._seat_arrays.block_tables
        tables = write_block_tables(self._run, tables, inputs.changes_ahead)
        self._seat_arrays = self._seat_arrays._replace(block_tables=tables)
        given = inputs.bias_ids, inputs.bias_values, inputs.token_mask
        sampling_inputs = [e if x is None else x for x, e in zip(given, self._empty(bucket), strict=True)]
        more = [self._adapters.arrays] if bucket.has_adapters else []
        more += [] if inputs.embeds is None else [inputs.embeds]
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
                self._run, self._shared.prompt_logprobs, self._weights, hidden, output, targets
            ),
            redrawn=redrawn,
            captured=captured,
            capturing=self._input_batch.capturing(output, self.config.capturing) if captured else {},
            num_shared_tokens=inputs.num_shared_tokens,
            pooled=pooling and pooling.begin(self._run, self._weights, hidden),
        )

    def _bucket(self, output: SchedulerOutput, *, wants_hidden: bool) -> Bucket:
        """Returns the shape for a step; hidden states are read of mixed steps, if there are any."""
        num_tokens, batch = output.num_batched_tokens, self._input_batch
        has_embeds = batch.has_embeds(output)
        is_mixed = self._has_mixed and (wants_hidden or has_embeds or num_tokens > len(output.scheduled))
        if self.config.batch_invariant:  # one program serves all
            has_embeds = self._context.embed_size > 0 and (is_mixed or not self._has_mixed)
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

    def _empty(self, bucket: Bucket) -> tuple[Array, ...]:
        if bucket.num_logits not in self._empty_inputs:
            inputs = empty_sampling_inputs(
                bucket.num_logits, self.config.vocab_size, self._context.num_mask_words
            )
            self._empty_inputs[bucket.num_logits] = self._place(*inputs)
        return self._empty_inputs[bucket.num_logits]


def _placed(*arrays: np.ndarray, sharding: NamedSharding) -> tuple[Array, ...]:
    """Returns arrays that every device has, also those of other processes, which do the same."""
    place = jax.make_array_from_callback
    return tuple(place(x.shape, sharding, lambda index, x=x: x[index]) for x in arrays)
