"""What a chat asks for beside text: calls of tools, and thoughts apart from the answer."""

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
from jax_paged.server.protocol.parts import NamedTool, Tool
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

# Tokens at the end of a prompt that tell whether the model is thinking.
_NUM_LAST_TOKENS = 32
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
# Keywords of JSON schemas whose values are schemas, lists of them, or objects of them.
_SCHEMAS = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
# What the schema of an object may have for it to name all of its properties.
_PLAIN = frozenset(
    ("$defs", "$schema", "definitions", "description", "properties", "required", "title", "type")
)
_OBJECTS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


@dataclasses.dataclass(frozen=True)
class ChatReader:
    """How the outputs of a chat are written and taken apart.

    Args:
        tools: For the chat template; None for none.
        format: How calls are written; None if none are looked for.
        forced: Functions, one of which must be called; none if calls are up to the model.
        parallel: Whether an output may have several calls.
        reasoning: How the model thinks; None if thoughts are a part of the content.
        warnings: A sentence for each constraint of the forced functions' schemas that is not enforced.
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
        """Returns the parameters by which outputs can be taken apart, and call what they have to call.

        Args:
            params: What the client asks for.
            tokenizer: Of the model.

        Raises:
            ValueError: If calls can't be forced.
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
            behind = self.reasoning.end if self.reasoning else None
            tag = self.reasoning.begin if self.reasoning and not self.reasoning.always else None
            form = StructuredOutputsParams(grammar=self._grammar(ids), starts_after=behind, reasoning_tag=tag)
            params = dataclasses.replace(params, structured_outputs=form)
        return behind_thoughts(params, self.reasoning)

    def _grammar(self, ids: dict[str, int | None]) -> str:
        """Returns a grammar of calls of the functions that are forced."""
        assert self.format is not None, "calls that are forced are looked for"
        tags = "|".join(map(re.escape, ids)) or "$^"

        def literal(text: str) -> str:
            parts = [(part, ids.get(part)) for part in re.split(f"({tags})", text) if part]
            return " ".join(f"<[{i}]>" if i is not None else _quoted(part) for part, i in parts)

        return calls_grammar(
            next(text for text in self.format.texts if not text.needs or ids[text.needs] is not None),
            [(function["name"], _parameters(function)) for function in self.forced],
            literal,
            parallel=self.parallel,
            behind_thoughts=self.reasoning is not None,
        )

    def choices(
        self,
        choice: MakeChoice,
        num_choices: int,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stream: bool,
        has_form: bool,
    ) -> MakeChoice:
        """Returns a function that makes the choices of an answer.

        Args:
            choice: Makes them from outputs as they are.
            num_choices: Of the answer.
            tokenizer: Of the model.
            prompt: The conversation's token ids.
            stream: Whether the choices are parts.
            has_form: Whether the outputs are constrained.
        """
        parsers = [self.parser(tokenizer, prompt, has_form=has_form) for _ in range(num_choices)]
        return parsed_choices(choice, parsers, stream=stream)

    def parser(self, tokenizer: Tokenizer, prompt: Sequence[int], *, has_form: bool) -> OutputParser:
        """Returns what takes one output apart.

        Args:
            tokenizer: Of the model.
            prompt: The conversation's token ids.
            has_form: Whether the output is constrained.
        """
        is_thinking = self._is_thinking(tokenizer, prompt)
        without = response_template(self.format, self.reasoning, False) if is_thinking and has_form else None
        return OutputParser(
            response_template(self.format, self.reasoning, is_thinking),
            parallel=self.parallel,
            reasoning=self.reasoning,
            without_reasoning=without,
        )

    def _is_thinking(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
        if self.reasoning is None:
            return False
        end = tokenizer.decode(prompt[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
        return self.reasoning.is_thinking(end)


@contextlib.contextmanager
def blaming_tools(reader: ChatReader | None) -> Iterator[None]:
    """Turns a ValueError about a grammar that is made of tools into one about the tools."""
    try:
        yield
    except ValueError as error:
        cause = first_argument_error(error)
        if reader is None or not reader.forced or cause is None or not cause.name.endswith("grammar"):
            raise
        names = [tool["name"] for tool in reader.forced]
        raise ArgumentError("tools", names, f"functions whose grammar is {cause.allowed}") from error


def behind_thoughts(params: SamplingParams, reasoning: ReasoningFormat | None) -> SamplingParams:
    """Returns parameters whose form of the output, if they have one, begins where a model's answer does."""
    form = params.structured_outputs
    if form is None or form.starts_after is not None or reasoning is None:
        return params
    form = dataclasses.replace(
        form,
        starts_after=reasoning.answer or reasoning.end,
        reasoning_tag=None if reasoning.always else reasoning.header or reasoning.begin,
    )
    return dataclasses.replace(params, structured_outputs=form)


class ChatReaders:
    """Tells how a server's chats are taken apart.

    Args:
        options: Name the formats of the model.

    Attributes:
        reasoning: How the model thinks; None if it does not.
    """

    def __init__(self, options: ServerOptions) -> None:
        tools, reasoning = options.tool_call_parser, options.reasoning_parser
        self._tools = None if tools is None else TOOL_FORMATS[tools]
        self.reasoning = None if reasoning is None else REASONING_FORMATS[reasoning]
        for format in {self._tools, None}:  # now, not by the first request
            for is_thinking in (False, True):
                if format or self.reasoning:
                    response_template(format, self.reasoning, is_thinking)

    def reader_of(self, body: ChatRequest) -> ChatReader | None:
        """Returns how the outputs of a request are taken apart; None if they are not.

        Raises:
            ValueError: If its tools or its choice of them are wrong.
        """
        choice = body.tool_choice
        if not body.tools:
            given = choice if isinstance(choice, str) else Text("a function")
            ok = choice in (None, "none", "auto")
            check(ok, "tool_choice", given, "'none' or 'auto' because there are no tools")
            if self.reasoning is None:
                return None
            return ChatReader(None, None, (), True, self.reasoning)
        chosen = _chosen(body.tools, choice)
        schemas = RelaxedSchema([tool.function.model_dump(exclude_unset=True) for tool in chosen])
        if choice in (None, "auto") and self._tools is None:
            allowed = "'none', 'required' or a function because the server runs without --tool-call-parser"
            raise ArgumentError("tool_choice", "auto", allowed)
        return ChatReader(
            [tool.model_dump(exclude_unset=True) for tool in body.tools],
            # Where no format is known, plain JSON is what a grammar demands.
            None if choice == "none" else self._tools or TOOL_FORMATS["llama3"],
            tuple(schemas.schema),
            body.parallel_tool_calls is not False and not isinstance(choice, NamedTool),
            self.reasoning,
            schemas.warnings,
        )


def _chosen(tools: Sequence[Tool], choice: Any) -> Sequence[Tool]:
    """Returns the tools of which a choice demands one, after a check of all of them."""
    names = [tool.function.name for tool in tools]
    for i, tool in enumerate(tools):
        name = f"tools[{i}].function"
        check(names.index(names[i]) == i, f"{name}.name", names[i], "a name that no tool before has")
        parameters = tool.function.parameters
        if parameters is not None:
            kind = parameters.get("type", "object")
            check(kind == "object", f"{name}.parameters.type", kind, "'object'")
            _check_schema(f"{name}.parameters", parameters)
    if isinstance(choice, NamedTool):
        wanted = choice.function.name
        check(wanted in names, "tool_choice.function.name", wanted, f"the name of a tool, {shown(names)}")
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
    check(ok, f"{name}.required", required, "a list of names")
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
    """Returns the schema of a function's arguments: no others than it names, where it names them plainly."""
    parameters = function.get("parameters") or {}
    is_closed = not parameters or ("properties" in parameters and parameters.keys() <= _PLAIN)
    return {"type": "object", **({"additionalProperties": False} if is_closed else {}), **parameters}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
