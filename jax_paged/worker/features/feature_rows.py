"""Host state of the sequences that use features, by batch slot.

A sequence that uses no feature has no entry here, and the arrays contain zeros for its batch slot.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jax_paged.core.request import PlaceholderData, RequestFeatures
from jax_paged.core.scheduler_output import NewSequence, SchedulerOutput
from jax_paged.sampling_params import LogitsFunction


class FeatureRows:
    """Host state that features keep for each sequence.

    Args:
        max_num_seqs: Number of batch slots, S.
        hooks: Number of arguments of each hook, by name.
        processors: Number of arguments of each logits processor, by name.
        mrope_positions: Returns the M-RoPE positions of a prompt with images; None if the model has no
            M-RoPE.

    Attributes (indexed by batch slot; not to be changed from outside unless noted):
        slots: Batch slots of the sequences that use features, by sequence id.
        num_encoder_tokens: int32 [S], number of tokens in the cross-attention cache groups.
        host_processors: Python logits processors of the sequences that have any.
        hooks_on: Names of the hooks that are on for each sequence, by sequence id.
        hook_args: float32 [S, A], for each hook 1 or 0 (on or off) and its arguments.
        processor_args: float32 [S, P], for each logits processor 1 or 0 (on or off) and its arguments.
        new_slots: Batch slots of sequences with logits processors that have not drawn a token yet.
            fill_processor_args removes them.
        released_processors: Ids and former batch slots of released sequences with logits processors.
            SavedStates.move clears this list.
        adapter_slots: int32 [S], LoRA adapter slot of each sequence; 0 for no adapter.
        embeds: Embedding vectors of sequences with prompt embeddings or images: float32 [tokens, E] by start
            position, in ascending order. The image encoder adds the vectors of images.
        placeholder_data: Images of the sequences whose prompts have any.
        mrope: For sequences with images, if the model has M-RoPE: the rotary positions up to the end of the
            last image.
        mrope_stops: int32 [S], number of positions in `mrope`; 0 for other sequences.
        mrope_offsets: int32 [S], M-RoPE position minus text position for the tokens after the last image.
        pooling: SamplingParams.pooling and the prompt length of sequences whose prompt is pooled.
    """

    def __init__(
        self,
        max_num_seqs: int,
        *,
        hooks: Mapping[str, int] = MappingProxyType({}),
        processors: Mapping[str, int] = MappingProxyType({}),
        mrope_positions: Callable[[tuple[PlaceholderData, ...]], tuple[np.ndarray, int]] | None = None,
    ) -> None:
        self._hooks, self.processors = hooks, processors
        self._mrope_positions = mrope_positions
        self.slots: dict[int, int] = {}
        self.num_encoder_tokens = np.zeros(max_num_seqs, np.int32)
        self.host_processors: dict[int, list[LogitsFunction]] = {}
        self.hooks_on: dict[int, frozenset[str]] = {}
        self.hook_args = np.zeros((max_num_seqs, sum(1 + n for n in hooks.values())), np.float32)
        self.processor_args = np.zeros((max_num_seqs, sum(1 + n for n in processors.values())), np.float32)
        self.new_slots: set[int] = set()
        self.released_processors: list[tuple[int, int]] = []
        self.adapter_slots = np.zeros(max_num_seqs, np.int32)
        self.embeds: dict[int, dict[int, np.ndarray]] = {}
        self.placeholder_data: dict[int, tuple[PlaceholderData, ...]] = {}
        self.mrope: dict[int, np.ndarray] = {}
        self.mrope_stops, self.mrope_offsets = np.zeros((2, max_num_seqs), np.int32)
        self.pooling: dict[int, tuple[str, int]] = {}
        self._by_slot: tuple[dict[int, Any], ...] = (
            *(self.host_processors, self.embeds, self.placeholder_data, self.mrope, self.pooling),
        )
        self._arrays = (
            *(self.num_encoder_tokens, self.hook_args, self.processor_args),
            *(self.adapter_slots, self.mrope_stops, self.mrope_offsets),
        )

    def add(self, batch_slot: int, new: NewSequence) -> None:
        """Adds a sequence that uses features and has taken a batch slot."""
        request, params = new.request, new.request.sampling_params
        self.slots[new.seq_id] = batch_slot
        if request.features is not None:
            self._add_features(batch_slot, request.features)
        self.adapter_slots[batch_slot] = new.adapter_slot
        if params.logits_processors:
            self.host_processors[batch_slot] = params.logits_processors
        self.hooks_on[new.seq_id] = frozenset(params.hook_args or ())
        self.hook_args[batch_slot] = _row(self._hooks, params.hook_args or {})
        self.processor_args[batch_slot] = _row(self.processors, params.extra_args or {})
        if params.extra_args and not new.output_token_ids:
            self.new_slots.add(batch_slot)
        if params.pooling is not None:
            self.pooling[batch_slot] = params.pooling, len(request.prompt_token_ids)

    def _add_features(self, batch_slot: int, features: RequestFeatures) -> None:
        self.num_encoder_tokens[batch_slot] = len(features.encoder_token_ids)
        if features.prompt_embeds is not None:
            vectors = np.frombuffer(features.prompt_embeds.data, "<f4")
            self.embeds[batch_slot] = {0: vectors.reshape(features.prompt_embeds.num_tokens, -1)}
        if data := features.placeholder_data:
            self.placeholder_data[batch_slot] = data
        if data and self._mrope_positions is not None:
            self.mrope[batch_slot], self.mrope_offsets[batch_slot] = self._mrope_positions(data)
            self.mrope_stops[batch_slot] = self.mrope[batch_slot].shape[1]

    def release(self, seq_id: int) -> None:
        """Removes a sequence that has lost its batch slot."""
        batch_slot = self.slots.pop(seq_id)
        del self.hooks_on[seq_id]
        if self.processor_args[batch_slot].any():
            self.released_processors.append((seq_id, batch_slot))
        self.new_slots.discard(batch_slot)
        for by_slot in self._by_slot:
            by_slot.pop(batch_slot, None)
        for array in self._arrays:
            array[batch_slot] = 0

    def has_adapters(self, output: SchedulerOutput) -> bool:
        """Returns whether a scheduled sequence of a step uses a LoRA adapter."""
        slots = (self.slots.get(row.seq_id) for row in output.scheduled)
        return any(self.adapter_slots[batch_slot] > 0 for batch_slot in slots if batch_slot is not None)

    def has_embeds(self, output: SchedulerOutput) -> bool:
        """Returns whether a step computes a token that is given as an embedding vector."""
        if not self.embeds:
            return False
        found = ((row, self.embeds.get(self.slots.get(row.seq_id, -1))) for row in output.scheduled)
        return any(
            vectors is not None
            # Most sequences are past their last vector.
            and row.start < (last := next(reversed(vectors))) + len(vectors[last])
            and any(i < row.start + row.num_tokens and row.start < i + len(x) for i, x in vectors.items())
            for row, vectors in found
        )

    def missing_placeholder_data(self, output: SchedulerOutput) -> list[tuple[int, PlaceholderData]]:
        """Returns the images that a step needs and that are not encoded yet, each with its batch slot."""
        missing: list[tuple[int, PlaceholderData]] = []
        for row in output.scheduled if self.placeholder_data else ():
            batch_slot = self.slots.get(row.seq_id, -1)
            own, known = self.placeholder_data.get(batch_slot, ()), self.embeds.get(batch_slot, {})
            if own and row.start < own[-1].stop:  # most sequences are past their last image
                stop = row.start + row.num_tokens
                needed = (s for s in own if s.start < stop and row.start < s.stop)
                missing += [(batch_slot, s) for s in needed if s.start not in known]
        return missing

    def check_integrity(self, taken: set[int]) -> None:
        """Asserts that free batch slots have no entries. `taken` are the batch slots in use."""
        assert set(self.slots.values()) <= taken, "a sequence with features has no batch slot"
        for by_slot in self._by_slot:
            assert by_slot.keys() <= taken, "a free batch slot has feature state"
        free = np.array([i for i in range(len(self.adapter_slots)) if i not in taken], np.int64)
        for array in self._arrays:
            assert not array[free].any(), "a free batch slot has feature state"


def _row(functions: Mapping[str, int], args: Mapping[str, Any]) -> list[float]:
    """Returns, for each function, 1 and its arguments if the request uses it, or zeros."""
    row: list[float] = []
    for name, num_args in functions.items():
        row += [1.0, *args[name]] if name in args else [0.0] * (1 + num_args)
    return row
