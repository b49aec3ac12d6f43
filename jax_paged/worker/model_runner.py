"""The device side of an engine: owns weights, pool and batch slots, and runs steps on them."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.config.engine_args import EngineArgs, EngineConfig, checks_inputs
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.worker import kv_cache as kv_cache_arrays
from jax_paged.worker.batch_builder import BatchBuilder, StepInputs, empty_sampling_inputs
from jax_paged.worker.block_mover import BlockMover
from jax_paged.worker.block_tables import write_block_tables
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.compiler import CompiledPrograms, trim_heap
from jax_paged.worker.compilation.programs import DeviceInputs, StepResult, StepState, TraceContext
from jax_paged.worker.composition import (
    Device,
    RowOutputs,
    RunnerFeatures,
    StepFields,
    StepNeeds,
    make_feature_rows,
    plan_shared_prefixes,
)
from jax_paged.worker.distributed.process_group import OneProcess, ProcessGroup
from jax_paged.worker.host_blocks import HostBlocks
from jax_paged.worker.input_batch import InputBatch, TokenCountReset
from jax_paged.worker.pipeline.own_stage import OwnStage
from jax_paged.worker.pipeline.stages import state_shapes
from jax_paged.worker.sampling.logits_rows import LogitsRows, plan_logits_rows
from jax_paged.worker.sampling.token_counts import reset_token_counts
from jax_paged.worker.served_model import NO_PARTS, CallerParts, ServedModel
from jax_paged.worker.step_result import PendingStep
from jax_paged.worker.traced_step import StepProgram, buffer_options

_FIELDS_BY_SLOT = [f for f in dataclasses.fields(StepState) if f.name != "kv_cache"]


class ModelRunner:
    """Runs the steps of one scheduler, on one device or several.

    Args:
        args: Model and limits.
        parts: A model and functions of the caller.
        first_device: The first of its devices, among those that JAX sees.
        group: The processes whose devices they are; None for this one alone.
        beside: A runner of the same arguments, whose weights and programs it shares; its pool is its own.

    Attributes:
        config: What the settings have come to.
        builder: Builds the inputs of steps.
        features: What features run around steps.
        served: The weights; they may be exchanged between steps.

    Raises:
        ValueError: If the model can't be loaded or a limit does not fit it.
    """

    def __init__(
        self,
        args: EngineArgs,
        parts: CallerParts = NO_PARTS,
        first_device: int = 0,
        group: ProcessGroup | None = None,
        beside: "ModelRunner | None" = None,
    ) -> None:
        self._group = group = group or OneProcess()
        self._shared = model = beside._shared if beside else ServedModel(args, parts, first_device, group)
        self.config, self._stages, self._context = model.config, model.stages, model.stages[-1]
        self.served, self._weights = model.served[0], model.weights
        self._replicated = NamedSharding(model.grids[-1].mesh, PartitionSpec())
        self._place = group.everywhere("place", functools.partial(_placed, sharding=self._replicated))
        self._input_batch = _make_input_batch(self.config, self._context)
        self.builder = _make_builder(self.config, self._context, self._input_batch)
        self.features = RunnerFeatures(
            self._context, self.config, self._input_batch, model.grids[0], self._place
        )
        self._movers, self._host = self._make_movers()
        self.allocate()
        self._pending: collections.deque[PendingStep] = collections.deque()
        # Last, as it leaves threads behind.
        self._compiled = model.compiled([program for mover in self._movers for program in mover.programs])
        self._has_mixed = any(not b.is_decode and not b.num_drafts for b in self._compiled.buckets)
        run = self._compiled.run
        if group.links is not None:
            run = OwnStage(group.engine, group.links, self._context, self._compiled).run
        kept = self._state, self.features.arrays
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
            "kv_cache": self._state.kv_cache,
            **{f.name: jax.tree.leaves(getattr(self._state, f.name)) for f in _FIELDS_BY_SLOT},
        }

    @property
    def host_blocks(self) -> list[np.ndarray]:
        """Host memory for blocks that are swapped out, an array per array of the pool."""
        return self._host.arrays

    def wait_until_compiled(self) -> None:
        """Returns when everything is compiled; until then steps may use a larger bucket than needed."""
        self._compiled.wait()

    def dispatch(self, output: SchedulerOutput) -> None:
        """Begins a step; returns as soon as the device has what it needs.

        1. Batch slots take in the step. 2. What comes ahead of it runs: moved blocks, then features. 3. The
        smallest compiled bucket that fits is chosen. 4. Its inputs are built. 5. It runs. 6. Its results are
        pending, and the features that follow a step are started.

        Only swapping out waits for the device, which runs the steps that are dispatched in order.
        """
        resets = self._input_batch.update(output)
        self._state = self._prepare(output, resets)
        if not output.scheduled:
            return self._pending.append(PendingStep.empty(output.step_id))
        logits_rows, needs = plan_logits_rows(output), self.features.needs(output)
        bucket = self._smallest_ready(output, needs)
        inputs = self.builder.build(output, logits_rows, bucket)
        self._write_tables_ahead(inputs.changes_ahead)
        device_inputs = self._device_inputs(inputs, bucket)
        result, self._state = self._run(StepProgram(bucket), self._weights, self._state, device_inputs)
        device = Device(self._run, self._compiled, self._weights)
        row_outputs = self.features.finish(device, output, needs, inputs.fields, device_inputs, result)
        pending = self._pending_step(output, logits_rows, inputs, result, row_outputs)
        pending.begin_transfer()
        self._pending.append(pending)

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was dispatched, and returns its result."""
        assert self._pending, "no step was dispatched whose result was not asked for yet"
        return self._pending.popleft().read()

    def fill_kv_cache(self, value: float) -> None:
        """Overwrites the whole pool, whatever sequences keep there: to see that nobody reads stale blocks."""
        kv_cache = self._state.kv_cache
        first = len(kv_cache) - len(self._context.layout.states)
        filled = [kv_cache_arrays.filled(array, value) for array in kv_cache[:first]]
        filled += [jnp.full_like(array, value) for array in kv_cache[first:]]
        self._state = dataclasses.replace(self._state, kv_cache=filled)

    def allocate(self) -> None:
        """Allocates the arrays that stay on the device: zeros, or what `free` has kept."""
        make = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding))
        self._state: StepState[Any] = self.features.restore(make(state_shapes(self._stages)))
        self._empty_inputs: dict[int, tuple[Array, ...]] = {}

    def free(self) -> None:
        """Frees what `allocate` has allocated, between two steps; no sequence goes on in its batch slot."""
        self.features.free(self._state)
        for array in jax.tree.leaves([self._state, self._empty_inputs]):
            array.delete()
        self._state, self._empty_inputs = dataclasses.replace(self._state, kv_cache=[]), {}

    def forget_images(self) -> None:
        """Drops the vectors of images, after the weights have changed."""
        self.features.forget_images()

    def close(self) -> None:
        """Frees pool and weights (not those of a model that the caller brought); the runner is done."""
        self._shared.close()
        if self._state.kv_cache:
            self.free()
        self._weights = []
        self._pending.clear()
        del self._compiled, self._context, self._stages, self._state, self._shared, self._run, self.features
        trim_heap()

    def _make_movers(self) -> tuple[list[BlockMover], HostBlocks]:
        """Returns what moves blocks and recurrent states, and the host memory for blocks."""
        config, group = self.config, self._group
        # One more than can be swapped: block 0 stays unused.
        num_swapped = config.num_swap_blocks + 1
        swapped = [x for stage in self._stages for x in stage.pool(num_swapped)] if num_swapped > 1 else []
        host = HostBlocks(swapped)
        movers = [
            BlockMover(
                num_blocks=config.num_blocks,
                max_copies=config.max_num_seqs,
                store=group.everywhere("store", host.store) if swapped else None,
                load=group.everywhere("load", host.load) if swapped else None,
            )
        ]
        num_slots, num_swapped = config.state_slots
        if num_slots:
            swapped = self._context.states(num_swapped + 1) if num_swapped else []
            host_states = HostBlocks(swapped)
            mover = BlockMover(
                num_blocks=num_slots,
                max_copies=config.max_num_seqs,
                store=group.everywhere("store states", host_states.store) if swapped else None,
                load=group.everywhere("load states", host_states.load) if swapped else None,
                of_states=True,
            )
            movers.append(mover)
        return movers, host

    def _prepare(self, output: SchedulerOutput, resets: list[TokenCountReset]) -> StepState[Any]:
        """Runs what comes ahead of a step; returns the state."""
        state, kv_cache = self._state, self._state.kv_cache
        for mover in self._movers:
            kv_cache = mover.move(self._run, kv_cache, output)
        if kv_cache is not state.kv_cache:
            state = dataclasses.replace(state, kv_cache=kv_cache)
        state = self.features.prepare(self._run, self._weights, state, output)
        if resets:
            counts = reset_token_counts(self._run, state.token_counts, resets)
            state = dataclasses.replace(state, token_counts=counts)
        return state

    def _smallest_ready(self, output: SchedulerOutput, needs: StepNeeds) -> Bucket:
        """Returns the bucket for a step; hidden states are read of mixed steps, if there are any."""
        config, num_tokens, num_seqs = self.config, output.num_batched_tokens, len(output.scheduled)
        is_mixed = self._has_mixed and (needs.reads_all_rows or num_tokens > num_seqs)
        has_adapters, has_embeds = self.features.variant(
            output, needs, is_mixed=is_mixed or not self._has_mixed
        )
        return self._compiled.smallest_ready(
            is_decode=not is_mixed,
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_logits=output.num_logits_rows,
            num_steps=config.num_scheduler_steps if output.burst else 1,
            num_drafts=output.num_drafts if config.speculation else 0,
            has_adapters=has_adapters,
            has_embeds=has_embeds,
        )

    def _write_tables_ahead(self, changes: np.ndarray) -> None:
        """Writes the changes of block tables for which the step's buffer has no room."""
        if changes.shape[1]:
            tables = write_block_tables(self._run, self._state.block_tables, changes)
            self._state = dataclasses.replace(self._state, block_tables=tables)

    def _device_inputs(self, inputs: StepInputs, bucket: Bucket) -> DeviceInputs[Any]:
        bias_ids, bias_values, token_mask = self._empty(bucket)
        return DeviceInputs(
            packed=inputs.packed,
            bias_ids=bias_ids if inputs.bias_ids is None else inputs.bias_ids,
            bias_values=bias_values if inputs.bias_values is None else inputs.bias_values,
            token_mask=token_mask if inputs.token_mask is None else inputs.token_mask,
            adapters=self.features.arrays if bucket.has_adapters else [],
            embeds=inputs.embeds,
        )

    def _pending_step(
        self,
        output: SchedulerOutput,
        logits_rows: LogitsRows,
        inputs: StepInputs,
        result: StepResult[Any],
        row_outputs: RowOutputs | None,
    ) -> PendingStep:
        batch_slots = self._input_batch.slots_of([sample.seq_id for sample in output.samples])
        num_top = self._input_batch.num_top_logprobs[batch_slots][logits_rows.samples]
        return PendingStep(
            step_id=output.step_id,
            num_rows=len(output.scheduled),
            num_samples=len(output.samples),
            logits_rows=logits_rows,
            num_top=num_top,
            results=result.tokens,
            details=result.details if (num_top >= 0).any() else None,
            row_outputs=row_outputs,
            num_shared_tokens=inputs.num_shared_tokens,
        )

    def _empty(self, bucket: Bucket) -> tuple[Array, ...]:
        if bucket.num_logits not in self._empty_inputs:
            inputs = empty_sampling_inputs(
                bucket.num_logits, self.config.vocab_size, self._context.num_mask_words
            )
            self._empty_inputs[bucket.num_logits] = self._place(*inputs)
        return self._empty_inputs[bucket.num_logits]


def _make_input_batch(config: EngineConfig, context: TraceContext) -> InputBatch:
    groups = context.layout.groups
    return InputBatch(
        max_num_seqs=config.max_num_seqs,
        num_groups=len(groups),
        max_blocks_per_seq=context.max_blocks_per_seq,
        num_blocks=config.num_blocks,
        vocab_size=config.vocab_size,
        features=make_feature_rows(config, context),
        is_cross=[group.is_cross for group in groups],
    )


def _make_builder(config: EngineConfig, context: TraceContext, batch: InputBatch) -> BatchBuilder:
    return BatchBuilder(
        batch,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        groups=context.layout.groups,
        vocab_size=config.vocab_size,
        checks_inputs=checks_inputs(),
        options=buffer_options(context),
        features=StepFields.of(context, config, batch),
        shared_prefixes=plan_shared_prefixes(context, batch, config.block_size),
    )


def _placed(*arrays: np.ndarray, sharding: NamedSharding) -> tuple[Array, ...]:
    """Returns arrays that every device has, also those of other processes, which do the same."""
    place = jax.make_array_from_callback
    return tuple(place(x.shape, sharding, lambda index, x=x: x[index]) for x in arrays)
