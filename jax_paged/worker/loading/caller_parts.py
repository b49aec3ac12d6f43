"""A model and functions of the caller, in place of those that an engine loads or has."""

import dataclasses
from typing import TYPE_CHECKING

from jax_paged.models.attention import Attend
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.sampling.sampler import Sampler

if TYPE_CHECKING:
    from jax_paged.models.features.hooks import Hook
    from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor


@dataclasses.dataclass(frozen=True)
class CallerParts:
    """A model and functions of the caller.

    Args:
        model: A model in memory in place of args.model; its weights stay the caller's.
        hooks: Hooks that requests may ask for by name.
        attend: Attends in place of args.attention_backend.
        sampler: Chooses tokens in place of the sampler.
        logits_processors: Logits processors that requests may ask for by name.
    """

    model: LoadedModel | LanguageModel | None = None
    hooks: "tuple[Hook, ...]" = ()
    attend: Attend | None = None
    sampler: Sampler | None = None
    logits_processors: "tuple[LogitsProcessor, ...]" = ()


NO_PARTS = CallerParts()
