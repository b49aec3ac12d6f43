"""RequestState: collects the outputs of a running request and converts them to RequestOutputs."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.engine.feature_outputs import FeatureOutputs
from jax_paged.engine.replicas.prior_outputs import PriorOutput
from jax_paged.engine.sample_output import (
    OutputSettings,
    SampleState,
    logprob_dict,
    logprob_from_values,
    logprob_values,
)
from jax_paged.engine.text.stop_strings import StopStrings
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.outputs import CompletionOutput, RequestOutput, Snapshot, TokenLogprobDict
from jax_paged.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from jax_paged.core.model_runner_output import TokenLogprobs
    from jax_paged.engine.features.structured_output.grammars import Grammar, Matcher
    from jax_paged.models.features.lora.adapter_files import Adapter


class RequestState:
    """Outputs of one running request: samples or beams.

    EngineCore adds new tokens after each step. `next_output`, `output` and `take_delta` return the outputs as
    a RequestOutput.

    Args:
        group: The request; read-only.
        prompt: Text of the prompt; None if the prompt was passed as token ids.
        settings: Conversion of outputs to text.
        encoder_prompt: Text of the encoder prompt; None if there is none.

    Attributes:
        adapter: The LoRA adapter of the request; None for the base model.
        is_constrained: True if the outputs follow a grammar.
    """

    def __init__(
        self,
        group: SequenceGroup,
        prompt: str | None,
        settings: OutputSettings,
        encoder_prompt: str | None = None,
    ) -> None:
        self.group = group
        self.prompt = prompt
        self._weight_versions: tuple[str, ...] = ()
        self.adapter: Adapter | None = None
        self._encoder_prompt = encoder_prompt
        self.is_finished = False
        self._settings = settings
        self.is_constrained = settings.is_constrained
        self._draws_samples = group.beam_params is None
        self._features = None if _is_plain(group) else FeatureOutputs(group, encoder_prompt, settings)
        # By the index of the sequence. The other sequences are forked from the first one when the prompt is
        # computed. Until then the state of the first one applies to all of them.
        self._samples = [SampleState(group.sequences[0], group, settings)]
        self._prompt_logprobs: list[TokenLogprobDict | None] | None = (
            None if group.sampling_params.prompt_logprobs is None else [None]
        )

    def continue_from(self, prior: tuple[PriorOutput, ...]) -> None:
        """Adds prior outputs that another engine has begun, one for each sequence."""
        self._samples = [self._new_sample(seq) for seq in self.group.sequences]
        for sample, output in zip(self._samples, prior, strict=True):
            sample.continue_from(output)
        self.is_finished = self.group.is_finished

    def values(self) -> dict[str, Any]:
        """Returns the state as JSON-compatible values. The group is not included."""
        logprobs = self._prompt_logprobs
        return {
            "prompt": self.prompt,
            "encoder_prompt": self._encoder_prompt,
            "is_finished": self.is_finished,
            "weight_versions": self._weight_versions,
            "prompt_logprobs": logprobs and [entry and logprob_values(entry) for entry in logprobs],
            "samples": [sample.values() for sample in self._samples],
        }

    @classmethod
    def from_values(
        cls,
        group: SequenceGroup,
        values: dict[str, Any],
        tokenizer: Tokenizer | None,
        grammar: "Grammar | None",
    ) -> Self:
        """Returns a state restored from the result of `values`.

        Args:
            group: The restored request.
            values: The result of `values`.
            tokenizer: The engine's tokenizer; None if it has none.
            grammar: The compiled grammar of the request; None without one.
        """
        params = group.sampling_params
        settings = OutputSettings(
            tokenizer=tokenizer if params.detokenize else None,
            stop=StopStrings(params.stop_strings) if params.stop_strings else None,
            grammar=grammar,
        )
        state = cls(group, values["prompt"], settings, values["encoder_prompt"])
        state.is_finished = values["is_finished"]
        state._weight_versions = tuple(values.get("weight_versions", ()))
        if values["prompt_logprobs"] is not None:
            entries = values["prompt_logprobs"]
            state._prompt_logprobs = [entry and logprob_from_values(entry) for entry in entries]
        samples = values["samples"]
        for seq in group.sequences[1 : len(samples)]:
            state._samples.append(state._new_sample(seq))
        for sample, entry in zip(state._samples, samples, strict=True):
            sample.restore(entry)
        return state

    def forked(self, group: SequenceGroup) -> "RequestState":
        """Returns the state of a fork that continues this request. Both requests have a single sequence.

        Args:
            group: The new request.
        """
        state = RequestState(group, self.prompt, self._settings, self._encoder_prompt)
        state.adapter = self.adapter
        state._samples = [self._samples[0].with_replayed_text(group.sequences[0], group)]
        if self._prompt_logprobs is not None:
            state._prompt_logprobs = list(self._prompt_logprobs)
        if state._features is not None and self._features is not None:
            state._features.copy_captured_from(self._features)
        state._weight_versions = self._weight_versions
        return state

    def roll_back(self) -> None:
        """Makes the output match the tokens of the only sequence, whose last tokens were removed."""
        self._samples[0] = self._samples[0].rolled_back()

    def matcher_of(self, seq: Sequence) -> "Matcher | None":
        """Returns the grammar matcher of a sequence; None without a grammar.

        A sequence that has no token yet uses the matcher of the first sequence.
        """
        samples = self._samples
        return samples[seq.index if seq.index < len(samples) else 0].matcher

    def record_weight_version(self, version: str) -> None:
        """Records the version of the weights that drew the newest tokens."""
        if self._weight_versions[-1:] != (version,):
            self._weight_versions += (version,)

    def add_prompt_logprobs(self, start: int, logprobs: "list[TokenLogprobs]") -> None:
        """Adds the log-probabilities of the prompt tokens from position start + 1 on.

        A preempted request computes its prompt again; the first values are kept.
        """
        kept, k = self._prompt_logprobs, self.group.sampling_params.prompt_logprobs
        if kept is None or k is None:
            return
        for position, entry in enumerate(logprobs, start + 1):
            if position == len(kept):
                token_id = self._prompt_token_ids[position]
                kept.append(logprob_dict(token_id, entry, k, self._settings.tokenizer))

    def add_captured(self, seq: Sequence, start: int, arrays: dict[str, np.ndarray]) -> None:
        """Adds the arrays that hooks captured for a sequence; see FeatureOutputs.add_captured."""
        assert self._features is not None, "captured arrays for a request without feature outputs"
        self._features.add_captured(seq, start, arrays)

    def add_tokens(
        self, seq: Sequence, token_ids: list[int], logprobs: "list[TokenLogprobs]"
    ) -> tuple[str | None, int] | None:
        """Adds the new tokens of a sequence; see SampleState.add_tokens."""
        samples = self._samples
        if seq.index == len(samples):  # sequences get their first tokens in the order of their indices
            samples.append(self._new_sample(seq))
        return samples[seq.index].add_tokens(token_ids, logprobs)

    def finish(self) -> list[tuple[Sequence, str]]:
        """Completes the text of all sequences that have ended. If all have ended, the request is finished.

        Returns:
            The sequences for which the text that was held back contains a stop string, each with the stop
            string.
        """
        self.is_finished = self.group.is_finished
        stopped: list[tuple[Sequence, str]] = []
        for sample in self._samples if self._draws_samples else ():
            if sample.seq.status.is_finished and not sample.is_finished:
                stop = sample.finish()
                if stop is not None:
                    stopped.append((sample.seq, stop))
        return stopped

    def mark_finished(self) -> None:
        """Marks the request as finished with its current text.

        Text that was held back is not decoded, because decoding may have caused the error that ended the
        request.
        """
        self.is_finished = True

    def next_output(self) -> RequestOutput | None:
        """Returns the output for this step, as output_kind specifies; None if this step has no output."""
        kind = self.group.sampling_params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.is_finished:
            return None
        return self.take_delta() if kind is RequestOutputKind.DELTA else self.output()

    def output(self) -> RequestOutput:
        """Returns the whole output so far."""
        return self._request_output(only_new=False)

    def take_delta(self) -> RequestOutput:
        """Returns the output since the last call: text, token_ids and logprobs contain only the new part."""
        return self._request_output(only_new=True)

    @functools.cached_property
    def _prompt_token_ids(self) -> list[int]:
        """The prompt's token ids, for outputs.

        The list is a copy: if the user changes it, the running request is not affected.
        """
        return list(self.group.sequences[0].prompt_token_ids)

    def _request_output(self, *, only_new: bool) -> RequestOutput:
        group, logprobs = self.group, self._prompt_logprobs
        list_type = list if self.is_finished else Snapshot
        samples = self._shown_samples()
        output = RequestOutput(
            request_id=group.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=None if logprobs is None else list_type(logprobs),
            outputs=self._completions(samples, only_new=only_new),
            finished=self.is_finished,
            metrics=group.metrics.copy(),
            num_cached_tokens=group.metrics.num_cached_tokens,
            weight_versions=self._weight_versions,
        )
        if self._features is not None:
            self._features.add_to(output, [sample.seq for sample in samples])
        return output

    def _shown_samples(self) -> list[SampleState]:
        """Returns the samples that outputs contain.

        With best_of > n, the best samples are known only when the request has finished, so earlier outputs
        contain none. Beams are not samples.
        """
        params, samples = self.group.sampling_params, self._samples
        if not self._draws_samples:
            return []
        if (params.best_of or params.n) > params.n:
            ranked = sorted(samples, key=lambda s: s.seq.cumulative_logprob, reverse=True)
            return ranked[: params.n] if self.is_finished else []
        return samples

    def _completions(self, samples: list[SampleState], *, only_new: bool) -> list[CompletionOutput]:
        if only_new:
            outputs = [s.take_delta(i) for i, s in enumerate(samples)]
        else:
            outputs = [s.output(i, is_final=self.is_finished) for i, s in enumerate(samples)]
        # Before the prompt is computed, only the first sample exists. Outputs of the other samples are empty.
        missing = range(len(outputs), self.group.sampling_params.n) if outputs else ()
        return outputs + [_empty_like(outputs[0], i) for i in missing]

    def _new_sample(self, seq: Sequence) -> SampleState:
        return SampleState(seq, self.group, self._settings)


def _is_plain(group: SequenceGroup) -> bool:
    params = group.sampling_params
    return not (group.beam_params or group.request.encoder_token_ids or params.hook_args or params.pooling)


def step_outputs(states: Iterable[RequestState]) -> list[RequestOutput]:
    """Returns the outputs of requests that a step has changed, as their output_kind specifies."""
    outputs = (state.next_output() for state in states)
    return [output for output in outputs if output is not None]


def _empty_like(output: CompletionOutput, index: int) -> CompletionOutput:
    logprobs = None if output.logprobs is None else []
    return dataclasses.replace(output, index=index, token_ids=[], logprobs=logprobs)
