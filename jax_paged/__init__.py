"""vLLM's PagedAttention engine for JAX.

The public API has vLLM's names. `LLM` runs lists of prompts in a script or notebook, `LLMEngine` runs
requests step by step, and `AsyncLLMEngine` streams outputs in an event loop. Names are imported on first use.

Example:
    >>> from jax_paged import LLM, SamplingParams
    >>> with LLM() as llm:  # the built-in model
    ...     outputs = llm.generate("A block table is", SamplingParams(max_tokens=8))
    >>> print(outputs[0].outputs[0].text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_paged.config.engine_args import AsyncEngineArgs, EngineArgs
    from jax_paged.engine.async_engine.engine import AsyncLLMEngine
    from jax_paged.engine.llm_engine import LLMEngine
    from jax_paged.inputs import (
        EmbedsPrompt,
        ExplicitEncoderDecoderPrompt,
        PromptType,
        TextPrompt,
        TokensPrompt,
    )
    from jax_paged.llm import LLM
    from jax_paged.lora_request import LoRARequest
    from jax_paged.models.features.hooks import Hook
    from jax_paged.models.paged_inputs import paged_inputs
    from jax_paged.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from jax_paged.pooling_params import PoolingParams
    from jax_paged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from jax_paged.structured_outputs import StructuredOutputsParams
    from jax_paged.worker.features.user_functions.logits_processors import ExtraArgs, LogitsProcessor

    __version__: str

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "ExplicitEncoderDecoderPrompt",
    "ExtraArgs",
    "Hook",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "paged_inputs",
]

_MODULES = {
    "LLM": "llm",
    "AsyncEngineArgs": "config.engine_args",
    "AsyncLLMEngine": "engine.async_engine.engine",
    "BeamSearchParams": "sampling_params",
    "CompletionOutput": "outputs",
    "ClassificationOutput": "outputs",
    "ClassificationRequestOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "EmbedsPrompt": "inputs",
    "EngineArgs": "config.engine_args",
    "ExplicitEncoderDecoderPrompt": "inputs",
    "ExtraArgs": "worker.features.user_functions.logits_processors",
    "Hook": "models.features.hooks",
    "LLMEngine": "engine.llm_engine",
    "LoRARequest": "lora_request",
    "Logprob": "outputs",
    "LogitsProcessor": "worker.features.user_functions.logits_processors",
    "PoolingOutput": "outputs",
    "PoolingParams": "pooling_params",
    "PoolingRequestOutput": "outputs",
    "PromptType": "inputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "ScoringOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "StructuredOutputsParams": "structured_outputs",
    "TextPrompt": "inputs",
    "TokensPrompt": "inputs",
    "paged_inputs": "models.paged_inputs",
}

# vLLM names that are not supported. Importing one raises an ImportError with the reason.
_NOT_BUILT = {
    "ModelRegistry": "models outside the project",
}


def __getattr__(name: str) -> Any:
    # Names are imported on first use, so that importing only a kernel does not load the engine.
    if name == "__version__":
        return import_module("importlib.metadata").version("jax-paged")
    if name in _NOT_BUILT:
        raise ImportError(f"jax_paged has no {name}: {_NOT_BUILT[name]} are not supported")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
