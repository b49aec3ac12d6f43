"""PagedAttention and the serving engine around it, for JAX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_paged.config import EngineArgs
    from jax_paged.engine.async_engine import AsyncLLMEngine
    from jax_paged.engine.llm_engine import LLMEngine
    from jax_paged.llm import LLM
    from jax_paged.outputs import CompletionOutput, Logprob, RequestOutput
    from jax_paged.sampling_params import BeamSearchParams, SamplingParams

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
]

_MODULES = {
    "LLM": "llm",
    "AsyncLLMEngine": "engine.async_engine",
    "BeamSearchParams": "sampling_params",
    "CompletionOutput": "outputs",
    "EngineArgs": "config",
    "LLMEngine": "engine.llm_engine",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
}


def __getattr__(name: str) -> Any:
    # Names are imported when they are asked for: importing a kernel doesn't load the engine.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
