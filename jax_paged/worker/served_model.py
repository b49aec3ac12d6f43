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
from jax_paged.errors import check
from jax_paged.models.attention import Attend
from jax_paged.models.causal_lm import CausalLM, LanguageModel
from jax_paged.models.encoder_decoder import EncoderDecoderLM
from jax_paged.models.features.hooks import Hook, check_hooks
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
    use_persistent_cache,
)
from jax_paged.worker.compilation.plan_steps import plan_steps
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.compilation.step_bytes import step_bytes
from jax_paged.worker.distributed.process_group import ProcessGroup
from jax_paged.worker.features.encoder_decoder import plan_encoders
from jax_paged.worker.features.lora import LoadAdapterProgram, check_images, plan_additions
from jax_paged.worker.features.multimodal.image_encoder import check_images_can_be_encoded, plan_images
from jax_paged.worker.features.pooling.pooler import PoolProgram
from jax_paged.worker.features.prompt_logprobs import PromptLogprobsProgram
from jax_paged.worker.features.speculation.load_drafter import load_drafter
from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor, check_processors
from jax_paged.worker.loading.kernel_check import choose_backend
from jax_paged.worker.loading.mesh import choose_products, device_grids
from jax_paged.worker.loading.resolve_config import ModelFacts, check_without_states, resolve_config
from jax_paged.worker.loading.weights import ServedWeights, check_order, load, outline_of, pooling_of
from jax_paged.worker.pipeline.own_stage import lower_part
from jax_paged.worker.pipeline.stages import Pipeline
from jax_paged.worker.sampling.sampler import Sampler
from jax_paged.worker.sampling.token_counts import ResetTokenCountsProgram


class ServedModel:
    """What the engines have in common that serve one model on the same devices.

    Args:
        args: As ModelRunner takes it; so are the six that follow.
        loaded: See args.
        hooks: See args.
        attend: See args.
        sampler: See args.
        processors: See args.
        first_device: See args.
        group: The processes whose devices they are.

    Attributes:
        config: The settings of each engine.
        grids: The devices of each stage; there is one, but in a pipeline. Where each stage has a process of
            its own, all stand for the devices of this one, which has one of the stages.
        stages: What the programs of each stage are traced for that this process has.
        served: The weights of each of these stages.
        weights: Those of all of them, one after the other.
        encoders: Programs that read what an encoder-decoder model answers.
        prompt_logprobs: The program that scores prompts.
        num_users: How many engines have not called `close`.

    Raises:
        ValueError: If the model can't be loaded or a limit does not fit it.
    """

    def __init__(
        self,
        args: EngineArgs,
        loaded: LoadedModel | LanguageModel | None,
        hooks: Sequence[Hook],
        attend: Attend | None,
        sampler: Sampler | None,
        processors: Sequence[LogitsProcessor],
        first_device: int,
        group: ProcessGroup,
    ) -> None:
        num_stages = args.pipeline_parallel_size
        check_images(args, loaded)
        check(num_stages == 1 or not hooks, "hooks", hooks, "() with pipeline_parallel_size above 1")
        # Before the weights take the GPU's memory.
        backend, backend_reason = choose_backend(args, loaded, attend)
        use_persistent_cache()
        links = group.links
        own = range(num_stages) if links is None else [links.stage]
        # The weights of an engine that is dropped are deleted at once: modules refer to each other, and would
        # keep them until Python looks for garbage.
        self.grids = device_grids(args, first_device, num_stages if links is None else 1)
        if links is not None:
            self.grids *= num_stages
        grid, is_own = self.grids[0], loaded is None
        models = load(args, loaded, self.grids, own)
        read = [x for m in models for x in jax.tree.leaves(nnx.state(m.model))] if is_own else []
        not_served = weakref.finalize(self, _delete, read)
        last, model = models[-1], models[-1].model
        matmul_backend = choose_products(args, last.dtype)
        dtype = DTYPES.get(args.kv_cache_dtype, last.dtype)
        specs = model.kv_cache_specs()
        layout = kv_cache.plan_layout(specs, dtype, grid.num_devices, state_dtype=last.dtype)
        if layout.states:
            check_without_states(args)
        layouts = [layout if num_stages == 1 else _stage_layout(layout, m.model) for m in models]
        packs = matmul_backend == "onednn"
        captured = check_hooks(outline_of(model), hooks)
        check_order(model, hooks, grid)
        check_processors(processors, last.vocab_size)
        additions = plan_additions(args, last)
        hook_params, params_def = jax.tree.flatten([hook.params for hook in hooks])
        draft, draft_weights = load_drafter(args, last, layout, grid, packs=packs)
        kind = kind_to_make([m.model for m in models], args.quantization)
        extra, how = [*hook_params, *draft_weights], {"is_own": is_own, "packs": packs, "kind": kind}
        self.served = [ServedWeights(models[i].model, grid=self.grids[i], extra=extra, **how) for i in own]
        not_served.detach()
        weakref.finalize(self, _close_all, self.served).atexit = False
        # Of a single stage the same list, whose arrays may be exchanged.
        self.weights: list[Any] = self.served[0].arrays
        if len(own) > 1:
            self.weights = [array for served in self.served for array in served.arrays]
        encodes = isinstance(model, EncoderDecoderLM)
        weight_bytes = sum(m.weight_bytes for m in models)
        block_bytes = max(x.block_bytes(args.block_size) for x in layouts)
        facts = ModelFacts(
            architecture=last.architecture,
            dtype=str(last.dtype),
            vocab_size=last.vocab_size,
            max_model_len=last.max_model_len,
            weight_bytes=weight_bytes,
            cache_groups=layout.groups,
            block_bytes=block_bytes + (draft.layout.block_bytes(args.block_size) if draft else 0),
            eos_token_ids=last.eos_token_ids,
            sampling_defaults=last.sampling_defaults,
            decoder_start_token_id=last.config.decoder_start_token_id if encodes else None,
            pooling=pooling_of(args, last, is_own=is_own),
            state_bytes=layout.state_bytes,
            draft_cost=min(1.0, sum(x.nbytes for x in draft_weights) / weight_bytes),
        )

        def context_of(stage: int, config: EngineConfig, num_blocks: int) -> TraceContext:
            served = self.served[own.index(stage)]
            return TraceContext(
                model=served.model,
                weights=served.arrays,
                layout=layouts[stage],
                num_blocks=num_blocks,
                block_size=config.block_size,
                dtype=last.dtype,
                vocab_size=config.vocab_size,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_logprobs=config.max_logprobs,
                backend=backend,
                batch_invariant=config.batch_invariant,
                mesh=self.grids[stage].mesh,
                splits_experts=grid.splits_experts,
                is_processed=args.logprobs_mode == "processed_logprobs",
                attend=attend,
                sampler=sampler,
                processors=tuple(processors),
                hooks=tuple(hooks),
                hook_params=params_def,
                captured=captured,
                shares_prefixes=config.cascade_attention and attend is None,
                pooling=facts.pooling,
                draft=draft,
                before_size=last.config.hidden_size if stage else 0,
                num_state_slots=config.state_slots[0] or 2 * (len(layout.states) > 0),
                is_last=stage == num_stages - 1,
                **additions._asdict(),
            )

        memory = kv_cache.device_memory([device for grid in self.grids for device in grid.devices])

        def free_bytes(config: EngineConfig) -> int:
            # What the largest step needs is found out with a tiny pool; the last stage, which draws tokens,
            # has most to do. Each engine of a pipeline has a step under way.
            context = context_of(own[-1], config, 2)
            needed = num_stages * step_bytes(context, config.num_scheduler_steps, plan_verifying(config))
            return group.least(kv_cache.free_kv_cache_bytes(memory, needed, args.gpu_memory_utilization))

        chosen = {"backend": backend, "matmul_backend": matmul_backend, "free_bytes": free_bytes}
        self.config = dataclasses.replace(
            resolve_config(args, facts, platform=memory.platform, **chosen),
            backend_reason=backend_reason,
            hooks={hook.name: hook.num_args for hook in hooks},
            capturing=frozenset(captured),
            logits_processors={p.name: p.num_args for p in processors},
            stateful=frozenset(p.name for p in processors if p.has_state),
            **additions.settings(args),
        )
        self.stages = [context_of(i, self.config, self.config.num_blocks) for i in own]
        check_images_can_be_encoded(self.stages[-1])
        self.encoders = plan_encoders(self.config.max_model_len) if encodes else []
        self.prompt_logprobs = PromptLogprobsProgram(last.config.hidden_size)
        self.num_users = 0
        self._args, self._group, self._hidden_size = args, group, last.config.hidden_size
        self._on_cpu, self._packs = memory.platform == "cpu", packs
        self._compiled: CompiledPrograms | None = None

    def compiled(self, movers: list[Program]) -> CompiledPrograms:
        """Returns all programs; begins to compile them when it is called first.

        Args:
            movers: Those that move blocks.
        """
        if self._compiled is None:
            context, config, limit_s = self.stages[-1], self.config, self._args.max_compile_s
            is_bfloat16 = self._on_cpu and context.dtype == jnp.bfloat16
            options = WIDE_VECTORS if is_bfloat16 else ONE_GRAPH if context.backend == "pallas" else None
            pipeline = Pipeline(self.stages)
            self._compiled = CompiledPrograms(
                plan_steps(config, on_cpu=self._on_cpu, packs=self._packs),
                [
                    *self.encoders,
                    *movers,
                    WriteBlockTablesProgram(),
                    ResetTokenCountsProgram(),
                    self.prompt_logprobs,
                    *([PoolProgram(self._hidden_size)] if context.pooling else ()),
                    *([LoadAdapterProgram()] if config.max_loras else ()),
                    *(plan_images(config.images.spec, config.max_model_len) if config.images else ()),
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


def _stage_layout(layout: kv_cache.KVCacheLayout, model: LanguageModel) -> kv_cache.KVCacheLayout:
    assert isinstance(model, CausalLM), "it was split into stages"
    return kv_cache.stage_layout(layout, model.own_places)
