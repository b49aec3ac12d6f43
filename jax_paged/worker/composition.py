"""Registration of the worker's features: their arguments, settings, weights and programs.

Only four of the worker's modules outside features/ import feature modules, apart from type annotations: this
one, feature_set.py (the values of features), traced_features.py (their parts of the traced step) and
step_features.py (their work on the host before and after a step).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.config.multimodal import ImageSettings
from jax_paged.errors import check
from jax_paged.models.encoder_decoder import EncoderDecoderLM
from jax_paged.models.features.hooks import check_hooks
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.features import cascade, prompt_embeds, snapshot
from jax_paged.worker.features.encoder_decoder import plan_encoders
from jax_paged.worker.features.interactive import Inspector
from jax_paged.worker.features.lora import LoadAdapterProgram, adapter_settings, plan_adapters
from jax_paged.worker.features.multimodal.image_encoder import (
    check_images,
    check_images_can_be_encoded,
    plan_images,
)
from jax_paged.worker.features.pooling.encoder_runner import EncoderRunner, check_encoder_args, is_encoder
from jax_paged.worker.features.pooling.pooler import PoolProgram, pooling_of
from jax_paged.worker.features.prompt_logprobs import PromptLogprobsProgram
from jax_paged.worker.features.speculation.load_drafter import load_drafter
from jax_paged.worker.features.user_functions.hook_captures import check_column_order
from jax_paged.worker.features.user_functions.logits_processors import check_processors
from jax_paged.worker.kv_cache import KVCacheLayout
from jax_paged.worker.loading.caller_parts import CustomComponents
from jax_paged.worker.loading.mesh import Packing
from jax_paged.worker.loading.weights import outline_of

__all__ = ["Inspector", "snapshot"]


def encoder_runner(
    args: EngineArgs, custom: CustomComponents, first_device: int
) -> Callable[[], EncoderRunner] | None:
    """Returns a constructor of the runner for an encoder-only model; None for a model that generates tokens.

    Raises:
        ValueError: If the model is an encoder and an argument does not apply to it.
    """
    if not is_encoder(args, custom.model):
        return None
    check_encoder_args(args, custom)
    return functools.partial(EncoderRunner, args, custom.model, first_device)


def check_arguments(args: EngineArgs, custom: CustomComponents) -> None:
    """Raises ValueError if the model or another argument rules out a feature. Reads no weights."""
    check_images(args, custom.model)
    num_stages, hooks = args.pipeline_parallel_size, custom.hooks
    check(num_stages == 1 or not hooks, "hooks", hooks, "empty with pipeline_parallel_size above 1")


def load_features(
    args: EngineArgs,
    custom: CustomComponents,
    loaded: LoadedModel,
    layout: KVCacheLayout,
    grid: DeviceGrid,
    *,
    packing: Packing,
) -> tuple[FeatureSet, list[Any]]:
    """Loads the weights and settings of features.

    Args:
        args: Arguments of the engine.
        custom: Model and functions that the caller provides.
        loaded: The model, or its last stage. Its weights are not packed yet.
        layout: Layout of the KV cache.
        grid: The devices.
        packing: The weights that are packed.

    Returns:
        The features and their weights. In the list of weights they follow the model's: first the parameters
        of hooks, then the weights of the drafter.

    Raises:
        ValueError: If a feature does not fit the model.
    """
    model, hooks, speculative = loaded.model, custom.hooks, args.speculative
    captured = check_hooks(outline_of(model), hooks)
    check_column_order(model, hooks, grid)
    check_processors(custom.logits_processors, loaded.vocab_size)
    lora = plan_adapters(args, loaded)
    embed_path = prompt_embeds.embed_path(args, loaded)
    hook_params, hook_structure = jax.tree.flatten([hook.params for hook in hooks])
    drafter, weights = None, []
    if speculative is not None and speculative.model is not None:
        drafter, weights = load_drafter(args, speculative, loaded, layout, grid, packing=packing)
    features = FeatureSet(
        has_encoder=isinstance(model, EncoderDecoderLM),
        lora=lora,
        embed_path=embed_path,
        embed_size=loaded.config.hidden_size if embed_path else 0,
        image_spec=model.image_spec,
        hooks=tuple(hooks),
        hook_structure=hook_structure,
        captured=captured,
        processors=tuple(custom.logits_processors),
        drafter=drafter,
        draft_bytes=sum(x.nbytes for x in weights),
        pooling=pooling_of(args, loaded, is_from_checkpoint=custom.model is None),
        hidden_size=loaded.config.hidden_size,
    )
    return features, [*hook_params, *weights]


def feature_settings(args: EngineArgs, features: FeatureSet) -> dict[str, Any]:
    """Returns the fields of EngineConfig that belong to features."""
    spec, processors = features.image_spec, features.processors
    return adapter_settings(args, features.lora) | {
        "prompt_embed_size": features.embed_size if args.enable_prompt_embeds else 0,
        "images": None if spec is None else ImageSettings.of(args, spec),
        "hooks": {hook.name: hook.num_args for hook in features.hooks},
        "capturing_hooks": frozenset(features.captured),
        "logits_processors": {p.name: p.num_args for p in processors},
        "stateful_processors": frozenset(p.name for p in processors if p.has_state),
    }


def encoder_programs(context: TraceContext) -> list[Program]:
    """Returns the programs that run the encoder of an encoder-decoder model. They are compiled first."""
    return [*plan_encoders(context.max_model_len)] if context.features.has_encoder else []


def feature_programs(context: TraceContext) -> list[Program]:
    """Returns the other programs of features, which are compiled together with the steps."""
    features = context.features
    programs: list[Program] = [PromptLogprobsProgram(features.hidden_size)]
    if features.pooling:
        programs.append(PoolProgram(features.hidden_size))
    if features.lora:
        programs.append(LoadAdapterProgram())
    return programs + image_programs(context)


def image_programs(context: TraceContext) -> list[Program]:
    """Returns the programs that encode images, the largest last."""
    spec = context.features.image_spec
    return plan_images(spec, context.max_model_len) if spec else []


def check_traced_features(context: TraceContext) -> None:
    """Traces a program that encodes images, if the model reads images.

    Raises:
        ValueError: If the shapes in the model's configuration do not fit together.
    """
    if context.features.image_spec is not None:
        check_images_can_be_encoded(context.features.image_spec, context)


def min_shared_rows(config: EngineConfig, custom: CustomComponents) -> int:
    """Returns the minimum number of sequences for cascade attention; 0 if it is off."""
    return cascade.MIN_ROWS if config.cascade_attention and custom.attend is None else 0
