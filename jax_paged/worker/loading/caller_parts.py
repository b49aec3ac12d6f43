"""A model and functions that the caller provides in place of the engine's own."""

import dataclasses
from typing import TYPE_CHECKING

from jax_paged.models.attention import CustomAttention
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.sampling.sampler import Sampler

if TYPE_CHECKING:
    from jax_paged.models.features.hooks import Hook
    from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor


@dataclasses.dataclass(frozen=True)
class CustomComponents:
    """A model and functions that the caller provides.

    Args:
        model: A model in memory that replaces args.model. Its weights remain the caller's.
        hooks: Hooks that requests may select by name.
        attend: Attention function that replaces args.attention_backend.
        sampler: Function that replaces the sampler.
        logits_processors: Logits processors that requests may select by name.
    """

    model: LoadedModel | LanguageModel | None = None
    hooks: "tuple[Hook, ...]" = ()
    attend: CustomAttention | None = None
    sampler: Sampler | None = None
    logits_processors: "tuple[LogitsProcessor, ...]" = ()


NO_CUSTOM_COMPONENTS = CustomComponents()
