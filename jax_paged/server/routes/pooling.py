"""Routes for embeddings, classification, scoring and reranking, compatible with OpenAI and vLLM."""

import base64
import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from pydantic import AliasChoices, Field, WithJsonSchema

from jax_paged.arguments.ignored import Ignored
from jax_paged.engine.features import pooling
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.prompt_reader import as_prompts
from jax_paged.errors import check, check_int
from jax_paged.inputs import Prompt
from jax_paged.outputs import CompletionOutput, RequestOutput
from jax_paged.pooling_params import PoolingParams, PoolingTask
from jax_paged.server.http.event_stream import result_unless_disconnected
from jax_paged.server.protocol.nested_objects import Integer
from jax_paged.server.protocol.requests import Body, Prompts, ranged_field
from jax_paged.server.protocol.responses import ApiError, json_response, usage
from jax_paged.server.routes.generation import TextRoutes, check_model, value_errors_as_400

_MAX_TEXTS = 2048  # maximum number of inputs per request, as in OpenAI's API
_Texts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            ]
        }
    ),
]


class PoolingBody(Body):
    """Fields that all pooling requests have in common."""

    prompt_field: ClassVar[str] = "input"
    # These fields would change the tokenization or the format of the response.
    unsupported: ClassVar[Ignored] = {
        **Body.unsupported,
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }

    truncate_prompt_tokens: Integer | None = ranged_field(-1)
    use_activation: bool | None = None
    normalize: bool | None = Field(None, description="Alias of use_activation for embeddings.")
    priority: Integer | None = None
    user: Any = None

    def pooling_params(self) -> PoolingParams:
        """Returns the pooling parameters of the request.

        Raises:
            ValueError: If a value is out of range.
        """
        names = [field.name for field in dataclasses.fields(PoolingParams)]
        return PoolingParams(**{name: getattr(self, name, None) for name in names})


class ClassifyRequest(PoolingBody):
    """Body of POST /classify."""

    input: Prompts = Field(examples=["A block table says where a sequence's keys are."])


class EmbeddingRequest(ClassifyRequest):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 encodes the little-endian bytes of the float32 numbers."
    )
    dimensions: Integer | None = ranged_field(1)


class PoolingRequest(EmbeddingRequest):
    """Body of POST /pooling."""

    task: Literal["embed", "classify", "token_embed"] | None = None


class ScoreRequest(PoolingBody):
    """Body of POST /score.

    If `text_1` is a single text, it is scored with each text of `text_2`. Otherwise, both are lists of the
    same length and are scored in pairs.
    """

    prompt_field: ClassVar[str] = "text_2"

    text_1: _Texts = Field(validation_alias=AliasChoices("text_1", "data_1", "queries"))
    text_2: _Texts = Field(validation_alias=AliasChoices("text_2", "data_2", "documents"))


class RerankRequest(PoolingBody):
    """Body of POST /rerank."""

    prompt_field: ClassVar[str] = "documents"

    query: str = Field(examples=["What is a block table?"])
    documents: list[str] = Field(min_length=1, examples=[["A list of block ids.", "A piece of furniture."]])
    top_n: Integer | None = ranged_field(0)


@dataclasses.dataclass(frozen=True)
class _Pooled:
    """Pooling output of one prompt.

    Args:
        output: Output of the engine.
        data: float32 [size], or [tokens, size] for one vector per token.
    """

    output: RequestOutput
    data: np.ndarray


class PoolingRoutes(TextRoutes):
    """Handlers of the pooling routes."""

    async def embeddings(self, body: EmbeddingRequest, request: Request) -> Response:
        """POST /v1/embeddings: Returns an embedding for each input."""
        results = await self._pooled("embed", body, body.input, request)
        encoded = [_encoded(pooled.data, body.encoding_format) for pooled in results]
        return self._listed("embd", [{"object": "embedding", "embedding": data} for data in encoded], results)

    async def pooling(self, body: PoolingRequest, request: Request) -> Response:
        """POST /pooling: Returns embeddings or class probabilities of each input, depending on `task`."""
        results = await self._pooled(body.task, body, body.input, request)
        encoded = [_encoded(pooled.data, body.encoding_format) for pooled in results]
        return self._listed("pool", [{"object": "pooling", "data": data} for data in encoded], results)

    async def classify(self, body: ClassifyRequest, request: Request) -> Response:
        """POST /classify: Returns the class probabilities and the most likely class of each input."""
        results = await self._pooled("classify", body, body.input, request)
        spec = self._config.pooling
        assert spec is not None, "model without a pooler has classified its inputs"
        data = [
            {
                "label": spec.labels[int(pooled.data.argmax())],
                "probs": pooled.data.tolist(),
                "num_classes": len(spec.labels),
            }
            for pooled in results
        ]
        return self._listed("classify", data, results)

    async def score(self, body: ScoreRequest, request: Request) -> Response:
        """POST /score: Returns the similarity or relevance score of pairs of texts."""
        given = {"text_1": body.text_1, "text_2": body.text_2}
        scores, results = await self._scores(body, given, request)
        return self._listed("score", [{"object": "score", "score": score} for score in scores], results)

    async def rerank(self, body: RerankRequest, request: Request) -> Response:
        """POST /rerank: Sorts documents by their relevance to a query, the best first."""
        with value_errors_as_400(body):
            if body.top_n is not None:
                check_int("top_n", body.top_n, 0)
        given = {"query": body.query, "documents": body.documents}
        scores, outputs = await self._scores(body, given, request)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        results = [
            {"index": i, "document": {"text": body.documents[i]}, "relevance_score": scores[i]} for i in best
        ]
        usage = {name: _usage(outputs)[name] for name in ("prompt_tokens", "total_tokens")}
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": self._model_name}
        return json_response({**head, "usage": usage, "results": results})

    async def _scores(
        self, body: PoolingBody, given: dict[str, Any], request: Request
    ) -> tuple[list[float], list[_Pooled]]:
        with value_errors_as_400(body):
            for name, texts in given.items():
                each = texts if isinstance(texts, list) else [texts]
                ok = bool(each) and all(isinstance(text, str) and text for text in each)
                check(ok, name, texts, "a non-empty string or a list of non-empty strings")
            pairs = pooling.pairs_of(*given.values(), names=given)
            check_int(body.prompt_field, len(pairs), 1, _MAX_TEXTS, aspect="the number of texts in")
        spec = self._config.pooling
        # A model with labels scores each pair itself. For an embedding model, the score is the similarity of
        # the embeddings, and each distinct text is embedded once.
        if spec is None or spec.labels:
            results = await self._pooled("score", body, pairs, request)
            return [float(pooled.data[0]) for pooled in results], results
        texts, which = pooling.distinct([text for pair in pairs for text in pair])
        results = await self._pooled("embed", body, texts, request, 2 * _MAX_TEXTS)
        both = zip(which[::2], which[1::2], strict=True)
        return [pooling.similarity(results[i].data, results[j].data) for i, j in both], results

    async def _pooled(
        self,
        task: PoolingTask | None,
        body: PoolingBody,
        inputs: Any,
        request: Request,
        most: int = _MAX_TEXTS,
    ) -> list[_Pooled]:
        check_model(body, self._model_name)
        with value_errors_as_400(body):
            params = self._engine.engine.input_processor.pooling.resolve(body.pooling_params(), task)
            is_input = isinstance(inputs, str | list | dict)
            check(is_input, body.prompt_field, inputs, "a string, a list of token ids, or a list of these")
            prompts = as_prompts(inputs)
            check(bool(prompts), body.prompt_field, prompts, "at least one text")
            check_int(body.prompt_field, len(prompts), 1, most, aspect="the number of prompts in")
            texts = [list(p) if isinstance(p, tuple) else p for p in prompts]
            checked = await self._preprocessor.run(
                texts, lambda: self._check_all(prompts, params, body.priority or 0)
            )
        results = await result_unless_disconnected(request.receive, self._run(checked, params, request))
        if results is None:
            raise ApiError("the client has disconnected", status=499)
        return results

    def _check_all(
        self, prompts: Sequence[Prompt | tuple[str, str]], params: PoolingParams, priority: int
    ) -> list[CheckedRequest]:
        engine = self._engine.engine
        requests = []
        for prompt in prompts:
            own = params
            if isinstance(prompt, tuple):
                prompt, own = engine.input_processor.pooling.pair_prompt(prompt, params)
            requests.append(engine.check_request(prompt, own, priority=priority))
        return requests

    async def _run(
        self, requests: list[CheckedRequest], params: PoolingParams, request: Request
    ) -> list[_Pooled]:
        def pooled(_: int, __: CompletionOutput, output: RequestOutput) -> Any:
            return _Pooled(output, self._engine.engine.input_processor.pooling.data_of(output, params))

        head = {"id": f"pool-{uuid.uuid4().hex}"}
        call = self._call(request, requests, head, pooled, counts_output=False)
        try:
            return (await self._runner.answer(call))["choices"]
        except ValueError as error:
            raise ApiError(str(error), status=500) from error

    def _listed(self, prefix: str, data: list[dict[str, Any]], results: list[_Pooled]) -> Response:
        return json_response(
            {
                "id": f"{prefix}-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": self._model_name,
                "data": [{"index": i, **one} for i, one in enumerate(data)],
                "usage": _usage(results),
            }
        )


def _encoded(data: np.ndarray, encoding_format: str | None) -> Any:
    if encoding_format == "base64":
        return base64.b64encode(data.astype("<f4").tobytes()).decode()
    return data.tolist()


def _usage(results: list[_Pooled]) -> dict[str, Any]:
    return usage([pooled.output for pooled in results], 0)
