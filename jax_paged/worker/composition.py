"""Features of the worker: the only module beside features/ that imports them.

    loading    check_arguments, load_features, feature_settings, feature_programs
    tracing    TracedFeatures: each method is called at one place of traced_step.py
    stepping   StepFields fills fields of the packed buffer; RunnerFeatures runs programs around a step,
               prepare() and needs() ahead of it and finish() after it

A feature that is off is None or empty here, and none of its code is entered.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jax_paged.config.engine_args import EngineArgs, EngineConfig
from jax_paged.config.multimodal import ImageSettings
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.errors import check
from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.encoder_decoder import EncoderDecoderLM
from jax_paged.models.features.hooks import Hook, at_paths, check_hooks, reading
from jax_paged.models.features.hooks import num_columns as num_hook_columns
from jax_paged.models.features.lora.layers import LoraLayout
from jax_paged.models.features.multimodal import ImageSpec, PatchSpec
from jax_paged.models.features.pooling import PoolingSpec
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.programs import (
    DeviceInputs,
    Program,
    StepResult,
    StepState,
    TraceContext,
)
from jax_paged.worker.features import cascade, multi_step, prompt_embeds, snapshot
from jax_paged.worker.features.encoder_decoder import encode, plan_encoders
from jax_paged.worker.features.feature_rows import FeatureRows
from jax_paged.worker.features.interactive import Inspector
from jax_paged.worker.features.lora import (
    AdapterArrays,
    LoadAdapterProgram,
    adapter_edits,
    adapter_settings,
    adapter_shapes,
    plan_adapters,
)
from jax_paged.worker.features.multimodal.image_encoder import (
    ImageEncoder,
    check_images,
    check_images_can_be_encoded,
    plan_images,
)
from jax_paged.worker.features.multimodal.mrope import fill_mrope, mrope_positions
from jax_paged.worker.features.pooling.encoder_runner import EncoderRunner, is_encoder
from jax_paged.worker.features.pooling.pooler import PendingPooled, PlannedPooling, PoolProgram, plan_pooling
from jax_paged.worker.features.prompt_logprobs import (
    PendingPromptLogprobs,
    PromptLogprobsProgram,
    begin_rows,
    row_targets,
)
from jax_paged.worker.features.speculation.drafter import Drafter, observe, propose
from jax_paged.worker.features.speculation.load_drafter import load_drafter
from jax_paged.worker.features.speculation.verification import accept, drafts_before
from jax_paged.worker.features.user_functions import host_processors, logits_processors
from jax_paged.worker.features.user_functions.hook_captures import PendingCaptures, plan_captures
from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor, check_processors
from jax_paged.worker.features.user_functions.processor_states import KeptStates, fill_processor_args
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.kv_cache import KVCacheLayout
from jax_paged.worker.loading.weights import check_order, outline_of, pooling_of
from jax_paged.worker.sampling.logits_rows import LogitsRows
from jax_paged.worker.sampling.sampler import SamplingBatch
from jax_paged.worker.traced_step import DrawnTokens, ModuleEdits, TracedStep, decode, with_last_tokens

if TYPE_CHECKING:
    from jax_paged.core.model_runner_output import TokenLogprobs
    from jax_paged.worker.batch_builder import ScheduledRows
    from jax_paged.worker.compilation.compiler import CompiledPrograms
    from jax_paged.worker.served_model import CallerParts

__all__ = ["Inspector", "is_encoder", "mrope_positions", "snapshot"]


# Loading


def check_arguments(args: EngineArgs, parts: "CallerParts") -> None:
    """Checks features that the model or the other arguments rule out; reads no weights.

    Raises:
        ValueError: If a feature can't be used.
    """
    check_images(args, parts.model)
    num_stages, hooks = args.pipeline_parallel_size, parts.hooks
    check(num_stages == 1 or not hooks, "hooks", hooks, "() with pipeline_parallel_size above 1")


def load_features(
    args: EngineArgs,
    parts: "CallerParts",
    loaded: LoadedModel,
    layout: KVCacheLayout,
    grid: DeviceGrid,
    *,
    packs: bool,
) -> tuple["TracedFeatures", list[Any]]:
    """Loads what features need beside the model.

    Args:
        args: Of the engine.
        parts: Of the caller.
        loaded: The model, or its last stage; its weights are not packed yet.
        layout: Of the pool.
        grid: The devices.
        packs: Whether oneDNN multiplies.

    Returns:
        The features, and their weights, which follow the model's in the list of weights: parameters of
        hooks, then the weights of what drafts.

    Raises:
        ValueError: If a feature does not fit the model.
    """
    model, hooks = loaded.model, parts.hooks
    captured = check_hooks(outline_of(model), hooks)
    check_order(model, hooks, grid)
    check_processors(parts.logits_processors, loaded.vocab_size)
    lora = plan_adapters(args, loaded)
    embed_path = prompt_embeds.embed_path(args, loaded)
    hook_params, hook_structure = jax.tree.flatten([hook.params for hook in hooks])
    draft, draft_weights = load_drafter(args, loaded, layout, grid, packs=packs)
    features = TracedFeatures(
        has_encoder=isinstance(model, EncoderDecoderLM),
        lora=lora,
        embed_path=embed_path,
        embed_size=loaded.config.hidden_size if embed_path else 0,
        image_spec=model.image_spec,
        hooks=tuple(hooks),
        hook_structure=hook_structure,
        captured=captured,
        processors=tuple(parts.logits_processors),
        drafter=draft,
        draft_bytes=sum(x.nbytes for x in draft_weights),
        pooling=pooling_of(args, loaded, is_own=parts.model is None),
        prompt_logprobs=PromptLogprobsProgram(loaded.config.hidden_size),
    )
    return features, [*hook_params, *draft_weights]


def feature_settings(args: EngineArgs, features: "TracedFeatures") -> dict[str, Any]:
    """Returns the fields of EngineConfig about features."""
    spec, processors = features.image_spec, features.processors
    return adapter_settings(args, features.lora) | {
        "embed_size": features.embed_size if args.enable_prompt_embeds else 0,
        "images": None if spec is None else ImageSettings.of(args, spec),
        "hooks": {hook.name: hook.num_args for hook in features.hooks},
        "capturing": frozenset(features.captured),
        "logits_processors": {p.name: p.num_args for p in processors},
        "stateful": frozenset(p.name for p in processors if p.has_state),
    }


def encoder_programs(context: TraceContext) -> list[Program]:
    """Returns the programs of encoders that write the cache; they are compiled first."""
    return [*plan_encoders(context.max_model_len)] if context.features.has_encoder else []


def feature_programs(context: TraceContext) -> list[Program]:
    """Returns the programs of features that are compiled with the steps."""
    features = context.features
    programs: list[Program] = [features.prompt_logprobs] if features.prompt_logprobs else []
    if features.prompt_logprobs and features.pooling:
        programs.append(PoolProgram(features.prompt_logprobs.hidden_size))
    if features.lora:
        programs.append(LoadAdapterProgram())
    return programs + image_programs(context)


def image_programs(context: TraceContext) -> list[Program]:
    """Returns the programs that encode images, the largest last."""
    spec = context.features.image_spec
    return plan_images(spec, context.max_model_len) if spec else []


def check_traced_features(context: TraceContext) -> None:
    """Traces a program of the image encoder, if there is one.

    Raises:
        ValueError: If the configuration of the model's vision part is inconsistent.
    """
    if context.features.image_spec is not None:
        check_images_can_be_encoded(context)


def make_encoder_runner(
    args: EngineArgs, loaded: LoadedModel | LanguageModel | None, first_device: int
) -> EncoderRunner:
    """Returns the runner of an encoder-only model."""
    return EncoderRunner(args, loaded, first_device, TracedFeatures())


# Tracing


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TracedFeatures:
    """Features that programs are traced with.

    Args:
        has_encoder: Whether the model is an encoder-decoder model.
        lora: Layout of the arrays of adapters; None if requests have none.
        embed_path: Path of the token embedding, if prompts may have vectors in place of tokens.
        embed_size: Numbers of such a vector.
        image_spec: How prompts have images; None if they have none.
        hooks: Hooks of modules.
        hook_structure: Structure of the hooks' parameters, which follow the model's weights.
        captured: Shapes of the values that hooks capture of a row, by name.
        processors: Logits processors, in order.
        drafter: What drafts on the device; None if nothing does.
        draft_bytes: Bytes of the drafter's weights.
        pooling: How prompts are pooled; None if the model only draws tokens.
        prompt_logprobs: Scores prompt tokens; None without a model that draws tokens.
    """

    has_encoder: bool = False
    lora: LoraLayout | None = None
    embed_path: str = ""
    embed_size: int = 0
    image_spec: ImageSpec | PatchSpec | None = None
    hooks: tuple[Hook, ...] = ()
    hook_structure: Any = None
    captured: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    processors: tuple[LogitsProcessor, ...] = ()
    drafter: Drafter | None = None
    draft_bytes: int = 0
    pooling: PoolingSpec | None = None
    prompt_logprobs: PromptLogprobsProgram | None = None

    adapter_shapes = staticmethod(adapter_shapes)
    drafts_before = staticmethod(drafts_before)
    accept = staticmethod(accept)

    @property
    def added_paths(self) -> tuple[str, ...]:
        """The modules to whose outputs further parts of a token's vector are added."""
        return self.image_spec.added_paths if self.image_spec else ()

    @property
    def embeds_size(self) -> int:
        """Numbers of a token's vector with these parts."""
        return self.embed_size * (1 + len(self.added_paths))

    @property
    def has_mrope(self) -> bool:
        """Whether tokens of images have rotary positions of their own."""
        return isinstance(self.image_spec, PatchSpec)

    @property
    def num_hook_columns(self) -> int:
        """Columns of the field hook_args."""
        return num_hook_columns(self.hooks) if self.hooks else 0

    @property
    def num_processor_columns(self) -> int:
        """Columns of the field processor_args."""
        return logits_processors.num_columns(self.processors) if self.processors else 0

    def processor_states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
        """Returns shapes and types of the states of logits processors."""
        if not self.processors:
            return []
        return [(x.shape, x.dtype) for x in logits_processors.state_shapes(self.processors, num_batch_slots)]

    def draft_states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
        """Returns shapes and types of the states of the drafter."""
        return [] if self.drafter is None else self.drafter.states(num_batch_slots)

    def module_edits(self, step: TracedStep) -> ModuleEdits:
        """Returns the edits of modules in a forward pass, and what the drafter reads there."""
        edits = ModuleEdits()
        if self.hooks:
            first = step.context.model.num_weights
            params = step.weights[first : first + self.hook_structure.num_leaves]
            params = jax.tree.unflatten(self.hook_structure, params)
            columns = step.by_token(lax.bitcast_convert_type(step.fields["hook_args"], jnp.float32))
            edits.hooks = at_paths(self.hooks, params, columns, 1, edits.captured)
        if self.drafter is not None:
            edits.hooks = reading(self.drafter.paths, edits.hooks, edits.outputs)
        if self.lora is not None:
            edits.changes |= adapter_edits(self.lora, step)
        if step.inputs.embeds is not None:
            paths = self.embed_path, *self.added_paths
            edits.changes |= prompt_embeds.embed_edits(paths, step.inputs.embeds, step.fields["has_embeds"])
        return edits

    def process(
        self,
        step: TracedStep,
        logits: Float[Array, "l v"],
        tokens: Int[Array, " t"],
        batch: SamplingBatch,
        state: StepState[Array],
    ) -> tuple[Float[Array, "l v"] | None, StepState[Array]]:
        """Applies logits processors; returns the logits, None without processors, and the state."""
        if not self.processors:
            return None, state
        fields = step.fields
        processed, states = logits_processors.process(
            self.processors,
            logits,
            state.processor_states,
            lax.bitcast_convert_type(fields["processor_args"], jnp.float32),
            fields["sample_slots"],
            tokens[fields["logits_rows"]],
            batch.position,
        )
        return processed, dataclasses.replace(state, processor_states=states)

    def propose(
        self, step: TracedStep, tokens: Int[Array, " t"], state: StepState[Array]
    ) -> tuple[Int[Array, " t"], StepState[Array]]:
        """Replaces drafts by those that are made on the device, if a drafter makes them."""
        if self.drafter is None:
            return tokens, state
        return propose(self.drafter, step, tokens, state)

    def observe(
        self,
        step: TracedStep,
        model: LanguageModel,
        metadata: AttentionMetadata,
        tokens: Int[Array, " t"],
        edits: ModuleEdits,
        rows: DrawnTokens,
        state: StepState[Array],
    ) -> StepState[Array]:
        """Lets the drafter, if there is one, read what the model has computed; returns the state."""
        if self.drafter is None:
            return state
        return observe(self.drafter, step, model, metadata, tokens, edits.outputs, rows, state)

    def with_drafts(
        self, step: TracedStep, tokens: Int[Array, " t"], result: StepResult[Array]
    ) -> StepResult[Array]:
        """Adds the drafts that were made on the device to the result."""
        if self.drafter is None:
            return result
        drafts = tokens[None, step.fields["logits_rows"]]
        return dataclasses.replace(result, tokens=jnp.concatenate([result.tokens, drafts]))

    def decode_steps(
        self, step: TracedStep, tokens: Int[Array, " b"], state: StepState[Array]
    ) -> tuple[StepResult[Array], StepState[Array]]:
        """Decodes several tokens of each sequence."""
        result, last, state = multi_step.decode_steps(decode, step, tokens, state)
        return result, with_last_tokens(state, step.fields["sample_slots"], last)


# Stepping


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepFields:
    """Fields of the packed buffer that belong to features.

    Args:
        input_batch: State of the batch slots.
        block_size: Tokens per block.
        num_state_slots: Slots for recurrent states; 0 if no layer has such states.
        embeds_size: Numbers of a vector in place of a token, with what is added to the outputs of layers.
        has_mrope: Whether tokens of images have rotary positions of their own.
    """

    input_batch: InputBatch
    block_size: int
    num_state_slots: int = 0
    embeds_size: int = 0
    has_mrope: bool = False

    @classmethod
    def of(cls, context: TraceContext, config: EngineConfig, batch: InputBatch) -> "StepFields | None":
        """Returns the fields of an engine; None if it uses no feature that has fields."""
        features = context.features
        is_used = config.hooks or features.processors or features.lora or features.embed_path
        is_used = is_used or config.speculation or config.num_scheduler_steps > 1
        fields = StepFields(
            input_batch=batch,
            block_size=config.block_size,
            num_state_slots=config.state_slots[0],
            embeds_size=features.embeds_size,
            has_mrope=features.has_mrope,
        )
        return fields if is_used or fields.num_state_slots or fields.has_mrope else None

    def fill(
        self,
        view: dict[str, np.ndarray],
        rows: "ScheduledRows",
        logits_rows: LogitsRows,
        sample_slots: np.ndarray,
        output: SchedulerOutput,
        bucket: Bucket,
    ) -> np.ndarray | None:
        """Fills the fields; returns the vectors of token rows, float32 [T, E], if the bucket has them."""
        batch, n = self.input_batch, len(rows.batch_slots)
        if self.num_state_slots:
            rows.fill_state_slots(view["state_slots"], self.num_state_slots)
        if self.has_mrope:
            positions = view["mrope_positions"][:, : len(rows.positions)]
            fill_mrope(positions, batch, rows.token_batch_slots, rows.positions)
        if batch.features.hook_args.size:
            view["hook_args"][:n] = batch.features.hook_args[rows.batch_slots].view(np.int32)
        if batch.features.processor_args.size:
            fill_processor_args(view["processor_args"], batch, sample_slots)
        if bucket.num_drafts:
            view["num_drafts"][: len(logits_rows.rows)] = logits_rows.num_drafts
        if bucket.num_steps > 1:
            multi_step.fill(view, batch, rows.batch_slots, rows.start, output.burst, self.block_size)
        if bucket.has_adapters:
            view["adapter_slots"][:n] = batch.features.adapter_slots[rows.batch_slots]
        if not bucket.has_embeds:
            return None
        return prompt_embeds.step_embeds(batch, view["has_embeds"], output, self.embeds_size)


def make_feature_rows(config: EngineConfig, context: TraceContext) -> FeatureRows:
    """Returns the owner of what features keep for each sequence."""
    return FeatureRows(
        config.max_num_seqs,
        hooks=config.hooks,
        processors=config.logits_processors,
        mrope_positions=mrope_positions if context.features.has_mrope else None,
    )


def min_shared_rows(config: EngineConfig, parts: "CallerParts") -> int:
    """Returns how many sequences attend to common leading blocks together at least; 0 if none do."""
    return cascade.MIN_ROWS if config.cascade_attention and parts.attend is None else 0


def plan_shared_prefixes(
    context: TraceContext, batch: InputBatch, block_size: int
) -> cascade.SharedPrefixes | None:
    """Returns what finds common leading blocks of sequences; None if they are not attended to together."""
    groups = context.layout.groups if context.min_shared_rows else ()
    # Groups without a window share alike: what is cached or forked is so in all of them.
    full = [g for g, group in enumerate(groups) if group.window is None and not group.is_cross]
    return cascade.SharedPrefixes(batch, full[0], block_size) if full else None


@dataclasses.dataclass(frozen=True)
class StepNeeds:
    """What the features of a step need of its program.

    Args:
        targets: Prompt tokens or drafts that get log-probabilities, by row.
        pooling: What is pooled; None for nothing.
        has_functions: Whether requests have logits processors on the host.
        has_embeds: Whether token rows have vectors in place of tokens.
    """

    targets: dict[int, tuple[list[int], int]] = dataclasses.field(default_factory=dict)
    pooling: PlannedPooling | None = None
    has_functions: bool = False
    has_embeds: bool = False

    @property
    def reads_all_rows(self) -> bool:
        """Whether the step must be a mixed one, if there are any."""
        return bool(self.targets or self.pooling or self.has_functions or self.has_embeds)


NO_NEEDS = StepNeeds()


class Device(NamedTuple):
    """The device as features use it.

    Args:
        run: Runs a program on arguments.
        compiled: Compiles further programs.
        weights: Of the model.
    """

    run: Callable[..., Any]
    compiled: "CompiledPrograms"
    weights: list[Array]


class RunnerFeatures:
    """Features of one engine that run programs, or work on the host, around its steps.

    Args:
        context: What programs are traced for.
        config: Of the engine.
        batch: State of the batch slots.
        grid: The devices.
        place: Copies host arrays to all devices.

    Attributes:
        adapters: Arrays of adapters; None if requests have none.
        image_encoder: Encodes images; None if prompts have none.
    """

    def __init__(
        self,
        context: TraceContext,
        config: EngineConfig,
        batch: InputBatch,
        grid: DeviceGrid,
        place: Callable[..., tuple[Array, ...]],
    ) -> None:
        features = context.features
        self._context, self._config, self._batch, self._place = context, config, batch, place
        self._encoders = plan_encoders(context.max_model_len) if features.has_encoder else []
        self.adapters = AdapterArrays(features.lora, grid) if features.lora else None
        self.image_encoder: ImageEncoder | None = None
        if config.images is not None:
            is_invariant = config.batch_invariant
            self.image_encoder = ImageEncoder(config.images.cache_bytes, batch_invariant=is_invariant)
        self._processors = KeptStates() if features.processors else None
        self._image_errors: dict[int, str] = {}

    @property
    def arrays(self) -> list[Array]:
        """The arrays of adapters."""
        return [] if self.adapters is None else self.adapters.arrays

    def prepare(
        self,
        run: Callable[..., Any],
        weights: list[Array],
        state: StepState[Array],
        output: SchedulerOutput,
    ) -> StepState[Array]:
        """Runs what comes ahead of a step: processor states, encoders, images, adapters."""
        if self._processors is not None:
            states = self._processors.move(output, self._batch, state.processor_states, self._place)
            state = dataclasses.replace(state, processor_states=states)
        if output.to_encode:
            pool = encode(run, self._encoders, output, self._config, weights, state.kv_cache)
            state = dataclasses.replace(state, kv_cache=pool)
        if self.image_encoder is not None:
            self._image_errors = self.image_encoder.encode(run, weights, output, self._batch)
        if self.adapters is not None:
            self.adapters.load(run, output.adapter_loads)
        return state

    def needs(self, output: SchedulerOutput) -> StepNeeds:
        """Returns what the requests of a step need of its program."""
        batch, rows = self._batch, self._batch.features
        if not (batch.prompts or output.scores_drafts or rows.pooling or rows.functions or rows.embeds):
            return NO_NEEDS
        return StepNeeds(
            targets=row_targets(output, batch),
            pooling=plan_pooling(output, batch, self._context),
            has_functions=bool(batch.features.functions),
            has_embeds=batch.features.has_embeds(output),
        )

    def variant(self, output: SchedulerOutput, needs: StepNeeds, *, is_mixed: bool) -> tuple[bool, bool]:
        """Returns whether the bucket of a step must have adapters, and embeddings.

        Args:
            output: The step.
            needs: What its requests need.
            is_mixed: Whether the bucket is of the type that embeddings are part of.
        """
        has_embeds, is_invariant = needs.has_embeds, self._config.batch_invariant
        if is_invariant:  # one program serves all
            has_embeds = self._context.features.embed_size > 0 and is_mixed
        if self.adapters is None:
            return False, has_embeds
        return is_invariant or has_embeds or self._batch.features.has_adapters(output), has_embeds

    def finish(
        self,
        device: "Device",
        output: SchedulerOutput,
        needs: StepNeeds,
        fields: dict[str, np.ndarray],
        inputs: DeviceInputs[Any],
        result: StepResult[Array],
    ) -> "RowOutputs | None":
        """Starts what follows a step: host processors, prompt log-probabilities, pooling, hook captures."""
        if needs is NO_NEEDS and not result.captured and not self._image_errors:
            return None
        hidden: Any = result.hidden  # not None in the steps that are read
        redrawn = {}
        if needs.has_functions:
            redrawn = host_processors.redraw(
                device.compiled, device.weights, hidden, self._batch, fields, inputs
            )
        scored: list[PendingPromptLogprobs] = []
        if needs.targets:
            program = self._context.features.prompt_logprobs
            assert program is not None, "the model draws tokens"
            scored = begin_rows(device.run, program, device.weights, hidden, output, needs.targets)
        return RowOutputs(
            prompt_logprobs=scored,
            captures=plan_captures(output, self._batch, self._config.capturing, result.captured),
            pooled=needs.pooling and needs.pooling.begin(device.run, device.weights, hidden),
            redrawn=redrawn,
            errors=self._errors_of_rows(output),
        )

    def free(self, state: StepState[Array]) -> None:
        """Copies to host memory what is to be kept while the engine sleeps."""
        if self.adapters is not None:
            self.adapters.free()
        if self._processors is not None:
            self._processors.free(state.processor_states)

    def restore(self, state: StepState[Array]) -> StepState[Array]:
        """Brings back what `free` has kept; returns the state."""
        if self.adapters is not None:
            self.adapters.restore()
        if self._processors is not None:
            states = self._processors.restore(state.processor_states, self._place)
            state = dataclasses.replace(state, processor_states=states)
        return state

    def forget_images(self) -> None:
        """Drops the vectors of images: the weights have changed."""
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
    """Outputs of a step's rows beside tokens, while the device computes them.

    Args:
        prompt_logprobs: Of rows whose prompt or drafts are scored.
        captures: Values captured by hooks.
        pooled: Pooled hidden states.
        redrawn: Columns of StepResult.tokens and rows of StepResult.details in place of the step's, by
            logits row.
        errors: Messages for sequences that have to end, by row.
    """

    prompt_logprobs: list[PendingPromptLogprobs]
    captures: PendingCaptures | None
    pooled: PendingPooled | None
    redrawn: dict[int, tuple[np.ndarray, np.ndarray]]
    errors: dict[int, str]

    def read_prompt_logprobs(self, num_rows: int) -> "list[list[TokenLogprobs]]":
        """Waits for the log-probabilities of prompt tokens; returns them for each row."""
        found: list[list[TokenLogprobs]] = [[] for _ in range(num_rows)]
        for pending in self.prompt_logprobs:
            found[pending.row] = pending.read()
        return found

    def read_captured(self, num_live: Sequence[int] | None = None) -> dict[int, dict[str, np.ndarray]]:
        """Waits for captured and pooled values; returns them by row and name.

        Args:
            num_live: How many decode steps each row took part in; None unless several were done.
        """
        captured = self.captures.read(num_live) if self.captures else {}
        return captured | (self.pooled.read() if self.pooled else {})
