"""Tool-call and reasoning settings of a chat request: its checks, its grammar and its output parsers."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax_paged.arguments.shown_values import Text, one_of, shown
from jax_paged.engine.features.structured_output.json_schema import RelaxedSchema
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, check, first_argument_error
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.protocol.nested_objects import NamedTool, Tool
from jax_paged.server.protocol.requests import ChatRequest
from jax_paged.server.protocol.responses import MakeChoice
from jax_paged.server.tools.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    calls_grammar,
    response_template,
)
from jax_paged.server.tools.parsed_chat import OutputParser, parsed_choices
from jax_paged.structured_outputs import StructuredOutputsParams

# Number of tokens at the end of a prompt that are decoded to find out whether the output starts inside the
# reasoning.
_NUM_LAST_TOKENS = 32
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# Keywords of JSON schemas whose values are schemas (_SCHEMAS), lists of schemas (_LISTS) or objects with
# schemas as values (_OBJECTS).
_SCHEMAS = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
# A JSON schema with only these keywords is plain: no properties are allowed besides the ones that it names.
_PLAIN = frozenset(
    ("$defs", "$schema", "definitions", "description", "properties", "required", "title", "type")
)
_OBJECTS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


@dataclasses.dataclass(frozen=True)
class ChatSettings:
    """Tool-call and reasoning settings of one chat request.

    Args:
        tools: Tools for the chat template; None if there are none.
        format: Format of the tool calls in the output; None if the output is not searched for calls.
        forced: Functions of which at least one must be called; empty if the model may decide.
        parallel: Whether an output may have several calls.
        reasoning: Format of the reasoning; None if reasoning is not separated from the content.
        warnings: A sentence for each constraint in the schemas of the forced functions that is not enforced.
    """

    tools: list[dict[str, Any]] | None
    format: ToolFormat | None
    forced: tuple[dict[str, Any], ...]
    parallel: bool
    reasoning: ReasoningFormat | None
    warnings: tuple[str, ...] = ()

    def params(
        self, params: SamplingParams | BeamSearchParams, tokenizer: Tokenizer
    ) -> SamplingParams | BeamSearchParams:
        """Returns sampling parameters with which outputs can be parsed and contain the forced calls.

        Special tokens are kept in the text if the parser needs them, and a grammar is added for forced calls.

        Args:
            params: Sampling parameters of the request.
            tokenizer: Tokenizer of the model.

        Raises:
            ValueError: If calls cannot be forced because of other parameters.
        """
        if isinstance(params, BeamSearchParams):
            check(
                not self.forced, "tool_choice", Text("a forced call"), "'none' or 'auto' with use_beam_search"
            )
            return params
        tags = list(self.format.tags) if self.format else []
        if self.reasoning:
            tags += self.reasoning.tags or (self.reasoning.begin, self.reasoning.end)
        ids = {tag: tokenizer.control_token_id(tag) for tag in tags}
        if any(token_id is not None for token_id in ids.values()):
            params = dataclasses.replace(params, skip_special_tokens=False)
        form = params.structured_outputs
        if self.forced:
            check(
                form is None, "tool_choice", Text("a forced call"), "'none' or 'auto' with structured outputs"
            )
            end = self.reasoning.end if self.reasoning else None
            tag = self.reasoning.begin if self.reasoning and not self.reasoning.begin_is_implied else None
            form = StructuredOutputsParams(grammar=self._grammar(ids), starts_after=end, reasoning_tag=tag)
            params = dataclasses.replace(params, structured_outputs=form)
        return constrain_after_reasoning(params, self.reasoning)

    def _grammar(self, ids: dict[str, int | None]) -> str:
        """Returns the grammar of calls to the forced functions.

        Args:
            ids: Ids of the control tokens for the tags of the formats; None for a tag that is not a token.
        """
        assert self.format is not None, "forced tool calls have no format"
        tags = "|".join(map(re.escape, ids)) or "$^"

        def literal(text: str) -> str:
            parts = [(part, ids.get(part)) for part in re.split(f"({tags})", text) if part]
            return " ".join(f"<[{i}]>" if i is not None else _quoted(part) for part, i in parts)

        return calls_grammar(
            next(text for text in self.format.texts if not text.required or ids[text.required] is not None),
            [(function["name"], _parameters(function)) for function in self.forced],
            literal,
            parallel=self.parallel,
            after_reasoning=self.reasoning is not None,
        )

    def choices(
        self,
        choice: MakeChoice,
        num_choices: int,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stream: bool,
        has_grammar: bool,
    ) -> MakeChoice:
        """Returns a function that makes the choices of a response from parsed outputs.

        Args:
            choice: Makes choices from unparsed outputs.
            num_choices: Number of choices in the response.
            tokenizer: Tokenizer of the model.
            prompt: Token ids of the conversation.
            stream: Whether the function makes the choices of chunks.
            has_grammar: Whether the outputs are constrained by a grammar.
        """
        parsers = [self.parser(tokenizer, prompt, has_grammar=has_grammar) for _ in range(num_choices)]
        return parsed_choices(choice, parsers, stream=stream)

    def parser(self, tokenizer: Tokenizer, prompt: Sequence[int], *, has_grammar: bool) -> OutputParser:
        """Returns a parser for one output.

        Args:
            tokenizer: Tokenizer of the model.
            prompt: Token ids of the conversation.
            has_grammar: Whether the output is constrained by a grammar.
        """
        in_reasoning = self._starts_in_reasoning(tokenizer, prompt)
        fallback = (
            response_template(self.format, self.reasoning, False) if in_reasoning and has_grammar else None
        )
        return OutputParser(
            response_template(self.format, self.reasoning, in_reasoning),
            parallel=self.parallel,
            reasoning=self.reasoning,
            fallback_template=fallback,
        )

    def _starts_in_reasoning(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        if self.reasoning is None:
            return False
        end = tokenizer.decode(prompt[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
        return self.reasoning.starts_in_reasoning(end)


@contextlib.contextmanager
def grammar_errors_as_tool_errors(settings: ChatSettings | None) -> Iterator[None]:
    """Converts a ValueError about the grammar of forced calls to a ValueError about the tools."""
    try:
        yield
    except ValueError as error:
        cause = first_argument_error(error)
        if settings is None or not settings.forced or cause is None or not cause.name.endswith("grammar"):
            raise
        names = [tool["name"] for tool in settings.forced]
        raise ArgumentError("tools", names, f"functions whose grammar is {cause.allowed}") from error


def constrain_after_reasoning(params: SamplingParams, reasoning: ReasoningFormat | None) -> SamplingParams:
    """Returns parameters whose grammar, if there is one, applies only after the reasoning."""
    constraint = params.structured_outputs
    if constraint is None or constraint.starts_after is not None or reasoning is None:
        return params
    constraint = dataclasses.replace(
        constraint,
        starts_after=reasoning.answer or reasoning.end,
        reasoning_tag=None if reasoning.begin_is_implied else reasoning.header or reasoning.begin,
    )
    return dataclasses.replace(params, structured_outputs=constraint)


class ModelFormats:
    """Formats of the served model's tool calls and reasoning; makes the ChatSettings of each request.

    Args:
        options: Options of the server, for the formats of the model.

    Attributes:
        reasoning: Format of the model's reasoning; None if it is not separated from the content.
    """

    def __init__(self, options: ServerOptions) -> None:
        tools, reasoning = options.tool_call_parser, options.reasoning_parser
        self._tools = None if tools is None else TOOL_FORMATS[tools]
        self.reasoning = None if reasoning is None else REASONING_FORMATS[reasoning]
        # Builds the templates now, so that the first request does not have to wait for them.
        for format in {self._tools, None}:
            for in_reasoning in (False, True):
                if format or self.reasoning:
                    response_template(format, self.reasoning, in_reasoning)

    def settings_of(self, body: ChatRequest) -> ChatSettings | None:
        """Returns the ChatSettings of a request; None if its outputs are not parsed.

        Raises:
            ValueError: If the fields tools or tool_choice are invalid.
        """
        choice = body.tool_choice
        if not body.tools:
            given = choice if isinstance(choice, str) else Text("a function")
            ok = choice in (None, "none", "auto")
            check(ok, "tool_choice", given, "'none' or 'auto' because there are no tools")
            if self.reasoning is None:
                return None
            return ChatSettings(None, None, (), True, self.reasoning)
        chosen = _chosen(body.tools, choice)
        schemas = RelaxedSchema([tool.function.model_dump(exclude_unset=True) for tool in chosen])
        if choice in (None, "auto") and self._tools is None:
            allowed = "'none', 'required' or a function because the server runs without --tool-call-parser"
            raise ArgumentError("tool_choice", "auto", allowed)
        return ChatSettings(
            [tool.model_dump(exclude_unset=True) for tool in body.tools],
            # Without a format for the model, forced calls are written as plain JSON in Llama's format.
            None if choice == "none" else self._tools or TOOL_FORMATS["llama3"],
            tuple(schemas.schema),
            body.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
            self.reasoning,
            schemas.warnings,
        )


def _chosen(tools: Sequence[Tool], choice: Any) -> Sequence[Tool]:
    """Checks all tools, and returns those of which `choice` requires a call."""
    names = [tool.function.name for tool in tools]
    for i, tool in enumerate(tools):
        name = f"tools[{i}].function"
        check(names.index(names[i]) == i, f"{name}.name", names[i], "a name that no earlier tool has")
        parameters = tool.function.parameters
        if parameters is not None:
            kind = parameters.get("type", "object")
            check(kind == "object", f"{name}.parameters.type", kind, "'object'")
            _check_schema(f"{name}.parameters", parameters)
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        check(wanted in names, "tool_choice.function.name", wanted, f"the name of a tool ({shown(names)})")
        return [tools[names.index(wanted)]]
    return tools if choice == "required" else ()


def _check_schema(name: str, schema: Any) -> None:
    check(isinstance(schema, dict | bool), name, schema, "a JSON schema")
    if isinstance(schema, bool):
        return
    kinds = schema.get("type", "object")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        check(kind in _TYPES, f"{name}.type", kind, one_of(_TYPES))
    required = schema.get("required", [])
    ok = isinstance(required, list) and all(isinstance(item, str) for item in required)
    check(ok, f"{name}.required", required, "a list of property names")
    check(isinstance(schema.get("enum", []), list), f"{name}.enum", schema.get("enum"), "a list")
    for key in _SCHEMAS:
        if key in schema:
            items = schema[key]
            for item in items if key == "items" and isinstance(items, list) else [items]:
                _check_schema(f"{name}.{key}", item)
    for key in _LISTS:
        items = schema.get(key, [])
        check(isinstance(items, list), f"{name}.{key}", items, "a list of JSON schemas")
        for i, item in enumerate(items):
            _check_schema(f"{name}.{key}[{i}]", item)
    for key in _OBJECTS:
        items = schema.get(key, {})
        check(isinstance(items, dict), f"{name}.{key}", items, "an object of JSON schemas")
        for inner, item in items.items():
            _check_schema(f"{name}.{key}.{inner}", item)


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function's arguments.

    If the schema is plain, properties that it does not name are excluded.
    """
    parameters = function.get("parameters") or {}
    is_closed = not parameters or ("properties" in parameters and parameters.keys() <= _PLAIN)
    return {"type": "object", **({"additionalProperties": False} if is_closed else {}), **parameters}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
