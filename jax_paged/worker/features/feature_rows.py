"""State of the sequences that use features, by batch slot.

A sequence that uses none has no entry here; the rows of its batch slot hold zeros.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jax_paged.core.request import RequestFeatures, StandIn
from jax_paged.core.scheduler_output import NewSequence, SchedulerOutput
from jax_paged.sampling_params import LogitsFunction


class FeatureRows:
    """Owns what features keep on the host for each sequence.

    Args:
        max_num_seqs: Batch slots, S.
        hooks: How many numbers each hook of the model takes, by name.
        processors: How many numbers each logits processor takes, by name.
        mrope_positions: Returns the rotary positions of a prompt with images; None if they are those of text.

    Attributes (indexed by batch slot; not to be changed from outside unless noted):
        slots: The batch slots of the sequences that use features, by sequence id.
        num_encoder_tokens: int32 [S], tokens that groups of cross attention hold.
        functions: For sequences with logits processors in Python, these.
        hooks_on: The names of the hooks of each sequence, by sequence id.
        hook_args: float32 [S, A], whether each hook is on, and its arguments.
        processor_args: float32 [S, P], whether each logits processor is on, and its arguments.
        new_slots: Batch slots of sequences with logits processors for which nothing has been drawn yet. The
            owner of processor states removes them.
        released_processors: Ids and former batch slots of released sequences with logits processors. The
            owner of processor states clears this list.
        adapter_slots: int32 [S], the slot of each sequence's adapter, 0 for none.
        embeds: For sequences whose prompts have vectors, by the position of the first of each run of vectors,
            in order: float32 [tokens, E]. The image encoder adds those of images.
        stand_ins: For sequences whose prompts have images, these.
        mrope: For the same sequences of a model with M-RoPE, the rotary positions up to the end of the last
            image.
        mrope_stops: int32 [S], the number of these positions; 0 for other sequences.
        mrope_offsets: int32 [S], the distance of the later rotary positions from those of text.
        pooling: For sequences whose prompt is pooled, SamplingParams.pooling and the prompt's length.
    """

    def __init__(
        self,
        max_num_seqs: int,
        *,
        hooks: Mapping[str, int] = MappingProxyType({}),
        processors: Mapping[str, int] = MappingProxyType({}),
        mrope_positions: Callable[[tuple[StandIn, ...]], tuple[np.ndarray, int]] | None = None,
    ) -> None:
        self._hooks, self.processors = hooks, processors
        self._mrope_positions = mrope_positions
        self.slots: dict[int, int] = {}
        self.num_encoder_tokens = np.zeros(max_num_seqs, np.int32)
        self.functions: dict[int, list[LogitsFunction]] = {}
        self.hooks_on: dict[int, frozenset[str]] = {}
        self.hook_args = np.zeros((max_num_seqs, sum(1 + n for n in hooks.values())), np.float32)
        self.processor_args = np.zeros((max_num_seqs, sum(1 + n for n in processors.values())), np.float32)
        self.new_slots: set[int] = set()
        self.released_processors: list[tuple[int, int]] = []
        self.adapter_slots = np.zeros(max_num_seqs, np.int32)
        self.embeds: dict[int, dict[int, np.ndarray]] = {}
        self.stand_ins: dict[int, tuple[StandIn, ...]] = {}
        self.mrope: dict[int, np.ndarray] = {}
        self.mrope_stops, self.mrope_offsets = np.zeros((2, max_num_seqs), np.int32)
        self.pooling: dict[int, tuple[str, int]] = {}
        self._by_slot: tuple[dict[int, Any], ...] = (
            *(self.functions, self.embeds, self.stand_ins, self.mrope, self.pooling),
        )
        self._arrays = (
            *(self.num_encoder_tokens, self.hook_args, self.processor_args),
            *(self.adapter_slots, self.mrope_stops, self.mrope_offsets),
        )

    def add(self, batch_slot: int, new: NewSequence) -> None:
        """Takes in a sequence that has taken a batch slot and uses features."""
        request, params = new.request, new.request.sampling_params
        self.slots[new.seq_id] = batch_slot
        if request.features is not None:
            self._add_features(batch_slot, request.features)
        self.adapter_slots[batch_slot] = new.adapter_slot
        if params.logits_processors:
            self.functions[batch_slot] = params.logits_processors
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
        if features.stand_ins:
            self.stand_ins[batch_slot] = features.stand_ins
        if features.stand_ins and self._mrope_positions is not None:
            self.mrope[batch_slot], self.mrope_offsets[batch_slot] = self._mrope_positions(features.stand_ins)
            self.mrope_stops[batch_slot] = self.mrope[batch_slot].shape[1]

    def release(self, seq_id: int) -> None:
        """Forgets a sequence that has lost its batch slot."""
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
        """Returns whether a row of a step has an adapter."""
        slots = (self.slots.get(row.seq_id) for row in output.scheduled)
        return any(self.adapter_slots[batch_slot] > 0 for batch_slot in slots if batch_slot is not None)

    def has_embeds(self, output: SchedulerOutput) -> bool:
        """Returns whether a step computes a token that is a vector."""
        if not self.embeds:
            return False
        found = ((row, self.embeds.get(self.slots.get(row.seq_id, -1))) for row in output.scheduled)
        return any(
            runs is not None
            and row.start < (last := next(reversed(runs))) + len(runs[last])  # most rows are after them
            and any(i < row.start + row.num_tokens and row.start < i + len(x) for i, x in runs.items())
            for row, runs in found
        )

    def missing_stand_ins(self, output: SchedulerOutput) -> list[tuple[int, StandIn]]:
        """Returns the images of a step that have no vectors yet, each with its batch slot."""
        missing: list[tuple[int, StandIn]] = []
        for row in output.scheduled if self.stand_ins else ():
            batch_slot = self.slots.get(row.seq_id, -1)
            own, known = self.stand_ins.get(batch_slot, ()), self.embeds.get(batch_slot, {})
            if own and row.start < own[-1].stop:  # most rows are after them
                stop = row.start + row.num_tokens
                needed = (s for s in own if s.start < stop and row.start < s.stop)
                missing += [(batch_slot, s) for s in needed if s.start not in known]
        return missing

    def check_integrity(self, taken: set[int]) -> None:
        """Asserts that only batch slots that are taken have something."""
        assert set(self.slots.values()) <= taken, "a free batch slot has something"
        for by_slot in self._by_slot:
            assert by_slot.keys() <= taken, "a free batch slot has something"
        free = np.array([i for i in range(len(self.adapter_slots)) if i not in taken], np.int64)
        for array in self._arrays:
            assert not array[free].any(), "a free batch slot has something"


def _row(functions: Mapping[str, int], args: Mapping[str, Any]) -> list[float]:
    """Returns which functions a request asks for, and with which numbers."""
    row: list[float] = []
    for name, num_args in functions.items():
        row += [1.0, *args[name]] if name in args else [0.0] * (1 + num_args)
    return row
