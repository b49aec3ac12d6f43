"""Composition of an engine: builds its parts and connects every feature to them.

This module is the only one of the package that imports features at run time. A feature consists of its own
files and its lines here. If it adds methods to LLMEngine, its class is a base class of EngineFeatures.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request import SequenceGroup
from jax_paged.core.scheduler import Scheduler
from jax_paged.engine.engine_core import EngineCore, StepCallbacks
from jax_paged.engine.features.batch_invariance.backend_choice import start_with_passing_backends
from jax_paged.engine.features.batch_invariance.invariance import check_invariance
from jax_paged.engine.features.encoder_decoder import read_encoder_decoder_prompt
from jax_paged.engine.features.interactive.kv_access import KVAccess
from jax_paged.engine.features.interactive.request_edits import RequestEdits
from jax_paged.engine.features.interactive.step_plan import StepPlans
from jax_paged.engine.features.lora.adapters import Adapters
from jax_paged.engine.features.lora.engine_methods import LoRAMethods, with_adapters
from jax_paged.engine.features.multimodal.image_messages import extract_images
from jax_paged.engine.features.multimodal.image_reader import ImageReader
from jax_paged.engine.features.pinned_prefixes import PinnedPrefixes
from jax_paged.engine.features.pooling import PoolingRequests
from jax_paged.engine.features.prompt_embeds import read_embeds
from jax_paged.engine.features.recording import Recordings
from jax_paged.engine.features.scoring import Scoring
from jax_paged.engine.features.snapshot import EngineState, Snapshots
from jax_paged.engine.features.structured_output.grammars import Grammars
from jax_paged.engine.features.structured_output.step_masks import forced_tokens, with_token_masks
from jax_paged.engine.features.weights.sleeping import Sleeping
from jax_paged.engine.features.weights.weight_updates import WeightUpdates
from jax_paged.engine.input_processor import InputProcessor
from jax_paged.engine.prompt_reader import PromptReader, TokenizedPrompt
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import check
from jax_paged.models.checkpoint import is_gguf, resolve_model_dir
from jax_paged.models.loading.pretrained import PRETRAINED

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor

# Names of features that other modules import from here, in addition to the functions of this module.
__all__ = ["EngineState", "check_invariance", "extract_images", "start_with_passing_backends"]

# A custom scheduler: a subclass of Scheduler, or a function that returns the sort key of a request.
CustomScheduler = type[Scheduler] | Callable[[SequenceGroup], Any]


class EngineFeatures(
    LoRAMethods,
    PinnedPrefixes,
    WeightUpdates,
    Sleeping,
    Scoring,
    StepPlans,
    RequestEdits,
    KVAccess,
    Recordings,
    Snapshots,
):
    """The methods of LLMEngine that features add."""


def make_core(
    args: EngineArgs,
    tokenizer: Tokenizer | None,
    executor: "Executor",
    custom_scheduler: CustomScheduler | None,
) -> EngineCore:
    """Makes the core of an engine, which runs requests."""
    config = with_end_token(executor.config, tokenizer)
    make = functools.partial(make_scheduler, config, custom_scheduler)
    features = StepCallbacks(with_adapters, with_token_masks, forced_tokens)
    return EngineCore(config, tokenizer, executor, make, features, seed=args.seed)


def make_input_processor(config: EngineConfig, tokenizer: Tokenizer | None) -> InputProcessor:
    """Makes the input processor of an engine, which checks requests.

    Raises:
        ValueError: If the model's sampling defaults are not valid.
    """
    if tokenizer is not None and config.pooling is not None and config.pooling.text.lower_case:
        tokenizer.lowercase_input()
    images = ImageReader(config.images, tokenizer) if config.images else None
    return InputProcessor(
        config,
        tokenizer,
        PromptReader(config, tokenizer, functools.partial(read_feature_prompt, config, images)),
        adapters=Adapters(config),
        grammars=tokenizer and Grammars(tokenizer, config.vocab_size, config.eos_token_ids),
        pooling=PoolingRequests(config, tokenizer),
    )


def read_feature_prompt(
    config: EngineConfig,
    images: ImageReader | None,
    prompt: Any,
    tokenize: Callable[[Any], TokenizedPrompt],
) -> tuple[TokenizedPrompt | None, TokenizedPrompt]:
    """Reads a prompt that uses a feature, or a prompt of an encoder-decoder or multimodal model.

    Args:
        config: The settings of the engine.
        images: Reads images in prompts; None if the model takes only text.
        prompt: The prompt, in any form.
        tokenize: Tokenizes text prompts and checks token ids.

    Returns:
        The encoder prompt (None without an encoder) and the decoder prompt.
    """
    if isinstance(prompt, dict) and "prompt_embeds" in prompt:
        return None, read_embeds(prompt, config)
    if images is not None and not (isinstance(prompt, dict) and "encoder_prompt" in prompt):
        return None, images.read_prompt(prompt, tokenize)
    return read_encoder_decoder_prompt(prompt, tokenize, config.decoder_start_token_id)


def make_scheduler(config: EngineConfig, custom: CustomScheduler | None = None) -> Scheduler:
    """Makes a scheduler with an empty KV cache.

    Args:
        config: The settings of the engine.
        custom: The custom scheduler; None for the default one.
    """
    make, policy = custom if isinstance(custom, type) else Scheduler, config.scheduling_policy
    if custom is not None and not isinstance(custom, type):
        check(policy == "fcfs", "scheduling_policy", policy, "'fcfs' because `scheduler` sets the order")
        policy = custom
    manager = BlockManager(
        config.num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        groups=config.cache_groups,
        num_swap_blocks=config.num_swap_blocks,
        num_state_slots=config.num_state_slots,
        num_swap_state_slots=config.num_swap_state_slots,
    )
    return make(
        block_manager=manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        eos_token_ids=config.eos_token_ids,
        scheduling_policy=policy,
        preemption_mode=config.preemption_mode,
        enable_chunked_prefill=config.enable_chunked_prefill,
        scheduler_delay_factor=config.scheduler_delay_factor,
        num_scheduler_steps=config.num_scheduler_steps,
        speculation=config.speculation,
        max_loras=config.max_loras,
    )


def make_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """Makes the tokenizer that the arguments specify; returns None if they specify none.

    Raises:
        ValueError: If the tokenizer can't be loaded.
    """
    return None if args.skip_tokenizer_init else Tokenizer(tokenizer_name(args))


def tokenizer_name(args: EngineArgs) -> str:
    """Returns the folder or GGUF file of the tokenizer, or its hub id if `args.tokenizer` is a hub id.

    For a hub id, transformers downloads only the tokenizer's files and no weights. "pagelet", the demo model
    that the package contains, and the names of downloaded models are not hub ids.
    """
    name = args.tokenizer
    if name is None or name in ("pagelet", *PRETRAINED) or is_gguf(name) or Path(name).expanduser().is_dir():
        return str(resolve_model_dir(name or args.model))
    return name


def with_end_token(config: EngineConfig, tokenizer: Tokenizer | None) -> EngineConfig:
    """Adds the tokenizer's end token to the model's end tokens, unless it lies outside the vocabulary."""
    token_id = tokenizer and tokenizer.eos_token_id
    if token_id is None or token_id >= config.vocab_size:
        return config
    return dataclasses.replace(config, eos_token_ids=config.eos_token_ids | {token_id})
