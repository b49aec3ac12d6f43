"""The methods of LLM that make embeddings, classes and scores of texts."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from jax_paged.engine.features import pooling
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.engine.prompt_reader import as_prompts
from jax_paged.engine.serialized import Serialized
from jax_paged.errors import check
from jax_paged.inputs import Prompt
from jax_paged.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jax_paged.pooling_params import PoolingParams, PoolingTask

# Whether to show a progress bar, or what makes one in tqdm's place.
UseTqdm = bool | Callable[..., tqdm]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods(Serialized, abc.ABC):
    """What LLM makes of texts beside more text. All methods run their texts together.

    Their arguments are alike: `prompts` as LLM.generate takes them; `truncate_prompt_tokens` as in
    PoolingParams, of which pooling_params may be one for all prompts or one per prompt; `use_tqdm` as
    LLM.generate takes it; lora_request None. ValueError is raised if the model can't do it or can't take a
    prompt, and then none has run.
    """

    llm_engine: LLMEngine

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: Params = None,
        lora_request: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns an embedding per prompt."""
        _check_no_adapter(lora_request)
        pooled = self._pool("embed", prompts, pooling_params, truncate_prompt_tokens, use_tqdm)
        return [_made(EmbeddingRequestOutput, o, EmbeddingOutput(data.tolist())) for o, data in pooled]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        pooling_params: Params = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns the scores of a classifier's classes per prompt."""
        _check_no_adapter(lora_request)
        pooled = self._pool("classify", prompts, pooling_params, truncate_prompt_tokens, use_tqdm)
        return [
            _made(ClassificationRequestOutput, o, ClassificationOutput(data.tolist())) for o, data in pooled
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: None = None,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Returns an array per prompt, by task: "embed", "classify", or "token_embed" for one per token."""
        _check_no_adapter(lora_request)
        pooled = self._pool(pooling_task, prompts, pooling_params, truncate_prompt_tokens, use_tqdm)
        return [_made(PoolingRequestOutput, o, PoolingOutput(data)) for o, data in pooled]

    def score(
        self,
        data_1: str | Sequence[str] | Prompt | Sequence[Prompt],
        data_2: str | Sequence[str] | Prompt | Sequence[Prompt],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
    ) -> list[ScoringRequestOutput]:
        """Returns how well two texts fit: one with each of several, or pair by pair.

        A classifier of one class reads both in one; of embeddings it is the cosine of their angle.
        """
        pairs = pooling.pairs_of(data_1, data_2)
        _check_no_adapter(lora_request)
        params = PoolingParams() if pooling_params is None else pooling_params
        config = self.llm_engine.config
        if config.pooling is not None and not config.pooling.labels:
            texts, which = pooling.distinct([text for pair in pairs for text in pair])
            params = dataclasses.replace(params, task="embed")
            pooled = self._pool("embed", texts, params, truncate_prompt_tokens, use_tqdm)
            found = [pooled[i] for i in which]
            return [
                ScoringRequestOutput(
                    a.request_id,
                    ScoringOutput(pooling.similarity(x, y)),
                    a.prompt_token_ids + b.prompt_token_ids,
                    a.num_cached_tokens + b.num_cached_tokens,
                )
                for (a, x), (b, y) in zip(found[::2], found[1::2], strict=True)
            ]
        requests = self.llm_engine.input_processor.pooling
        params = requests.resolve(params, "score")
        prompts = [requests.pair_prompt(pair, params) for pair in pairs]
        texts, each = [text for text, _ in prompts], [params for _, params in prompts]
        found = self._pool("score", texts, each, truncate_prompt_tokens, use_tqdm)
        return [_made(ScoringRequestOutput, o, ScoringOutput(float(data[0]))) for o, data in found]

    def _pool(
        self,
        task: PoolingTask | None,
        prompts: Any,
        pooling_params: Params,
        truncate_prompt_tokens: int | None,
        use_tqdm: UseTqdm,
    ) -> list[tuple[RequestOutput, np.ndarray]]:
        listed, pooling_requests = as_prompts(prompts), self.llm_engine.input_processor.pooling
        default = PoolingParams() if pooling_params is None else pooling_params
        each = list(default) if isinstance(default, list | tuple) else [default] * len(listed)
        ok = len(each) == len(listed)
        check(ok, "pooling_params", len(each), f"{len(listed)}, one per prompt", aspect="the length of")
        params = [pooling_requests.resolve(p, task) for p in each]  # pyright: ignore[reportArgumentType]
        if truncate_prompt_tokens is not None:
            changes = {"truncate_prompt_tokens": truncate_prompt_tokens}
            params = [dataclasses.replace(p, **changes) for p in params]
        check(bool(listed), "prompts", prompts, "at least one prompt")
        pairs = enumerate(zip(listed, params, strict=True))
        requests = [self._check(i, prompt, request_params) for i, (prompt, request_params) in pairs]
        outputs = self._run(requests, use_tqdm)
        return [(o, pooling_requests.data_of(o, p)) for o, p in zip(outputs, params, strict=True)]

    @abc.abstractmethod
    def _check(self, index: int, prompt: Prompt, params: Any) -> CheckedRequest:
        """Checks a prompt of several."""

    @abc.abstractmethod
    def _run(self, requests: list[CheckedRequest], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Runs requests to their end."""


def _check_no_adapter(lora_request: Any) -> None:
    """Raises ValueError unless lora_request is None."""
    check(lora_request is None, "lora_request", lora_request, "None because adapters are not supported")


def _made[T: PoolingRequestOutput[Any]](make: type[T], output: RequestOutput, outputs: Any) -> T:
    """Makes the output of a pooling request from what the engine returned and what was pooled."""
    return make(
        request_id=output.request_id,
        outputs=outputs,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
