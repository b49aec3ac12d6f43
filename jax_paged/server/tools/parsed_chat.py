"""Choices of a chat whose outputs are taken apart: thoughts, content, and calls of tools."""

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

# What may stand behind arguments and close what they stand in.
_CLOSING = "}] \t\r\n"
_MAX_CLOSING = 2
# Characters that may stand between a marker of arguments and them: a name, an id and white space.
_MOST_BETWEEN = 400


class OutputParser:
    """Takes one output apart while it comes in.

    Args:
        template: As `formats.response_template` returns it.
        parallel: Whether calls behind the first count; else they are dropped.
        reasoning: How the model thinks; None if thoughts are a part of the content.
        without_reasoning: The template for an output that was expected to begin amid thoughts, and whose
            grammar let it end without them: then all of it is the answer. None if there is no such output.
    """

    def __init__(
        self,
        template: Any,
        *,
        parallel: bool,
        reasoning: ReasoningFormat | None = None,
        without_reasoning: Any = None,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser  # takes a second, once

        self._parser = ResponseParser(template, prefix="")
        self._parallel = parallel
        self._format = reasoning
        self._regions: list[str] = []  # of thoughts
        self._without_reasoning = without_reasoning
        self._text = ""  # all that was fed, if it may be parsed again
        self._calls: list[_Call] = []
        self._last = ""  # text that was parsed
        self._is_first = False  # whether nothing of the arguments that have opened has come
        self._object: _OpenObject | None = None  # what they are, up to its last brace
        self._is_whole = False  # whether the last brace of the newest arguments has come

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return bool(self._calls)

    def take(self, completion: CompletionOutput) -> dict[str, Any]:
        """Returns what a part of the output brings, as a chunk has it."""
        reason = completion.finish_reason
        has_ended = reason == "stop" and completion.stop_reason is None
        return self.feed(completion.text, is_last=reason is not None, has_ended=has_ended)

    def feed(self, text: str, *, is_last: bool, has_ended: bool = False) -> dict[str, Any]:
        """Returns what is new, as a chunk has it.

        Args:
            text: What has come since the last call.
            is_last: Whether nothing follows.
            has_ended: Whether the model has ended the output, which is not cut.
        """
        new = self._feed(text, is_last=is_last)
        if self._without_reasoning is None:
            return new
        self._text += text
        assert self._format is not None, "there might have been thoughts"
        if not (is_last and has_ended) or self.has_calls or self._format.end in self._text:
            return new
        self._regions.clear()
        direct = OutputParser(self._without_reasoning, parallel=self._parallel)
        new = direct.feed(self._text, is_last=True)
        self._calls = direct._calls
        return new

    def _feed(self, text: str, *, is_last: bool) -> dict[str, Any]:
        new: dict[str, Any] = {}
        while text:
            if self._object is not None:  # the parser would take what stands in its strings for tags
                num = self._object.num_inside(text)
                if self._counts:
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
            new["reasoning_content"] = new[REASONING]  # its older name
        if "tool_calls" in new:
            new["tool_calls"] = list(new["tool_calls"].values())
        return new

    def reasoning_spans(self, text: str) -> list[tuple[int, int]]:
        """Returns where the thoughts that have been found begin and end in the text of an output.

        Args:
            text: All that was fed.
        """
        spans, end = [], 0
        opening = self._format.begin if self._format else ""
        for region in filter(None, self._regions):
            begin, tag = text.find(region, end), text.find(opening, end)
            if end <= tag < begin + len(region):  # the region may also occur in the tag before it
                begin = max(begin, text.find(region, tag + len(opening)))
            if begin >= 0:
                end = begin + len(region)
                spans.append((begin, end))
        return spans

    def _num_up_to_brace(self, text: str) -> int:
        """Returns how many characters there are up to the brace that may begin arguments, or to the end."""
        num = 0
        while num := text.find("{", num) + 1:
            if any(marker in (self._last + text[:num])[-_MOST_BETWEEN:] for marker in BEFORE_ARGUMENTS):
                return num
        return len(text)

    def _without_cut_tag(self, event: dict[str, Any]) -> dict[str, Any]:
        """Returns an event of the end of the output without the half of a tag behind whole arguments.

        An output that is cut within the tag that closes a call ends with its first characters.
        """
        is_rest = event["field"].startswith(ARGUMENTS) and event["type"] == "region_chunk" and self._is_whole
        if not is_rest:
            return event
        text = event["text"]
        return {**event, "text": text[: len(text) - len(text.lstrip(_CLOSING))]}

    @property
    def _counts(self) -> bool:
        """Whether the newest call is not dropped."""
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
            if self._calls and self._counts:
                self._take(new, field, event)
            if field == ARGUMENTS and kind == "region_open":
                self._is_first, self._is_whole = True, False
            elif field == ARGUMENTS and kind == "region_chunk" and self._is_first and event["text"].strip():
                self._is_first = False
                self._object = _OpenObject() if event["text"].strip() == "{" else None

    def _take(self, new: dict[str, Any], field: str, event: dict[str, Any]) -> None:
        """Adds what an event tells of the newest call."""
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
    """Finds the end of a JSON object whose first brace has come."""

    def __init__(self) -> None:
        self._depth = 1
        self._is_string = self._is_escaped = False

    def num_inside(self, text: str) -> int:
        """Returns how many of the next characters stand before its last brace."""
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
    """One call while it comes in.

    Args:
        index: Its number among the calls of its output.
    """

    def __init__(self, index: int) -> None:
        self.name = ""
        self._index = index
        self._parts: list[str] = []  # of the arguments
        self._held = ""  # what may not belong to them

    def begin(self, new: dict[str, Any]) -> None:
        """Adds the call, whose name is known, to what is new."""
        function = {"name": self.name, "arguments": ""}
        # Templates of Mistral's want ids of nine characters.
        call = {
            "index": self._index,
            "id": secrets.token_hex(5)[:9],
            "type": "function",
            "function": function,
        }
        new.setdefault("tool_calls", {})[self._index] = call

    def add(self, new: dict[str, Any], text: str) -> None:
        """Adds text of the arguments."""
        text = self._held + text
        certain = text.rstrip(_CLOSING)
        self._held = text[len(certain) :]
        self._write(new, certain)

    def end(self, new: dict[str, Any]) -> None:
        """Adds the rest of the arguments: without what closes the object that they stand in.

        Arguments that are no JSON stay as the model has written them.
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
    """Returns a function that makes the choices of a chat answer from outputs that are taken apart.

    Args:
        choice: Makes them from outputs as they are.
        parsers: One per choice.
        stream: Whether the choices are parts.
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
