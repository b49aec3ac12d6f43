"""A served model: weights on their devices, the configuration that fits them, and compiled programs."""

import dataclasses
import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.models.attention import Backend
from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.quantization.quantize import choose_online_dtype, has_quantized
from jax_paged.models.weights import LoadedModel
from jax_paged.pallas_kernels.quantization import DTYPES
from jax_paged.worker import kv_cache
from jax_paged.worker.block_tables import WriteBlockTablesProgram
from jax_paged.worker.compilation.buckets import plan_verifying
from jax_paged.worker.compilation.compiler import (
    ONE_GRAPH,
    WIDE_VECTORS,
    CompiledPrograms,
    trim_heap,
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
from jax_paged.worker.loading.caller_parts import CustomComponents
from jax_paged.worker.loading.kernel_check import choose_backend
from jax_paged.worker.loading.mesh import choose_matmul_backend, choose_packing, device_grids
from jax_paged.worker.loading.resolve_config import ModelProperties, check_recurrent_args, resolve_config
from jax_paged.worker.loading.weights import ServedWeights, load
from jax_paged.worker.pipeline.stage_runner import lower_part
from jax_paged.worker.pipeline.stages import Pipeline
from jax_paged.worker.sampling.sampler import SamplerOptions
from jax_paged.worker.sampling.token_counts import ResetTokenCountsProgram


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _LoadedStages:
    """The loaded stages of a model, from which configuration and trace contexts are made.

    Args:
        args: Arguments of the engine.
        custom: Model and functions that the caller provides.
        backend: The attention backend.
        models: All stages of the model. Stages of other processes have shapes in place of weights.
        layouts: KV cache layout of each stage.
        grids: Devices of each stage.
        local_stages: Indices of this process's stages.
        served: Weights of this process's stages.
        features: The features that are traced into programs.
    """

    args: EngineArgs
    custom: CustomComponents
    backend: Backend
    models: Sequence[LoadedModel]
    layouts: Sequence[kv_cache.KVCacheLayout]
    grids: Sequence[DeviceGrid]
    local_stages: Sequence[int]
    served: Sequence[ServedWeights]
    features: FeatureSet

    def context(self, stage: int, config: EngineConfig, num_blocks: int) -> TraceContext:
        """Returns the trace context of a stage.

        Args:
            stage: Index of the stage.
            config: The configuration of the engine.
            num_blocks: Number of blocks in the KV cache.
        """
        args, last, served = self.args, self.models[-1], self.served[self.local_stages.index(stage)]
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
                custom=self.custom.sampler,
            ),
            is_expert_parallel=self.grids[0].is_expert_parallel,
            attend=self.custom.attend,
            min_shared_rows=min_shared_rows(config, self.custom),
            # The free memory is measured before the number of state slots is known. Two slots suffice then.
            num_state_slots=config.num_state_slots or 2 * has_states,
            stage=StageRole(
                hidden_size=last.config.hidden_size if stage else 0,
                is_last=stage == args.pipeline_parallel_size - 1,
            ),
        )

    def properties(self, layout: kv_cache.KVCacheLayout) -> ModelProperties:
        """Returns the properties of the model that determine the configuration.

        Args:
            layout: Layout of the KV cache of all stages.
        """
        last, features, block_size = self.models[-1], self.features, self.args.block_size
        weight_bytes = sum(m.weight_bytes for m in self.models)
        block_bytes = max(x.block_bytes(block_size) for x in self.layouts)
        if features.drafter is not None:
            block_bytes += features.drafter.layout.block_bytes(block_size)
        return ModelProperties(
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
    """Model, configuration and compiled programs that several engines on the same devices share.

    With N pipeline stages, N engines run their steps on the same stages, so that every stage has work. They
    share one ServedModel. Without a pipeline, only one engine uses it.

    Args:
        args: Arguments of the engine.
        custom: Model and functions that the caller provides.
        first_device: Index of the first device to use, among the devices that JAX sees.
        group: The processes whose devices are used.

    Attributes:
        config: The resolved configuration of each engine.
        grids: The devices of each stage; a single entry without a pipeline. If each stage has its own
            process, the devices of other stages are not known here, and every entry contains the devices of
            this process.
        stages: The trace context of each stage of this process.
        served: The weights of each of these stages.
        weights: The weights of all these stages in one list.
        num_users: Number of engines that have not called `close`.

    Raises:
        ValueError: If the model cannot be loaded or a limit does not fit it.
    """

    def __init__(
        self, args: EngineArgs, custom: CustomComponents, first_device: int, group: ProcessGroup
    ) -> None:
        num_stages, links = args.pipeline_parallel_size, group.links
        check_arguments(args, custom)
        # The backend is chosen before the weights are loaded because checking kernels needs free GPU memory.
        backend, backend_reason = choose_backend(args, custom.model, custom.attend)
        use_persistent_cache()
        local_stages = range(num_stages) if links is None else [links.stage]
        self.grids = device_grids(args, first_device, num_stages if links is None else 1)
        if links is not None:
            self.grids *= num_stages
        grid, owns_weights = self.grids[0], custom.model is None
        models = load(args, custom.model, self.grids, local_stages)
        # If this object is dropped or the constructor fails, the weights are deleted at once. Otherwise they
        # would stay until the next garbage collection, because modules refer to each other.
        arrays = [x for m in models for x in jax.tree.leaves(nnx.state(m.model))] if owns_weights else []
        finalizer = weakref.finalize(self, _delete, arrays)
        matmul_backend = choose_matmul_backend(args, models[-1].dtype)
        quantized_dtype = choose_online_dtype([m.model for m in models], args.quantization)
        is_quantized = has_quantized([m.model for m in models], quantized_dtype)
        packing = choose_packing(args, matmul_backend, is_quantized=is_quantized)
        layout, layouts = _plan_layouts(args, models, grid)
        features, extra = load_features(args, custom, models[-1], layout, grid, packing=packing)
        self.served = [
            ServedWeights(
                models[i].model,
                grid=self.grids[i],
                extra=extra,
                owns_weights=owns_weights,
                packing=packing,
                quantized_dtype=quantized_dtype,
            )
            for i in local_stages
        ]
        trim_heap()  # the temporary copies of weights
        finalizer.detach()
        weakref.finalize(self, _close_all, self.served).atexit = False
        # With one stage, this is the list of ServedWeights itself, so that it contains replaced weights.
        self.weights: list[Any] = self.served[0].arrays
        if len(local_stages) > 1:
            self.weights = [array for served in self.served for array in served.arrays]
        loaded = _LoadedStages(
            args=args,
            custom=custom,
            backend=backend,
            models=models,
            layouts=layouts,
            grids=self.grids,
            local_stages=local_stages,
            served=self.served,
            features=features,
        )
        self.config = dataclasses.replace(
            _resolve_config(loaded, loaded.properties(layout), group, matmul_backend),
            backend_reason=backend_reason,
            **feature_settings(args, features),
        )
        self.stages = [loaded.context(i, self.config, self.config.num_blocks) for i in local_stages]
        check_traced_features(self.stages[-1])
        self.num_users = 0
        self._args, self._group = args, group
        self._has_packed_weights = packing.floats or all(served.is_packed for served in self.served)
        self._compiled: CompiledPrograms | None = None

    def compiled(self, movers: list[Program]) -> CompiledPrograms:
        """Returns the compiled programs. The first call starts the compilation.

        Args:
            movers: Programs that move blocks and recurrent states.
        """
        if self._compiled is None:
            context, limit_s = self.stages[-1], self._args.max_compile_s
            on_cpu = self.grids[0].devices[0].platform == "cpu"
            is_bfloat16 = on_cpu and context.dtype == jnp.bfloat16
            options = WIDE_VECTORS if is_bfloat16 else ONE_GRAPH if context.backend == "pallas" else None
            pipeline = Pipeline(self.stages)
            self._compiled = CompiledPrograms(
                plan_steps(self.config, on_cpu=on_cpu, has_packed_weights=self._has_packed_weights),
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
            weakref.finalize(self, self._compiled.stop_without_waiting).atexit = False
        return self._compiled

    def close(self) -> None:
        """Stops the compilation and frees the weights when the last engine has called it."""
        self.num_users -= 1
        if self.num_users == 0:
            assert self._compiled is not None, "close() was called before compiled()"
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
    """Returns the KV cache layout of the whole model and the layout of each stage."""
    last = models[-1]
    dtype = DTYPES.get(args.kv_cache_dtype, last.dtype)
    specs = last.model.kv_cache_specs()
    layout = kv_cache.plan_layout(specs, dtype, grid.num_devices, state_dtype=last.dtype)
    if layout.states:
        check_recurrent_args(args)
    if len(models) == 1:
        return layout, [layout]
    layouts = []
    for loaded in models:
        assert isinstance(loaded.model, CausalLM), "only a CausalLM can be split into pipeline stages"
        layouts.append(kv_cache.stage_layout(layout, loaded.model.layer_indices))
    return layout, layouts


def _resolve_config(
    loaded: _LoadedStages, properties: ModelProperties, group: ProcessGroup, matmul_backend: str
) -> EngineConfig:
    """Returns the configuration that fits the model and its devices."""
    args = loaded.args
    memory = kv_cache.device_memory([device for grid in loaded.grids for device in grid.devices])

    def free_bytes(config: EngineConfig) -> int:
        # The memory of the largest step is determined with a tiny KV cache. The last stage needs the most
        # memory because it also draws tokens. Each engine of a pipeline has one step in flight.
        context = loaded.context(loaded.local_stages[-1], config, 2)
        needed = step_bytes(context, config.num_scheduler_steps, plan_verifying(config))
        needed *= args.pipeline_parallel_size
        return group.min_over_processes(
            kv_cache.free_kv_cache_bytes(memory, needed, args.gpu_memory_utilization)
        )

    return resolve_config(
        args,
        properties,
        platform=memory.platform,
        backend=loaded.backend,
        matmul_backend=matmul_backend,
        free_bytes=free_bytes,
    )
