"""The features' work in a step: before its inputs are built, in its inputs, and after it.

    StepFields       fills the fields of the packed buffer that belong to features
    RunnerFeatures   runs programs for a step: prepare() and plan() before it, finish() after it
    RowOutputs       the outputs that finish() has started; they are read with the step's result

A plain step of an engine without features calls nothing in this module.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.worker.compilation.buckets import Bucket, StepVariant
from jax_paged.worker.compilation.compiler import CompiledPrograms
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.compilation.programs import DeviceInputs, StepResult, StepState, TraceContext
from jax_paged.worker.features import cascade, multi_step, prompt_embeds
from jax_paged.worker.features.encoder_decoder import encode, fill_encoder_lens, plan_encoders
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.features.lora import AdapterArrays
from jax_paged.worker.features.multimodal.image_encoder import ImageEncoder
from jax_paged.worker.features.multimodal.mrope import fill_mrope, mrope_positions
from jax_paged.worker.features.pooling.pooler import PendingPooled, PlannedPooling, plan_pooling
from jax_paged.worker.features.prompt_logprobs import (
    PendingPromptLogprobs,
    PromptLogprobsProgram,
    begin_rows,
    row_targets,
)
from jax_paged.worker.features.state_slots import fill_state_slots
from jax_paged.worker.features.user_functions import host_processors
from jax_paged.worker.features.user_functions.hook_captures import PendingCaptures, plan_captures
from jax_paged.worker.features.user_functions.processor_states import SavedStates, fill_processor_args
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.step_rows import LogitsRows, ScheduledRows


def has_step_features(features: FeatureSet, config: EngineConfig) -> bool:
    """Returns whether every step of an engine calls RunnerFeatures, whatever its requests use."""
    is_traced = features.has_encoder or features.lora or features.embed_path or features.image_spec
    is_traced = is_traced or features.hooks or features.processors or features.pooling
    return bool(is_traced or config.speculation or config.num_scheduler_steps > 1)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepFields:
    """Writer of the packed buffer fields that belong to features.

    Args:
        input_batch: The batch slots.
        block_size: Number of tokens per block.
        num_state_slots: Number of slots for recurrent states; 0 if no layer has such states.
        total_embed_size: Size of all embedding vectors of a token together, see FeatureSet.total_embed_size.
        has_mrope: Whether image tokens have M-RoPE positions.
    """

    input_batch: InputBatch
    block_size: int
    num_state_slots: int = 0
    total_embed_size: int = 0
    has_mrope: bool = False

    @classmethod
    def of(cls, context: TraceContext, config: EngineConfig, batch: InputBatch) -> "StepFields | None":
        """Returns the writer for an engine; None if the engine uses no feature that has fields."""
        features = context.features
        if not has_step_features(features, config) and not config.num_state_slots:
            return None
        return StepFields(
            input_batch=batch,
            block_size=config.block_size,
            num_state_slots=config.num_state_slots,
            total_embed_size=features.total_embed_size,
            has_mrope=features.has_mrope,
        )

    def fill(
        self,
        view: dict[str, np.ndarray],
        rows: ScheduledRows,
        logits_rows: LogitsRows,
        sample_slots: np.ndarray,
        output: SchedulerOutput,
        bucket: Bucket,
    ) -> np.ndarray | None:
        """Fills the fields; returns the embeddings of token rows, float32 [T, E], if the bucket has them."""
        batch, n = self.input_batch, len(rows.batch_slots)
        fill_encoder_lens(view["context_lens"], batch, rows.batch_slots)
        if self.num_state_slots:
            fill_state_slots(view["state_slots"], output, self.num_state_slots)
        if self.has_mrope:
            positions = view["mrope_positions"][:, : len(rows.positions)]
            fill_mrope(positions, batch, rows.token_batch_slots, rows.positions)
        if batch.features.hook_args.size:
            view["hook_args"][:n] = batch.features.hook_args[rows.batch_slots].view(np.int32)
        if batch.features.processor_args.size:
            fill_processor_args(view["processor_args"], batch, sample_slots)
        if bucket.num_drafts and logits_rows.num_drafts is not None:
            view["num_drafts"][: len(sample_slots)] = logits_rows.num_drafts
        if bucket.num_steps > 1:
            multi_step.fill(
                view, batch, rows.batch_slots, rows.start, output.num_multi_step_tokens, self.block_size
            )
        if bucket.has_adapters:
            view["adapter_slots"][:n] = batch.features.adapter_slots[rows.batch_slots]
        if not bucket.has_embeds:
            return None
        return prompt_embeds.step_embeds(batch, view["has_embeds"], output, self.total_embed_size)


def make_feature_rows(config: EngineConfig, context: TraceContext) -> FeatureRows:
    """Returns the owner of the features' per-sequence state."""
    return FeatureRows(
        config.max_num_seqs,
        hooks=config.hooks,
        processors=config.logits_processors,
        mrope_positions=mrope_positions if context.features.has_mrope else None,
    )


def plan_shared_prefixes(
    context: TraceContext, batch: InputBatch, block_size: int
) -> cascade.SharedPrefixes | None:
    """Returns the finder of shared leading blocks; None if the engine does not use cascade attention."""
    groups = context.layout.groups if context.min_shared_rows else ()
    # Sequences share the same leading blocks in all groups without a window, because a prefix is cached or
    # forked in all of these groups together. So one group is enough to find them.
    full = [g for g, group in enumerate(groups) if group.window is None and not group.is_cross]
    return cascade.SharedPrefixes(batch, full[0], block_size) if full else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturePlan:
    """Requirements of the features for one step.

    Args:
        variant: The bucket variant that the step needs.
        targets: By index in SchedulerOutput.scheduled: prompt tokens or drafts that get log-probabilities,
            and the number of most likely tokens to report.
        pooling: The pooling to do after the step; None for none.
        redraws: Whether tokens are drawn again, because requests have logits processors on the host.
    """

    variant: StepVariant
    targets: dict[int, tuple[list[int], int]]
    pooling: PlannedPooling | None
    redraws: bool


class ProgramAccess(NamedTuple):
    """The objects with which features run programs.

    Args:
        run: Runs a program with the given arguments, in all processes of the engine.
        compiled: The compiled programs. Features may add further programs.
        weights: The weights of the model.
    """

    run: Callable[..., Any]
    compiled: CompiledPrograms
    weights: list[Array]


class RunnerFeatures:
    """Features of one engine that run programs or host code around its steps.

    Args:
        context: The context for which programs are traced.
        config: The configuration of the engine.
        batch: The batch slots.
        grid: The devices.
        to_devices: Copies host arrays to all devices.

    Attributes:
        are_on: Whether every step calls these methods. If False, only steps with prompt log-probabilities,
            host logits processors or scored drafts do.
        adapters: Adapter arrays; None without adapters.
        image_encoder: Encoder of images; None without images.
    """

    def __init__(
        self,
        context: TraceContext,
        config: EngineConfig,
        batch: InputBatch,
        grid: DeviceGrid,
        to_devices: Callable[..., tuple[Array, ...]],
    ) -> None:
        features = context.features
        self._context, self._config, self._batch, self._to_devices = context, config, batch, to_devices
        self.are_on = has_step_features(features, config)
        self._encoders = plan_encoders(context.max_model_len) if features.has_encoder else []
        self.adapters = AdapterArrays(features.lora, grid) if features.lora else None
        self.image_encoder: ImageEncoder | None = None
        if config.images is not None:
            is_invariant = config.batch_invariant
            self.image_encoder = ImageEncoder(config.images.cache_bytes, batch_invariant=is_invariant)
        self._processors = SavedStates() if features.processors else None
        self._image_errors: dict[int, str] = {}

    @property
    def arrays(self) -> list[Array]:
        """The adapter arrays."""
        return [] if self.adapters is None else self.adapters.arrays

    def prepare(
        self, access: ProgramAccess, state: StepState[Array], output: SchedulerOutput
    ) -> StepState[Array]:
        """Runs the programs of features that precede a step.

        It moves the states of logits processors, runs encoders, encodes images and loads adapters. Returns
        the state.
        """
        if self._processors is not None:
            states = self._processors.move(output, self._batch, state.processor_states, self._to_devices)
            state = dataclasses.replace(state, processor_states=states)
        if output.encoder_inputs:
            pool = encode(access.run, self._encoders, output, self._config, access.weights, state.kv_cache)
            state = dataclasses.replace(state, kv_cache=pool)
        if self.image_encoder is not None:
            self._image_errors = self.image_encoder.encode(access.run, access.weights, output, self._batch)
        if self.adapters is not None:
            self.adapters.load(access.run, output.adapter_loads)
        return state

    def plan(self, output: SchedulerOutput, *, has_mixed: bool) -> FeaturePlan:
        """Returns the requirements of the features for a step.

        Args:
            output: The step.
            has_mixed: Whether the engine has buckets for mixed steps. Only their programs pad hidden states
                to max_num_batched_tokens, the size that the programs of features expect.
        """
        batch, rows, config = self._batch, self._batch.features, self._config
        targets, pooling = row_targets(output, batch), plan_pooling(output, batch, self._context)
        redraws, has_embeds = bool(rows.host_processors), rows.has_embeds(output)
        reads_all_rows = bool(targets or pooling or redraws or has_embeds)
        is_mixed = has_mixed and (reads_all_rows or output.num_batched_tokens > len(output.scheduled))
        if config.batch_invariant:  # all steps of a size use the same program
            has_embeds = self._context.features.embed_size > 0 and (is_mixed or not has_mixed)
        # If the engine has adapters, the buckets with embeddings have them too (plan_variants).
        has_adapters = self.adapters is not None and (
            config.batch_invariant or has_embeds or rows.has_adapters(output)
        )
        num_drafts = 0
        if config.speculation and output.max_num_drafts:
            num_drafts = config.speculation.num_tokens
            assert output.max_num_drafts <= num_drafts, f"a sequence has more than {num_drafts} drafts"
        variant = StepVariant(
            is_decode=not is_mixed,
            num_steps=config.num_scheduler_steps if output.num_multi_step_tokens else 1,
            num_drafts=num_drafts,
            has_adapters=has_adapters,
            has_embeds=has_embeds,
        )
        return FeaturePlan(variant=variant, targets=targets, pooling=pooling, redraws=redraws)

    def with_adapters(self, inputs: DeviceInputs[Any], plan: FeaturePlan) -> DeviceInputs[Any]:
        """Adds the adapter arrays to the inputs of a step if its bucket has adapters."""
        return dataclasses.replace(inputs, adapters=self.arrays) if plan.variant.has_adapters else inputs

    def finish(
        self,
        access: ProgramAccess,
        output: SchedulerOutput,
        plan: FeaturePlan,
        fields: dict[str, np.ndarray],
        inputs: DeviceInputs[Any],
        result: StepResult[Array],
    ) -> "RowOutputs":
        """Starts the work of features that follows a step.

        It redraws tokens with logits processors on the host, and starts prompt log-probabilities, pooling and
        the transfer of captured values.
        """
        hidden: Any = result.hidden  # None in multi-step decoding, where no feature reads it
        redrawn = {}
        if plan.redraws:
            redrawn = host_processors.redraw(
                access.compiled, access.weights, hidden, self._batch, fields, inputs
            )
        scored: list[PendingPromptLogprobs] = []
        if plan.targets:
            program = PromptLogprobsProgram(self._context.features.hidden_size)
            scored = begin_rows(access.run, program, access.weights, hidden, output, plan.targets)
        return RowOutputs(
            prompt_logprobs=scored,
            captures=plan_captures(output, self._batch, self._config.capturing_hooks, result.captured),
            pooled=plan.pooling and plan.pooling.begin(access.run, access.weights, hidden),
            redrawn=redrawn,
            errors=self._errors_of_rows(output),
        )

    def free(self, state: StepState[Array]) -> None:
        """Copies feature state that must survive sleep mode to host memory."""
        if self.adapters is not None:
            self.adapters.free()
        if self._processors is not None:
            self._processors.free(state.processor_states)

    def restore(self, state: StepState[Array]) -> StepState[Array]:
        """Restores the arrays that `free` saved; returns the state."""
        if self.adapters is not None:
            self.adapters.restore()
        if self._processors is not None:
            states = self._processors.restore(state.processor_states, self._to_devices)
            state = dataclasses.replace(state, processor_states=states)
        return state

    def forget_images(self) -> None:
        """Drops cached image embeddings, because the weights have changed."""
        if self.image_encoder is not None:
            self.image_encoder.clear()

    def _errors_of_rows(self, output: SchedulerOutput) -> dict[int, str]:
        if not self._image_errors:
            return {}
        batch_slots = self._batch.slots_of(row.seq_id for row in output.scheduled).tolist()
        return {
            i: self._image_errors[batch_slot]
            for i, batch_slot in enumerate(batch_slots)
            if batch_slot in self._image_errors
        }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowOutputs:
    """Outputs of a step in addition to tokens, while the device computes them.

    Args:
        prompt_logprobs: Log-probabilities of prompt tokens and drafts.
        captures: Values captured by hooks.
        pooled: Pooled hidden states.
        redrawn: By logits row: the column of StepResult.tokens and the row of StepResult.details that replace
            the step's.
        errors: By index in SchedulerOutput.scheduled: error messages of sequences that must end.
    """

    prompt_logprobs: list[PendingPromptLogprobs]
    captures: PendingCaptures | None
    pooled: PendingPooled | None
    redrawn: dict[int, tuple[np.ndarray, np.ndarray]]
    errors: dict[int, str]

    def redraw(self, results: np.ndarray, details: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the results and details of a step with the redrawn tokens."""
        if not self.redrawn:
            return results, details
        results, details = results.copy(), None if details is None else details.copy()
        for j, (column, row) in self.redrawn.items():
            results[:4, j] = column
            if details is not None:
                details[j] = row
        return results, details

    def add_to(self, output: ModelRunnerOutput, num_live: list[int] | None = None) -> ModelRunnerOutput:
        """Waits for the outputs and adds them to the result of the step.

        Args:
            output: The result without these outputs.
            num_live: Number of decode steps in which each sequence took part; None without multi-step
                decoding.

        Returns:
            The complete result.
        """
        scored: list[list[TokenLogprobs]] = [[] for _ in output.prompt_logprobs]
        for pending in self.prompt_logprobs:
            scored[pending.row] = pending.read()
        captured = self.captures.read(num_live) if self.captures else {}
        captured |= self.pooled.read() if self.pooled else {}
        return dataclasses.replace(output, prompt_logprobs=scored, captured=captured, errors=self.errors)
