"""Types of the response bodies, for the OpenAPI document.

The responses themselves are plain dicts. Tests compare them with these types. The docstrings become the
descriptions of the types in the OpenAPI document.
"""

from typing import Any, Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ErrorInfo(TypedDict):
    """Details of an error.

    `param` is the invalid field of the request, or null if the error is not about a single field. `code` is
    an error code for programs, such as `model_not_found`, or null.
    """

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """An error in OpenAI's format."""

    error: ErrorInfo


class CachedTokens(TypedDict):
    """Details of the number of prompt tokens: how many of them were found in the prefix cache."""

    cached_tokens: int


class Usage(TypedDict):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptLogprob(TypedDict):
    """Log-probability and rank of a token at a position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of the tokens of a completion: lists with one entry per token.

    `text_offset` is the position of each token in the text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ResponseBase(TypedDict):
    """Fields that the responses with token counts have in common."""

    id: str
    created: int
    model: str
    usage: Usage


class Choice(TypedDict):
    """Fields that the choices of completions and chats have in common.

    `stop_reason` is the stop string or the id of the stop token that ended the output, or null.
    """

    index: int
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    token_ids: NotRequired[list[int]]


class CompletionChoice(Choice):
    """One output of a completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_token_ids: NotRequired[list[int]]


class CompletionResponse(ResponseBase):
    """Response of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(TypedDict):
    """Log-probability of a token. `bytes` are the bytes that the token adds to the text."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """Log-probabilities of a generated token and of the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of the tokens of a message."""

    content: list[TokenLogprob]


class CalledFunction(TypedDict):
    """Name of a function and arguments as JSON. The model may write arguments that are not valid JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A tool call of the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """Message of the assistant.

    With `--reasoning-parser`, `reasoning` has the model's reasoning, and `reasoning_content` has the same
    text for older clients.
    """

    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Choice):
    """One output of a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletionResponse(ResponseBase):
    """Response of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]


class OutputText(TypedDict):
    """Text of an output message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    """Output item with a message of the assistant."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(TypedDict):
    """Output item with the model's reasoning."""

    id: str
    type: Literal["reasoning"]
    status: Literal["completed"]
    summary: list[Any]
    content: list[ReasoningText]


class OutputTokensDetails(TypedDict):
    """Details of the number of output tokens: how many of them are reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Reason why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class OutputTextFormat(TypedDict):
    """Format of the output text, as requested."""

    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool]
    description: NotRequired[str]


class OutputTextOptions(TypedDict):
    """Options of the output text."""

    format: OutputTextFormat


class ResponsesResponse(TypedDict):
    """Response of POST /v1/responses. Responses are not stored."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputMessage | ReasoningItem]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: Any
    temperature: float
    top_p: float
    top_logprobs: int
    text: OutputTextOptions
    tools: list[Any]
    tool_choice: Literal["none", "auto"]
    parallel_tool_calls: bool
    truncation: Literal["disabled"]
    background: bool
    store: bool
    previous_response_id: None
    reasoning: None
    user: Any
    usage: ResponseUsage


class PoolingResponseBase(ResponseBase):
    """Fields that the responses of pooling routes have in common."""

    object: Literal["list"]


class Embedding(TypedDict):
    """Embedding of one input: a list of numbers, or their float32 bytes (little-endian) in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(PoolingResponseBase):
    """Response of POST /v1/embeddings."""

    data: list[Embedding]


class Pooled(TypedDict):
    """Output for one input: a vector, a vector per token, or float32 bytes (little-endian) in base64."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


class PoolingResponse(PoolingResponseBase):
    """Response of POST /pooling."""

    data: list[Pooled]


class Classified(TypedDict):
    """Classification of one input: the most likely label, and the probability of each label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PoolingResponseBase):
    """Response of POST /classify."""

    data: list[Classified]


class Score(TypedDict):
    """Score of one pair of texts."""

    object: Literal["score"]
    index: int
    score: float


class ScoreResponse(PoolingResponseBase):
    """Response of POST /score."""

    data: list[Score]


class RerankDocument(TypedDict):
    """A document of the request."""

    text: str


class RerankResult(TypedDict):
    """A document with its relevance score and its index in the request."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankUsage(TypedDict):
    """Token counts of a rerank request."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(TypedDict):
    """Response of POST /rerank. The results are sorted by relevance, the best first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]


class ModelCard(TypedDict):
    """A model, or a LoRA adapter with the name of its base model as `parent`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]


class ModelList(TypedDict):
    """Response of GET /v1/models: the model and its LoRA adapters."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionResponse(TypedDict):
    """Response of GET /version: the version of jax-paged."""

    version: str


class SleepResponse(TypedDict):
    """Sleep state of the engine: whether any part of its memory is released."""

    is_sleeping: bool


class WeightVersionResponse(TypedDict):
    """Name of the weights that are being served."""

    weight_version: str


class TokenizeResponse(TypedDict):
    """Response of POST /tokenize. `token_strs` are the tokens as strings, if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeResponse(TypedDict):
    """Response of POST /detokenize: the text of the tokens."""

    prompt: str


class HealthResponse(TypedDict):
    """Response of the health routes."""

    status: str
