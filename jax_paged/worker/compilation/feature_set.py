"""The features of an engine for which programs are traced."""

import dataclasses
from typing import Any

from jax_paged.models.features.hooks import Hook
from jax_paged.models.features.hooks import num_columns as num_hook_columns
from jax_paged.models.features.lora.layers import LoraLayout
from jax_paged.models.features.pooling import PoolingSpec
from jax_paged.models.image_inputs import ImageSpec, PatchSpec
from jax_paged.worker.features.speculation.drafter import Drafter
from jax_paged.worker.features.user_functions import logits_processors
from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FeatureSet:
    """Features of an engine. A feature that is off is None, empty or 0.

    Args:
        has_encoder: Whether the model is an encoder-decoder model.
        lora: Layout of the adapter arrays; None without adapters.
        embed_path: Path of the token embedding if prompts may contain embeddings in place of tokens.
        embed_size: Size of such an embedding.
        image_spec: How prompts contain images; None without images.
        hooks: Hooks of modules.
        hook_structure: Tree structure of the hooks' parameters, which follow the model's weights.
        captured: By name: the shape per token row of the values that hooks capture.
        processors: Logits processors, in order.
        drafter: The drafter that proposes tokens on the device; None without one.
        draft_bytes: Size of the drafter's weights (bytes).
        pooling: How prompts are pooled; None if the model only generates tokens.
        hidden_size: Size of the hidden states, from which prompt log-probabilities are computed; 0 for a
            model that generates no tokens.
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
    hidden_size: int = 0

    @property
    def added_paths(self) -> tuple[str, ...]:
        """The paths of modules to whose outputs the image encoder's further vectors are added (DeepStack)."""
        return self.image_spec.added_paths if self.image_spec else ()

    @property
    def total_embed_size(self) -> int:
        """The size of an embedding plus one vector of the same size for each of `added_paths`."""
        return self.embed_size * (1 + len(self.added_paths))

    @property
    def has_mrope(self) -> bool:
        """Whether image tokens have M-RoPE positions."""
        return isinstance(self.image_spec, PatchSpec)

    @property
    def num_hook_columns(self) -> int:
        """The number of columns of the field hook_args."""
        return num_hook_columns(self.hooks) if self.hooks else 0

    @property
    def num_processor_columns(self) -> int:
        """The number of columns of the field processor_args."""
        return logits_processors.num_columns(self.processors) if self.processors else 0

    def processor_states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
        """Returns the shapes and dtypes of the states of logits processors."""
        if not self.processors:
            return []
        return [(x.shape, x.dtype) for x in logits_processors.state_shapes(self.processors, num_batch_slots)]

    def draft_states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
        """Returns the shapes and dtypes of the states of the drafter."""
        return [] if self.drafter is None else self.drafter.states(num_batch_slots)
