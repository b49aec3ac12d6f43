"""A request as it was passed and checked: plain values that never change, and that can be written down."""

import dataclasses
from typing import Any, NamedTuple

from jax_paged.sampling_params import BeamSearchParams, SamplingParams


class StandIn(NamedTuple):
    """Data in place of some tokens of a prompt, such as a part of an image.

    Args:
        start: Position of the first of these tokens.
        stop: Position after the last of them.
        digest: Hash of the data. Equal digests mean equal data.
        data: The data, which only the executor reads.
    """

    start: int
    stop: int
    digest: str
    data: Any


class PromptEmbeds(NamedTuple):
    """Vectors in place of the first tokens of a prompt.

    Args:
        num_tokens: Number of vectors; prompt_token_ids has as many placeholders.
        data: float32, little-endian, [num_tokens, hidden_size].
    """

    num_tokens: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class RequestFeatures:
    """What a plain request does not use.

    Args:
        beam_params: Parameters of a beam search; None for sampling.
        encoder_token_ids: Tokens for the encoder of an encoder-decoder model; empty without an encoder.
        adapter: Hash of what the LoRA adapter does; "" without an adapter.
        prompt_embeds: Vectors in place of the first tokens of the prompt; None without vectors.
        stand_ins: Data in place of other tokens of the prompt, in order of position.
    """

    beam_params: BeamSearchParams | None = None
    encoder_token_ids: list[int] = dataclasses.field(default_factory=list)
    adapter: str = ""
    prompt_embeds: PromptEmbeds | None = None
    stand_ins: tuple[StandIn, ...] = ()

    @property
    def logprob_temperature(self) -> float:
        """Divides the logits before log-probabilities are taken; 1 except for beam searches."""
        return (self.beam_params.temperature if self.beam_params else 0) or 1.0

    def num_seqs(self, num_samples: int) -> int:
        """Returns the maximum number of sequences: beams, or samples."""
        return num_samples if self.beam_params is None else self.beam_params.beam_width


@dataclasses.dataclass(frozen=True)
class Request:
    """A request: its prompt, its parameters, and the features that it uses.

    Args:
        request_id: Unique among unfinished requests; "" until the engine has accepted the request.
        prompt_token_ids: The prompt; for an encoder-decoder model, the prompt of the decoder. Read-only.
        sampling_params: Sampling parameters of all sequences. Read-only.
        cache_salt: Only requests of equal salt share blocks.
        priority: Lower values are served earlier under the "priority" policy.
        features: What a plain request does not use; None if the request uses none of it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    features: RequestFeatures | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the request uses nothing but sampling."""
        return self.features is None and not self.sampling_params.uses_features

    @property
    def beam_params(self) -> BeamSearchParams | None:
        """Parameters of a beam search; None for sampling."""
        return self.features and self.features.beam_params

    @property
    def encoder_token_ids(self) -> list[int]:
        """Tokens for the encoder; empty without an encoder."""
        return [] if self.features is None else self.features.encoder_token_ids

    @property
    def adapter(self) -> str:
        """Hash of what the LoRA adapter does; "" without an adapter."""
        return "" if self.features is None else self.features.adapter

    @property
    def prompt_embeds(self) -> PromptEmbeds | None:
        """Vectors in place of the first tokens of the prompt; None without vectors."""
        return self.features and self.features.prompt_embeds

    @property
    def stand_ins(self) -> tuple[StandIn, ...]:
        """Data in place of other tokens of the prompt, in order of position."""
        return () if self.features is None else self.features.stand_ins

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences that run at a time."""
        num_samples = self.sampling_params.best_of or self.sampling_params.n
        return num_samples if self.features is None else self.features.num_seqs(num_samples)
