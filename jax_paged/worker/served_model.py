"""A model as engines serve it: its weights on their devices, settings that fit them, compiled programs."""

import dataclasses
import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_paged.config.engine_args import EngineArgs, EngineConfig
from jax_paged.models.attention import Backend
from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.quantization.quantize import kind_to_make
from jax_paged.models.weights import LoadedModel
from jax_paged.pallas_kernels.quantization import DTYPES
from jax_paged.worker import kv_cache
from jax_paged.worker.block_tables import WriteBlockTablesProgram
from jax_paged.worker.compilation.buckets import plan_verifying
from jax_paged.worker.compilation.compiler import (
    ONE_GRAPH,
    WIDE_VECTORS,
    CompiledPrograms,
)
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.compilation.persistent_cache import use_persistent_cache
from jax_paged.worker.compilation.plan_steps import plan_steps
from jax_paged.worker.compilation.programs import Program, StageRole, TraceContext
from jax_paged.worker.compilation.step_bytes import step_bytes
from jax_paged.worker.composition import (
    check_arguments,
    check_traced_features,
    encoder_programs,
    feature_programs,
    feature_settings,
    load_features,
    min_shared_rows,
)
from jax_paged.worker.distributed.process_group import ProcessGroup
from jax_paged.worker.loading.caller_parts import CallerParts
from jax_paged.worker.loading.kernel_check import choose_backend
from jax_paged.worker.loading.mesh import choose_products, device_grids
from jax_paged.worker.loading.resolve_config import ModelFacts, check_without_states, resolve_config
from jax_paged.worker.loading.weights import ServedWeights, load
from jax_paged.worker.pipeline.own_stage import lower_part
from jax_paged.worker.pipeline.stages import Pipeline
from jax_paged.worker.sampling.sampler import SamplerOptions
from jax_paged.worker.sampling.token_counts import ResetTokenCountsProgram


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _LoadedStages:
    """The stages of a model that this process has, as programs are traced for them.

    Args:
        args: Of the engine.
        parts: Of the caller.
        backend: Which kernels attend.
        models: All stages of the model; weights of other processes' stages are shapes.
        layouts: Of each stage's part of the pool.
        grids: The devices of each stage.
        own: The stages of this process.
        served: Their weights.
        features: Features that are traced.
    """

    args: EngineArgs
    parts: CallerParts
    backend: Backend
    models: Sequence[LoadedModel]
    layouts: Sequence[kv_cache.KVCacheLayout]
    grids: Sequence[DeviceGrid]
    own: Sequence[int]
    served: Sequence[ServedWeights]
    features: FeatureSet

    def context(self, stage: int, config: EngineConfig, num_blocks: int) -> TraceContext:
        """Returns what the programs of a stage are traced for."""
        args, last, served = self.args, self.models[-1], self.served[self.own.index(stage)]
        has_states = len(self.layouts[stage].states) > 0
        return TraceContext(
            model=served.model,
            weights=served.arrays,
            layout=self.layouts[stage],
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=last.dtype,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            backend=self.backend,
            batch_invariant=config.batch_invariant,
            mesh=self.grids[stage].mesh,
            features=self.features,
            sampling=SamplerOptions(
                max_logprobs=config.max_logprobs,
                is_processed=args.logprobs_mode == "processed_logprobs",
                custom=self.parts.sampler,
            ),
            splits_experts=self.grids[0].splits_experts,
            attend=self.parts.attend,
            min_shared_rows=min_shared_rows(config, self.parts),
            num_state_slots=config.state_slots[0] or 2 * has_states,
            stage=StageRole(
                hidden_size=last.config.hidden_size if stage else 0,
                is_last=stage == args.pipeline_parallel_size - 1,
            ),
        )

    def facts(self, layout: kv_cache.KVCacheLayout) -> ModelFacts:
        """Returns what the settings of an engine depend on.

        Args:
            layout: Of the whole pool.
        """
        last, features, block_size = self.models[-1], self.features, self.args.block_size
        weight_bytes = sum(m.weight_bytes for m in self.models)
        block_bytes = max(x.block_bytes(block_size) for x in self.layouts)
        if features.drafter is not None:
            block_bytes += features.drafter.layout.block_bytes(block_size)
        return ModelFacts(
            architecture=last.architecture,
            dtype=str(last.dtype),
            vocab_size=last.vocab_size,
            max_model_len=last.max_model_len,
            weight_bytes=weight_bytes,
            cache_groups=layout.groups,
            block_bytes=block_bytes,
            eos_token_ids=last.eos_token_ids,
            sampling_defaults=last.sampling_defaults,
            decoder_start_token_id=last.config.decoder_start_token_id if features.has_encoder else None,
            pooling=features.pooling,
            state_bytes=layout.state_bytes,
            draft_cost=min(1.0, features.draft_bytes / weight_bytes),
        )


class ServedModel:
    """What the engines have in common that serve one model on the same devices.

    Args:
        args: Model and limits.
        parts: Of the caller.
        first_device: The first of its devices, among those that JAX sees.
        group: The processes whose devices they are.

    Attributes:
        config: The settings of each engine.
        grids: The devices of each stage; a single entry without a pipeline. If each stage has a process of
            its own, all entries are the devices of this process.
        stages: What the programs of each stage of this process are traced for.
        served: The weights of each of these stages.
        weights: The weights of all of them, one after the other.
        num_users: How many engines have not called `close`.

    Raises:
        ValueError: If the model can't be loaded or a limit does not fit it.
    """

    def __init__(self, args: EngineArgs, parts: CallerParts, first_device: int, group: ProcessGroup) -> None:
        num_stages, links = args.pipeline_parallel_size, group.links
        check_arguments(args, parts)
        # Before the weights take the GPU's memory.
        backend, backend_reason = choose_backend(args, parts.model, parts.attend)
        use_persistent_cache()
        own = range(num_stages) if links is None else [links.stage]
        self.grids = device_grids(args, first_device, num_stages if links is None else 1)
        if links is not None:
            self.grids *= num_stages
        grid, is_own = self.grids[0], parts.model is None
        models = load(args, parts.model, self.grids, own)
        # The weights of an engine that is dropped are deleted at once: modules refer to each other, and would
        # keep them until Python looks for garbage.
        read = [x for m in models for x in jax.tree.leaves(nnx.state(m.model))] if is_own else []
        not_served = weakref.finalize(self, _delete, read)
        matmul_backend = choose_products(args, models[-1].dtype)
        packs = matmul_backend == "onednn"
        layout, layouts = _plan_layouts(args, models, grid)
        features, extra = load_features(args, parts, models[-1], layout, grid, packs=packs)
        kind = kind_to_make([m.model for m in models], args.quantization)
        self.served = [
            ServedWeights(
                models[i].model, grid=self.grids[i], extra=extra, is_own=is_own, packs=packs, kind=kind
            )
            for i in own
        ]
        not_served.detach()
        weakref.finalize(self, _close_all, self.served).atexit = False
        # A single stage's list itself, whose arrays may be exchanged.
        self.weights: list[Any] = self.served[0].arrays
        if len(own) > 1:
            self.weights = [array for served in self.served for array in served.arrays]
        loaded = _LoadedStages(
            args=args,
            parts=parts,
            backend=backend,
            models=models,
            layouts=layouts,
            grids=self.grids,
            own=own,
            served=self.served,
            features=features,
        )
        self.config = dataclasses.replace(
            _resolve_config(loaded, loaded.facts(layout), group, matmul_backend),
            backend_reason=backend_reason,
            **feature_settings(args, features),
        )
        self.stages = [loaded.context(i, self.config, self.config.num_blocks) for i in own]
        check_traced_features(self.stages[-1])
        self.num_users = 0
        self._args, self._group, self._packs = args, group, packs
        self._compiled: CompiledPrograms | None = None

    def compiled(self, movers: list[Program]) -> CompiledPrograms:
        """Returns all programs; begins to compile them when it is called first.

        Args:
            movers: Those that move blocks.
        """
        if self._compiled is None:
            context, limit_s = self.stages[-1], self._args.max_compile_s
            on_cpu = self.grids[0].devices[0].platform == "cpu"
            is_bfloat16 = on_cpu and context.dtype == jnp.bfloat16
            options = WIDE_VECTORS if is_bfloat16 else ONE_GRAPH if context.backend == "pallas" else None
            pipeline = Pipeline(self.stages)
            self._compiled = CompiledPrograms(
                plan_steps(self.config, on_cpu=on_cpu, packs=self._packs),
                [
                    *encoder_programs(context),
                    *movers,
                    WriteBlockTablesProgram(),
                    ResetTokenCountsProgram(),
                    *feature_programs(context),
                ],
                pipeline.lower if len(self.stages) > 1 else lambda program: lower_part(program, context),
                options,
                math.inf if limit_s is None else limit_s,
                self._group.is_ready,
            )
            weakref.finalize(self, self._compiled.abandon).atexit = False
        return self._compiled

    def close(self) -> None:
        """Ends the compilation and frees the weights, when the last engine calls it."""
        self.num_users -= 1
        if self.num_users == 0:
            assert self._compiled is not None, "an engine has begun it"
            self._compiled.stop()
            _close_all(self.served)
            self._compiled, self.stages, self.weights = None, [], []


def _delete(arrays: list[Any]) -> None:
    for array in arrays:
        if isinstance(array, jax.Array):
            array.delete()


def _close_all(served: list[ServedWeights]) -> None:
    for weights in served:
        weights.close()


def _plan_layouts(
    args: EngineArgs, models: Sequence[LoadedModel], grid: DeviceGrid
) -> tuple[kv_cache.KVCacheLayout, list[kv_cache.KVCacheLayout]]:
    """Returns how the layers of a model lie in the pool, and how those of each stage lie in its part."""
    last = models[-1]
    dtype = DTYPES.get(args.kv_cache_dtype, last.dtype)
    specs = last.model.kv_cache_specs()
    layout = kv_cache.plan_layout(specs, dtype, grid.num_devices, state_dtype=last.dtype)
    if layout.states:
        check_without_states(args)
    if len(models) == 1:
        return layout, [layout]
    layouts = []
    for loaded in models:
        assert isinstance(loaded.model, CausalLM), "it was split into stages"
        layouts.append(kv_cache.stage_layout(layout, loaded.model.own_places))
    return layout, layouts


def _resolve_config(
    loaded: _LoadedStages, facts: ModelFacts, group: ProcessGroup, matmul_backend: str
) -> EngineConfig:
    """Returns the settings of an engine that fit its model and its devices."""
    args = loaded.args
    memory = kv_cache.device_memory([device for grid in loaded.grids for device in grid.devices])

    def free_bytes(config: EngineConfig) -> int:
        # What the largest step needs is found out with a tiny pool; the last stage, which draws tokens, has
        # most to do. Each engine of a pipeline has a step under way.
        context = loaded.context(loaded.own[-1], config, 2)
        needed = step_bytes(context, config.num_scheduler_steps, plan_verifying(config))
        needed *= args.pipeline_parallel_size
        return group.least(kv_cache.free_kv_cache_bytes(memory, needed, args.gpu_memory_utilization))

    return resolve_config(
        args,
        facts,
        platform=memory.platform,
        backend=loaded.backend,
        matmul_backend=matmul_backend,
        free_bytes=free_bytes,
    )
