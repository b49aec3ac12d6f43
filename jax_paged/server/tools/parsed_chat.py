"""Choices of chat responses whose outputs are split into reasoning, content and tool calls."""

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from jax_paged.outputs import CompletionOutput, RequestOutput
from jax_paged.server.protocol.responses import MakeChoice
from jax_paged.server.tools.formats import (
    ARGUMENTS,
    BEFORE_ARGUMENTS,
    CALL,
    CONTENT,
    NAME,
    REASONING,
    ReasoningFormat,
)

# Characters that may follow the arguments and close the objects around them.
_CLOSING = "}] \t\r\n"
# Maximum number of brackets after the arguments that close the objects around them.
_MAX_CLOSING = 2
# Maximum number of characters between a marker in BEFORE_ARGUMENTS and the arguments: a name, an id and white
# space.
_MOST_BETWEEN = 400


class OutputParser:
    """Parser that splits one output into reasoning, content and tool calls while it is generated.

    The regions are found by the ResponseParser of transformers. While the arguments of a call are an open
    JSON object, the text is not passed to that parser, because it could mistake the content of a string for a
    tag.

    Args:
        template: Template from `formats.response_template`.
        parallel: Whether calls after the first one are kept. Otherwise they are dropped.
        reasoning: Format of the reasoning; None if reasoning is not separated from the content.
        fallback_template: Template without reasoning at the start of the output; None if it is not needed. It
            is needed if the prompt ends inside the reasoning, but a grammar allows an output that consists of
            the answer alone. If such an output ends without the end tag of the reasoning, all of it is parsed
            again with this template.
    """

    def __init__(
        self,
        template: Any,
        *,
        parallel: bool,
        reasoning: ReasoningFormat | None = None,
        fallback_template: Any = None,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser  # takes a second, once

        self._parser = ResponseParser(template, prefix="")
        self._parallel = parallel
        self._format = reasoning
        self._regions: list[str] = []  # text of each reasoning region
        self._fallback_template = fallback_template
        self._text = ""  # all text so far, if it may be parsed again
        self._calls: list[_Call] = []
        self._last = ""  # last characters of the parsed text
        self._is_first = False  # whether the arguments have just begun
        self._object: _OpenObject | None = None  # the open JSON object of the arguments
        self._is_whole = False  # whether the JSON object of the newest arguments is complete

    @property
    def has_calls(self) -> bool:
        """Whether the output has at least the beginning of a call."""
        return bool(self._calls)

    def take(self, completion: CompletionOutput) -> dict[str, Any]:
        """Returns the delta of a chat chunk for a new part of the output."""
        reason = completion.finish_reason
        has_ended = reason == "stop" and completion.stop_reason is None
        return self.feed(completion.text, is_last=reason is not None, has_ended=has_ended)

    def feed(self, text: str, *, is_last: bool, has_ended: bool = False) -> dict[str, Any]:
        """Returns the delta of a chat chunk for new text.

        Args:
            text: Text since the previous call.
            is_last: Whether this is the end of the output.
            has_ended: Whether the model has ended the output, as opposed to a limit or a stop string.

        Returns:
            The fields reasoning, reasoning_content, content and tool_calls, as far as the text adds to them.
        """
        new = self._feed(text, is_last=is_last)
        if self._fallback_template is None:
            return new
        self._text += text
        assert self._format is not None, "parser with a fallback template has no reasoning format"
        if not (is_last and has_ended) or self.has_calls or self._format.end in self._text:
            return new
        self._regions.clear()
        direct = OutputParser(self._fallback_template, parallel=self._parallel)
        new = direct.feed(self._text, is_last=True)
        self._calls = direct._calls
        return new

    def _feed(self, text: str, *, is_last: bool) -> dict[str, Any]:
        new: dict[str, Any] = {}
        while text:
            if self._object is not None:  # The parser could mistake the content of a string for a tag.
                num = self._object.num_inside(text)
                if self._keeps_newest:
                    self._calls[-1].add(new, text[:num])
                if num < len(text):
                    self._object, self._is_whole = None, True
            else:
                num = self._num_up_to_brace(text)
                self._last = (self._last + text[:num])[-_MOST_BETWEEN:]
                self._read(new, self._parser.feed(text[:num]))
            text = text[num:]
        if is_last:
            self._read(new, map(self._without_cut_tag, self._parser.finalize()[1]))
        if REASONING in new:
            new["reasoning_content"] = new[REASONING]  # older name of the field
        if "tool_calls" in new:
            new["tool_calls"] = list(new["tool_calls"].values())
        return new

    def reasoning_spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the positions (start, end) of the reasoning in the text of the output, in characters.

        Args:
            text: The whole text of the output.
        """
        spans, end = [], 0
        opening = self._format.begin if self._format else ""
        for region in filter(None, self._regions):
            begin, tag = text.find(region, end), text.find(opening, end)
            # The text of the region may also occur in the tag before the region.
            if end <= tag < begin + len(region):
                begin = max(begin, text.find(region, tag + len(opening)))
            if begin >= 0:
                end = begin + len(region)
                spans.append((begin, end))
        return spans

    def _num_up_to_brace(self, text: str) -> int:
        """Returns the number of characters up to a brace that may start arguments, or to the end of text."""
        num = 0
        while num := text.find("{", num) + 1:
            if any(marker in (self._last + text[:num])[-_MOST_BETWEEN:] for marker in BEFORE_ARGUMENTS):
                return num
        return len(text)

    def _without_cut_tag(self, event: dict[str, Any]) -> dict[str, Any]:
        """Returns a final event of the parser without a truncated closing tag after complete arguments.

        If an output is cut off inside the closing tag of a call, the parser returns the beginning of the tag
        as a part of the arguments.
        """
        is_rest = event["field"].startswith(ARGUMENTS) and event["type"] == "region_chunk" and self._is_whole
        if not is_rest:
            return event
        text = event["text"]
        return {**event, "text": text[: len(text) - len(text.lstrip(_CLOSING))]}

    @property
    def _keeps_newest(self) -> bool:
        """Whether the newest call is kept."""
        return self._parallel or len(self._calls) == 1

    def _read(self, new: dict[str, Any], events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            field, kind = event["field"].rstrip("0123456789"), event["type"]
            if field == REASONING and kind == "region_open":
                self._regions.append("")
            elif field == REASONING and kind == "region_chunk":
                self._regions[-1] += event["text"]
            if field in (CONTENT, REASONING):
                if kind == "region_chunk":
                    new[field] = new.get(field, "") + event["text"]
                continue
            if field in (NAME, CALL) and kind == "region_open":
                self._calls.append(_Call(len(self._calls)))
            if self._calls and self._keeps_newest:
                self._take(new, field, event)
            if field == ARGUMENTS and kind == "region_open":
                self._is_first, self._is_whole = True, False
            elif field == ARGUMENTS and kind == "region_chunk" and self._is_first and event["text"].strip():
                self._is_first = False
                self._object = _OpenObject() if event["text"].strip() == "{" else None

    def _take(self, new: dict[str, Any], field: str, event: dict[str, Any]) -> None:
        """Adds the content of an event to the newest call and to the delta `new`."""
        call = self._calls[-1]
        match field, event["type"]:
            case "name", "region_chunk":
                call.name += event["text"]
            case "name", "region_close":
                call.begin(new)
            case "arguments", "region_chunk":
                call.add(new, event["text"])
            case "arguments", "region_close":
                call.end(new)
            case "call", "region_close":
                call.name = event["value"][NAME]
                call.begin(new)
                call.add(new, event["value"][ARGUMENTS])
                call.end(new)
            case _:
                pass


class _OpenObject:
    """Scanner for the end of a JSON object whose opening brace has been read."""

    def __init__(self) -> None:
        self._depth = 1
        self._is_string = self._is_escaped = False

    def num_inside(self, text: str) -> int:
        """Returns the number of characters of the text before the closing brace of the object."""
        for i, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif character == '"':
                self._is_string = not self._is_string
            elif self._is_string:
                self._is_escaped = character == "\\"
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i
        return len(text)


class _Call:
    """A tool call while it is generated.

    Args:
        index: Index of the call in its output.
    """

    def __init__(self, index: int) -> None:
        self.name = ""
        self._index = index
        self._parts: list[str] = []  # text of the arguments so far
        self._held = ""  # text that may be outside of the arguments

    def begin(self, new: dict[str, Any]) -> None:
        """Adds the call to the delta `new`. Its name must be complete."""
        function = {"name": self.name, "arguments": ""}
        # The chat templates of Mistral require ids of nine characters.
        call = {
            "index": self._index,
            "id": secrets.token_hex(5)[:9],
            "type": "function",
            "function": function,
        }
        new.setdefault("tool_calls", {})[self._index] = call

    def add(self, new: dict[str, Any], text: str) -> None:
        """Adds text of the arguments to the delta `new`. Closing brackets at the end are held back."""
        text = self._held + text
        certain = text.rstrip(_CLOSING)
        self._held = text[len(certain) :]
        self._write(new, certain)

    def end(self, new: dict[str, Any]) -> None:
        """Adds the rest of the arguments to the delta `new`, without the brackets of surrounding objects.

        If the arguments are not valid JSON, all of the text is added.
        """
        front, rest = "".join(self._parts), self._held.rstrip()
        for _ in range(_MAX_CLOSING + 1):
            if _is_json(front + rest):
                return self._write(new, rest)
            rest = rest[:-1].rstrip()
        self._write(new, self._held)

    def _write(self, new: dict[str, Any], text: str) -> None:
        if text:
            self._parts.append(text)
            empty = {"index": self._index, "function": {"arguments": ""}}
            call = new.setdefault("tool_calls", {}).setdefault(self._index, empty)
            call["function"]["arguments"] += text


def parsed_choices(choice: MakeChoice, parsers: Sequence[OutputParser], *, stream: bool) -> MakeChoice:
    """Returns a function that makes the choices of a chat response from parsed outputs.

    Args:
        choice: Makes choices from unparsed outputs.
        parsers: One parser per choice.
        stream: Whether the function makes the choices of chunks.
    """

    def parsed(index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        parser = parsers[index]
        made = choice(index, completion, output)
        new = parser.take(completion)
        if parser.has_calls and made["finish_reason"] == "stop":
            made["finish_reason"] = "tool_calls"
        if stream:
            return {**made, "delta": new}
        calls = [{k: v for k, v in call.items() if k != "index"} for call in new.pop("tool_calls", ())]
        message = {"role": "assistant", "content": None if calls else "", **new}
        return {**made, "message": message | ({"tool_calls": calls} if calls else {})}

    return parsed


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
