"""Methods of LLM for pooling models: embeddings, classification and scoring."""

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
from jax_paged.engine.synchronized import Synchronized
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

# Whether to show a progress bar, or a function that creates one and has tqdm's arguments.
UseTqdm = bool | Callable[..., tqdm]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods(Synchronized, abc.ABC):
    """Methods of LLM for pooling models: embeddings, class probabilities and scores.

    Each call runs all of its texts together in batches.

    Attributes:
        llm_engine: The engine, or the first of several engines.
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
        """Returns an embedding for each prompt.

        Example:
            >>> with LLM(runner="pooling") as llm:
            ...     len(llm.embed("A block table is")[0].outputs.embedding)

        Args:
            prompts: One prompt or a list of prompts, as in LLM.generate.
            truncate_prompt_tokens: Overrides PoolingParams.truncate_prompt_tokens.
            use_tqdm: The progress bar, as in LLM.generate.
            pooling_params: Parameters for all prompts, or a list with one item per prompt.
            lora_request: Must be None; adapters are not supported for pooling.

        Raises:
            ValueError: If the model does not support the task or can't process a prompt. No prompt has run
                then.
        """
        _check_no_adapter(lora_request)
        pooled = self._pool("embed", prompts, pooling_params, truncate_prompt_tokens, use_tqdm)
        return [
            _pooling_output(EmbeddingRequestOutput, o, EmbeddingOutput(data.tolist())) for o, data in pooled
        ]

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
        """Returns class probabilities for each prompt.

        Example:
            >>> with LLM("path/to/classifier") as llm:
            ...     llm.classify("I like it")[0].outputs.probs

        Args:
            prompts: One prompt or a list of prompts, as in LLM.generate.
            truncate_prompt_tokens: Overrides PoolingParams.truncate_prompt_tokens.
            use_tqdm: The progress bar, as in LLM.generate.
            pooling_params: Parameters for all prompts, or a list with one item per prompt.
            lora_request: Must be None; adapters are not supported for pooling.

        Raises:
            ValueError: If the model does not support the task or can't process a prompt. No prompt has run
                then.
        """
        _check_no_adapter(lora_request)
        pooled = self._pool("classify", prompts, pooling_params, truncate_prompt_tokens, use_tqdm)
        return [
            _pooling_output(ClassificationRequestOutput, o, ClassificationOutput(data.tolist()))
            for o, data in pooled
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
        """Returns the array that a pooling task computes for each prompt.

        Example:
            >>> with LLM(runner="pooling") as llm:
            ...     llm.encode("A block table is", pooling_task="token_embed")[0].outputs.data.shape

        Args:
            prompts: One prompt or a list of prompts, as in LLM.generate.
            truncate_prompt_tokens: Overrides PoolingParams.truncate_prompt_tokens.
            use_tqdm: The progress bar, as in LLM.generate.
            pooling_params: Parameters for all prompts, or a list with one item per prompt.
            lora_request: Must be None; adapters are not supported for pooling.
            pooling_task: "embed" for an embedding, "classify" for class probabilities, "token_embed" for one
                embedding per token. None uses the task of the parameters, or the model's first task.

        Raises:
            ValueError: If the model does not support the task or can't process a prompt. No prompt has run
                then.
        """
        _check_no_adapter(lora_request)
        pooled = self._pool(pooling_task, prompts, pooling_params, truncate_prompt_tokens, use_tqdm)
        return [_pooling_output(PoolingRequestOutput, o, PoolingOutput(data)) for o, data in pooled]

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
        """Returns a similarity or relevance score for each pair of texts.

        A classifier with one class reads both texts as one prompt and returns its score. An embedding model
        returns the cosine similarity of the two embeddings.

        Example:
            >>> with LLM(runner="pooling") as llm:
            ...     scores = llm.score("a question", ["a document", "another document"])
            >>> [score.outputs.score for score in scores]

        Args:
            data_1: One text or a list of texts. One text is paired with each text of `data_2`.
            data_2: One text or a list of texts; as many as in `data_1`, unless that is a single text.
            truncate_prompt_tokens: Overrides PoolingParams.truncate_prompt_tokens.
            use_tqdm: The progress bar, as in LLM.generate.
            pooling_params: Parameters for all texts.
            lora_request: Must be None; adapters are not supported for pooling.

        Raises:
            ValueError: If the model does not support the task or can't process a text. No text has run then.
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
        return [_pooling_output(ScoringRequestOutput, o, ScoringOutput(float(data[0]))) for o, data in found]

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
        check(bool(listed), "prompts", prompts, "a prompt or a non-empty list of prompts")
        pairs = enumerate(zip(listed, params, strict=True))
        requests = [self._check(i, prompt, request_params) for i, (prompt, request_params) in pairs]
        outputs = self._run(requests, use_tqdm)
        return [(o, pooling_requests.data_of(o, p)) for o, p in zip(outputs, params, strict=True)]

    @abc.abstractmethod
    def _check(self, index: int, prompt: Prompt, params: Any) -> CheckedRequest:
        """Checks one prompt of a list; the index is used in error messages."""

    @abc.abstractmethod
    def _run(self, requests: list[CheckedRequest], use_tqdm: UseTqdm) -> list[RequestOutput]:
        """Runs requests until they have finished."""


def _check_no_adapter(lora_request: Any) -> None:
    """Raises ValueError unless lora_request is None."""
    check(
        lora_request is None,
        "lora_request",
        lora_request,
        "None because adapters are not supported for pooling",
    )


def _pooling_output[T: PoolingRequestOutput[Any]](make: type[T], output: RequestOutput, outputs: Any) -> T:
    """Creates the output of a pooling request from the engine's output and the pooled result."""
    return make(
        request_id=output.request_id,
        outputs=outputs,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
