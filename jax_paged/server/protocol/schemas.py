"""The forms of all answers, for the OpenAPI document; the tests compare them with what the server sends."""

from typing import Any, Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ErrorInfo(TypedDict):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    error: ErrorInfo


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Answer(TypedDict):
    id: str
    created: int
    model: str
    usage: Usage


class Choice(TypedDict):
    index: int
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]
    token_ids: NotRequired[list[int]]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_token_ids: NotRequired[list[int]]


class CompletionAnswer(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatAnswer(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: Literal["completed"]
    summary: list[Any]
    content: list[ReasoningText]


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseFormatAnswer(TypedDict):
    type: Literal["text", "json_object", "json_schema"]
    name: NotRequired[str]
    schema: NotRequired[dict[str, Any]]
    strict: NotRequired[bool]
    description: NotRequired[str]


class ResponseTextAnswer(TypedDict):
    format: ResponseFormatAnswer


class ResponseAnswer(TypedDict):
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
    text: ResponseTextAnswer
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


class PoolingHead(Answer):
    object: Literal["list"]


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(PoolingHead):
    data: list[Embedding]


class Pooled(TypedDict):
    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


class PoolingAnswer(PoolingHead):
    data: list[Pooled]


class Classified(TypedDict):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(PoolingHead):
    data: list[Classified]


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class ScoreAnswer(PoolingHead):
    data: list[Score]


class RerankDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: int
    document: RerankDocument
    relevance_score: float


class RerankUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class RerankAnswer(TypedDict):
    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(TypedDict):
    version: str


class SleepAnswer(TypedDict):
    is_sleeping: bool


class WeightVersionAnswer(TypedDict):
    weight_version: str


class TokenizeAnswer(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(TypedDict):
    prompt: str


class HealthAnswer(TypedDict):
    status: str
