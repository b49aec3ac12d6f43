"""The model runner: owns weights, KV cache and batch slots of one engine, and runs steps on them."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.config.engine_args import EngineArgs, checks_kernel_arguments
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.worker import kv_cache as kv_cache_arrays
from jax_paged.worker.batch_builder import BatchBuilder, StepInputs
from jax_paged.worker.block_mover import BlockMover, HostBlocks
from jax_paged.worker.block_tables import write_block_tables
from jax_paged.worker.compilation.buckets import Bucket, StepVariant
from jax_paged.worker.compilation.compiler import trim_heap
from jax_paged.worker.compilation.programs import DeviceInputs, StepResult, StepState, TraceContext
from jax_paged.worker.distributed.process_group import OneProcess, ProcessGroup
from jax_paged.worker.input_batch import InputBatch, TokenCountReset
from jax_paged.worker.loading.caller_parts import NO_CUSTOM_COMPONENTS, CustomComponents
from jax_paged.worker.pipeline.stage_runner import StageRunner
from jax_paged.worker.pipeline.stages import state_shapes
from jax_paged.worker.sampling.token_counts import reset_token_counts
from jax_paged.worker.served_model import ServedModel
from jax_paged.worker.step_features import (
    ProgramAccess,
    RunnerFeatures,
    StepFields,
    make_feature_rows,
    plan_shared_prefixes,
)
from jax_paged.worker.step_result import PendingStep
from jax_paged.worker.step_rows import LogitsRows, plan_logits_rows
from jax_paged.worker.traced_step import StepProgram, buffer_options

_FIELDS_BY_SLOT = [f for f in dataclasses.fields(StepState) if f.name != "kv_cache"]


class ModelRunner:
    """Runner for the steps of one scheduler, on one or several devices.

    Args:
        args: Arguments of the engine.
        custom: Model and functions that the caller provides.
        first_device: Index of the first device to use, among the devices that JAX sees.
        group: The processes whose devices are used; None for this process alone.
        shared_with: A runner with the same arguments, whose weights and programs this one shares. The KV
            cache is not shared.

    Attributes:
        config: The resolved configuration.
        context: The context for which programs are traced (of the last stage in a pipeline).
        compiled: The compiled programs.
        builder: The builder of step inputs.
        features: The features' work before, in and after a step.
        served: The weights (of the first stage of this process in a pipeline). They may be replaced between
            steps.

    Raises:
        ValueError: If the model cannot be loaded or a limit does not fit it.
    """

    def __init__(
        self,
        args: EngineArgs,
        custom: CustomComponents = NO_CUSTOM_COMPONENTS,
        first_device: int = 0,
        group: ProcessGroup | None = None,
        shared_with: "ModelRunner | None" = None,
    ) -> None:
        self._group = group = group or OneProcess()
        model = shared_with._model if shared_with else ServedModel(args, custom, first_device, group)
        self._model = model
        self.config, self._stages, self.context = model.config, model.stages, model.stages[-1]
        self.served, self._weights = model.served[0], model.weights
        self._replicated = NamedSharding(model.grids[-1].mesh, PartitionSpec())
        self._replicate = group.in_all_processes(
            "place", functools.partial(_replicate, sharding=self._replicated)
        )
        self._input_batch = _make_input_batch(self.config, self.context)
        self.builder = _make_builder(self.config, self.context, self._input_batch)
        self.features = RunnerFeatures(
            self.context, self.config, self._input_batch, model.grids[0], self._replicate
        )
        self._movers, self._host = self._make_movers()
        self.allocate()
        self._pending: collections.deque[PendingStep] = collections.deque()
        # Created near the end because it starts background threads. If the constructor failed after this
        # line, they would be left running.
        self.compiled = model.compiled([program for mover in self._movers for program in mover.programs])
        # There are no mixed buckets if max_num_batched_tokens is 1.
        self._has_mixed = any(not b.is_decode and not b.num_drafts for b in self.compiled.buckets)
        run = self.compiled.run
        if group.links is not None:
            run = StageRunner(group.engine, group.links, self.context, self.compiled).run
        device_arrays = self._state, self.features.arrays
        self._run = group.begin(self.compiled, run, self._weights, device_arrays)
        model.num_users += 1

    @property
    def buckets(self) -> list[Bucket]:
        """The shapes that steps are padded to."""
        return self.compiled.buckets

    @property
    def arrays(self) -> dict[str, list[Array]]:
        """The arrays that stay on the device between steps, by name.

        The runner itself uses the lists of weights and KV cache arrays. A caller may replace arrays in them.
        """
        return {
            "weights": self._weights,
            "kv_cache": self._state.kv_cache,
            **{f.name: jax.tree.leaves(getattr(self._state, f.name)) for f in _FIELDS_BY_SLOT},
        }

    @property
    def host_blocks(self) -> list[np.ndarray]:
        """Host memory for swapped blocks, one array for each KV cache array of blocks."""
        return self._host.arrays

    def dispatch(self, output: SchedulerOutput) -> None:
        """Starts a step and returns without waiting for its result.

        1. The batch slots are updated with the step.
        2. The programs that precede the step run: they move blocks, prepare features and reset token counts.
        3. The smallest compiled bucket that fits the step is chosen.
        4. The inputs are built, and block table changes that do not fit into them are written.
        5. The step runs.
        6. The features that follow a step start their work, and the results are queued for `result`.

        A plain step calls no feature. The device runs dispatched programs in order, so a plain step waits for
        earlier results only to copy blocks to host memory, or to get drawn tokens from a pipeline stage in
        another process. Features may wait for results that they need on the host.
        """
        batch = self._input_batch
        resets = batch.update(output)
        uses_features = (
            self.features.are_on or batch.prompts or batch.features.host_processors or output.scores_drafts
        )
        access = ProgramAccess(self._run, self.compiled, self._weights)
        self._move_blocks(output)
        if uses_features:
            self._state = self.features.prepare(access, self._state, output)
        self._reset_token_counts(resets)
        if not output.scheduled:
            return self._pending.append(PendingStep.empty(output.step_id))
        plan = self.features.plan(output, has_mixed=self._has_mixed) if uses_features else None
        logits_rows = plan_logits_rows(output)
        bucket = self._smallest_ready(output, None if plan is None else plan.variant)
        inputs = self.builder.build(output, logits_rows, bucket)
        self._write_changes_before_step(inputs.changes_before_step)
        device_inputs = self._device_inputs(inputs, bucket)
        if plan is not None:
            device_inputs = self.features.with_adapters(device_inputs, plan)
        result, self._state = self._run(StepProgram(bucket), self._weights, self._state, device_inputs)
        pending = self._pending_step(output, logits_rows, inputs, result)
        if plan is not None:
            fields = inputs.fields
            row_outputs = self.features.finish(access, output, plan, fields, device_inputs, result)
            pending = dataclasses.replace(pending, row_outputs=row_outputs)
        pending.begin_transfer()
        self._pending.append(pending)

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest dispatched step whose result has not been read, and returns its result."""
        assert self._pending, "result() was called, but no dispatched step is pending"
        return self._pending.popleft().read()

    def check_weights(self) -> None:
        """Raises RuntimeError if the served weights are the caller's, and were replaced or deleted."""
        if not self.served.owns_weights:
            self.served.check()

    def fill_kv_cache(self, value: float) -> None:
        """Fills the whole KV cache with a value. Tests use this to prove that no step reads stale blocks."""
        kv_cache = self._state.kv_cache
        first = len(kv_cache) - len(self.context.layout.states)
        filled = [kv_cache_arrays.filled(array, value) for array in kv_cache[:first]]
        filled += [jnp.full_like(array, value) for array in kv_cache[first:]]
        self._state = dataclasses.replace(self._state, kv_cache=filled)

    def allocate(self) -> None:
        """Allocates the arrays that stay on the device: zeros, or the contents that `free` saved."""
        make = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding))
        self._state: StepState[Any] = self.features.restore(make(state_shapes(self._stages)))
        self._empty_inputs: dict[int, tuple[Array, ...]] = {}

    def free(self) -> None:
        """Frees the arrays that `allocate` allocates.

        No step may be in flight. All sequences must take new batch slots and be recomputed afterwards.
        """
        self.features.free(self._state)
        for array in jax.tree.leaves([self._state, self._empty_inputs]):
            array.delete()
        self._state, self._empty_inputs = dataclasses.replace(self._state, kv_cache=[]), {}

    def forget_images(self) -> None:
        """Drops cached image embeddings, because the weights have changed."""
        self.features.forget_images()

    def close(self) -> None:
        """Frees the KV cache and the weights, except weights of the caller's model.

        The runner cannot be used again. Weights that other runners share are freed when the last runner is
        closed.
        """
        self._model.close()
        if self._state.kv_cache:
            self.free()
        self._weights = []
        self._pending.clear()
        del self.compiled, self.context, self._stages, self._state, self._model, self._run, self.features
        trim_heap()

    def _make_movers(self) -> tuple[list[BlockMover], HostBlocks]:
        """Returns the movers of blocks and of recurrent states, and the host memory for blocks."""
        num_slots, num_swapped_slots = self.config.num_state_slots, self.config.num_swap_state_slots
        # Number 0 is never used, so host memory needs one more block or slot than can be swapped.
        num_swapped = self.config.num_swap_blocks + 1
        blocks = [x for stage in self._stages for x in stage.pool(num_swapped)] if num_swapped > 1 else []
        mover, host_blocks = self._make_mover(self.config.num_blocks, blocks)
        if not num_slots:
            return [mover], host_blocks
        states = self.context.states(num_swapped_slots + 1) if num_swapped_slots else []
        state_mover, _ = self._make_mover(num_slots, states, moves_states=True)
        return [mover, state_mover], host_blocks

    def _make_mover(
        self, num_blocks: int, swapped: list[jax.ShapeDtypeStruct], *, moves_states: bool = False
    ) -> tuple[BlockMover, HostBlocks]:
        host, in_all_processes = HostBlocks(swapped), self._group.in_all_processes
        mover = BlockMover(
            num_blocks=num_blocks,
            max_copies=self.config.max_num_seqs,
            store=in_all_processes("store" + " states" * moves_states, host.store) if swapped else None,
            load=in_all_processes("load" + " states" * moves_states, host.load) if swapped else None,
            moves_states=moves_states,
        )
        return mover, host

    def _move_blocks(self, output: SchedulerOutput) -> None:
        """Swaps and copies blocks and moves recurrent states before a step."""
        moves = output.blocks_to_swap_out, output.blocks_to_swap_in, output.blocks_to_copy
        if any(moves) or any(output.state_moves):
            kv_cache = self._state.kv_cache
            for mover in self._movers:
                kv_cache = mover.move(self._run, kv_cache, output)
            self._state = dataclasses.replace(self._state, kv_cache=kv_cache)

    def _reset_token_counts(self, resets: list[TokenCountReset]) -> None:
        """Initializes the token counts of sequences with penalties that take a batch slot."""
        if resets:
            counts = reset_token_counts(self._run, self._state.token_counts, resets)
            self._state = dataclasses.replace(self._state, token_counts=counts)

    def _smallest_ready(self, output: SchedulerOutput, variant: StepVariant | None) -> Bucket:
        """Returns the smallest compiled bucket for a step.

        Args:
            output: The step.
            variant: The variant that features need; None for a plain step.
        """
        num_tokens, num_seqs = output.num_batched_tokens, len(output.scheduled)
        if variant is None:
            variant = StepVariant(is_decode=not self._has_mixed or num_tokens == num_seqs)
        return self.compiled.smallest_ready(
            variant, num_tokens=num_tokens, num_seqs=num_seqs, num_logits=output.num_logits_rows
        )

    def _write_changes_before_step(self, changes: np.ndarray) -> None:
        """Writes the block table changes that do not fit into the packed buffer."""
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
            embeds=inputs.embeds,
        )

    def _pending_step(
        self,
        output: SchedulerOutput,
        logits_rows: LogitsRows,
        inputs: StepInputs,
        result: StepResult[Any],
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
            num_saved_reads=inputs.num_saved_reads,
        )

    def _empty(self, bucket: Bucket) -> tuple[Array, ...]:
        if bucket.num_logits not in self._empty_inputs:
            inputs = self.builder.empty_sampling_inputs(bucket.num_logits)
            self._empty_inputs[bucket.num_logits] = self._replicate(*inputs)
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
        checks_inputs=checks_kernel_arguments(),
        options=buffer_options(context),
        features=StepFields.of(context, config, batch),
        shared_prefixes=plan_shared_prefixes(context, batch, config.block_size),
    )


def _replicate(*arrays: np.ndarray, sharding: NamedSharding) -> tuple[Array, ...]:
    """Returns copies of host arrays on all devices.

    If the devices belong to several processes, every process must call this with the same arrays.
    """
    make_array = jax.make_array_from_callback
    return tuple(make_array(x.shape, sharding, lambda index, x=x: x[index]) for x in arrays)
