"""Formats in which models write tool calls and reasoning.

Each format provides templates for the streaming ResponseParser of transformers, and the text from which
grammars for forced calls are made. A template divides an output into regions, each of which is a field of the
template. A tool call has two regions, its name and its arguments, so that both can be streamed. Text outside
of all regions is the content. White space around a tag belongs to the tag.
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax_paged.structured_outputs import JSON_OPTIONS

# Separators of the JSON in a grammar: the ones that chat templates use.
_SPACING = {**JSON_OPTIONS, "item_separator": ", ", "key_separator": ": "}

REASONING, CONTENT, NAME, ARGUMENTS, CALL, TAG = "reasoning", "content", "name", "arguments", "call", "tag"
# Markers before the arguments of a call. In every format, the arguments follow one of them.
BEFORE_ARGUMENTS = ('"arguments"', '"parameters"', "[TOOL_CALLS]", "｜>", "<|message|>")

# White space, with a bound so that an output with nothing else does not slow down the search for tags.
_WS = r"\s{0,16}"
_QUOTED = r'[^"\\<\[]{1,256}'  # excludes "<" and "[", the first characters of tags
_STRING = r'"(?:[^"\\]|\\.)*+"'
_KEY = rf'{_WS}\{{{_WS}"name"{_WS}:{_WS}"'
_VALUE = rf'"{_WS},{_WS}"(?:arguments|parameters)"{_WS}:{_WS}'


@dataclasses.dataclass(frozen=True)
class CallPattern:
    """Regular expressions for the parts of a tool call.

    Args:
        head: Text before the name.
        end: Text after the arguments; may be empty. The end of the output ends the arguments too.
        name: Name of the function.
        middle: Text between the name and the arguments.
    """

    head: str
    end: str
    name: str = _QUOTED
    middle: str = _VALUE


@dataclasses.dataclass(frozen=True)
class CallText:
    """Text of tool calls, from which the grammar for forced calls is made.

    Args:
        head: Text before the arguments of a call. {name} is replaced by the name of the function.
        tail: Text after the arguments of a call.
        between: Text between two calls.
        begin: Text before all calls.
        end: Text after all calls.
        reasoning_prefix: Text before `begin` if the calls follow reasoning.
        required: Control token that the tokenizer must have for this variant; "" for none.
    """

    head: str
    tail: str
    between: str
    begin: str = ""
    end: str = ""
    reasoning_prefix: str = ""
    required: str = ""


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """Format of the tool calls of a model family.

    Args:
        calls: Patterns of the ways to write a call.
        texts: Variants of the text for forced calls. The first one whose control token the tokenizer has is
            used.
        tags: Tags that may be control tokens of the tokenizer.
        arguments_first: Pattern of a complete call with its arguments before its name, with the groups
            "arguments" and "name"; None if there is no such form.
        dropped: Pattern of tags that belong neither to a call nor to the content; None if there are none.
    """

    calls: tuple[CallPattern, ...]
    texts: tuple[CallText, ...]
    tags: tuple[str, ...]
    arguments_first: str | None = None
    dropped: str | None = None


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """Format of the reasoning of a model family.

    Args:
        begin: Tag before the reasoning.
        end: Tag after the reasoning.
        begin_is_implied: Whether an output starts inside the reasoning unless the prompt ends with `end`.
        answer: Tag before the answer, if the format has one.
        header: Common prefix of `begin` and `answer`.
        tags: Tags that may be control tokens of the tokenizer; empty for `begin` and `end`.
        opening: Pattern of the start of reasoning at any position of the output; None if reasoning can only
            be at the start, after `begin`.
        closing: Pattern of the end of the reasoning; None for `end`.
        dropped: Pattern of tags that belong neither to reasoning nor to the content; None if there are none.
    """

    begin: str
    end: str
    begin_is_implied: bool = False
    answer: str = ""
    header: str = ""
    tags: tuple[str, ...] = ()
    opening: str | None = None
    closing: str | None = None
    dropped: str | None = None

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Returns whether an output starts inside the reasoning.

        Args:
            prompt: Text of the end of the prompt, including control tokens.
        """
        text = prompt.rstrip()
        return text.endswith(self.begin) or (self.begin_is_implied and not text.endswith(self.end))


def _partial_tag_pattern(tag: str) -> str:
    """Returns a pattern that matches every incomplete beginning of a tag, including an empty one."""
    pattern = ""
    for character in reversed(tag[:-1]):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return pattern


_HERMES = ToolFormat(
    calls=(CallPattern(rf"{_WS}<tool_call>{_KEY}", rf"</tool_call>{_WS}"),),
    texts=(CallText('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n"),),
    tags=("<tool_call>", "</tool_call>"),
    arguments_first=rf'{_WS}<tool_call>{_WS}\{{{_WS}"arguments"{_WS}:{_WS}(?P<arguments>(?:{_STRING}|(?!</tool_call>)[^"])*?){_WS},'
    rf'{_WS}"name"{_WS}:{_WS}"(?P<name>{_QUOTED})"{_WS}\}}{_WS}(?:</tool_call>{_WS}|{_partial_tag_pattern("</tool_call>")}\Z)',
)

_LLAMA_KEY = rf'{_WS}\{{{_WS}(?:"type"{_WS}:{_WS}"function"{_WS},{_WS})?"name"{_WS}:{_WS}"'
_LLAMA_NEXT = rf"(?=;{_LLAMA_KEY})"
_LLAMA = ToolFormat(
    calls=(
        CallPattern(rf"{_WS}(?:(?<=\A{_WS}|</think>{_WS})|<\|python_tag\|>){_LLAMA_KEY}", _LLAMA_NEXT),
        CallPattern(rf"(?<=\}}{_WS});{_LLAMA_KEY}", _LLAMA_NEXT),
    ),
    texts=(CallText('{"name": "{name}", "parameters": ', "}", "; "),),
    tags=("<|python_tag|>",),
)

_MISTRAL_NEXT = rf"(?=,{_KEY}{_QUOTED}{_VALUE})"
_MISTRAL = ToolFormat(
    calls=(
        CallPattern(rf"{_WS}\[TOOL_CALLS\]{_WS}\[{_KEY}", _MISTRAL_NEXT),
        CallPattern(rf"(?<=\}}{_WS}),{_KEY}(?<=\[TOOL_CALLS\]{_WS}\[.*)", _MISTRAL_NEXT),
        # Newer models write a tag before each call.
        CallPattern(
            rf"{_WS}\[TOOL_CALLS\]{_WS}",
            r"(?=\[TOOL_CALLS\])",
            r"[\w.-]{1,256}",
            rf"(?:\[CALL_ID\]\w{{1,64}})?{_WS}(?:\[ARGS\]{_WS})?(?=\{{)",
        ),
    ),
    texts=(
        CallText("[TOOL_CALLS]{name}[ARGS]", "", "", required="[ARGS]"),
        CallText('{"name": "{name}", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]"),
    ),
    tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)

_DEEPSEEK = ToolFormat(
    calls=(
        CallPattern(
            rf"{_WS}(?:<｜tool▁calls▁begin｜>{_WS})?<｜tool▁call▁begin｜>{_WS}"
            r"(?:function<｜tool▁sep｜>)?(?!function<)",
            rf"{_WS}(?:```{_WS})?<｜tool▁call▁end｜>",
            r"[\w.-]{1,256}",
            rf"(?:{_WS}```json{_WS}|<｜tool▁sep｜>{_WS})",
        ),
    ),
    texts=(
        CallText(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "\n",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    tags=tuple(
        f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
    ),
    dropped=rf"(?<=<｜tool▁call▁end｜>){_WS}<｜tool▁calls▁end｜>{_WS}",
)

# Harmony, the format of gpt-oss: an output is a sequence of messages, each with a header that names its
# recipient.
_HARMONY_TAGS = tuple(
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")
)
_START = rf"{_WS}<\|start\|>assistant{_WS}"
_MESSAGE = rf"(?:{_WS}<\|constrain\|>\w{{1,32}}|\s{{1,16}}\w{{1,32}})?{_WS}<\|message\|>{_WS}"
_HARMONY_END = rf"{_WS}(?:<\|(?:end|call|return)\|>{_WS}|(?=<\|(?:start|channel)\|>))"
_HARMONY_HEADER = rf"(?:{_START})?{_WS}<\|channel\|>(?:final|commentary){_MESSAGE}"
_HARMONY_DROPPED = rf"(?:{_HARMONY_HEADER}|{_WS}<\|(?:end|call|return)\|>{_WS})"
_HARMONY_CALL = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
_HARMONY = ToolFormat(
    calls=(
        CallPattern(
            rf"(?:{_START})?{_WS}<\|channel\|>(?:commentary|analysis){_WS}to=(?:functions\.)?",
            _HARMONY_END,
            r"[\w.-]{1,256}",
            _MESSAGE,
        ),
        CallPattern(
            rf"(?:\A{_WS}|{_START})to=(?:functions\.)?",
            _HARMONY_END,
            r"[\w.-]{1,256}",
            rf"{_WS}<\|channel\|>(?:commentary|analysis){_MESSAGE}",
        ),
    ),
    texts=(CallText(_HARMONY_CALL, "", "<|call|><|start|>assistant", reasoning_prefix="<|start|>assistant"),),
    tags=_HARMONY_TAGS,
    dropped=_HARMONY_DROPPED,
)

TOOL_FORMATS = {
    "hermes": _HERMES,
    "qwen3": _HERMES,
    "llama3": _LLAMA,
    "llama3_json": _LLAMA,
    "mistral": _MISTRAL,
    "deepseek_r1": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "openai": _HARMONY,
}
REASONING_FORMATS = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", begin_is_implied=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        answer="<|channel|>final<|message|>",
        header="<|channel|>",
        tags=_HARMONY_TAGS,
        opening=rf"(?:{_START})?{_WS}<\|channel\|>analysis{_MESSAGE}",
        closing=_HARMONY_END,
        dropped=_HARMONY_DROPPED,
    ),
}


@functools.cache
def response_template(tools: ToolFormat | None, reasoning: ReasoningFormat | None, in_reasoning: bool) -> Any:
    """Returns a template with which the ResponseParser of transformers splits an output into regions.

    Args:
        tools: Format of the tool calls; None if the output is not searched for calls.
        reasoning: Format of the reasoning; None if reasoning is not separated from the content.
        in_reasoning: Whether the output starts inside the reasoning.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # suppresses the advice to install torch
    from transformers.utils.chat_parsing.response_templates import load_response_template  # takes a second

    fields: dict[str, dict[str, Any]] = {CONTENT: {}}
    if reasoning is not None:
        begin, end = re.escape(reasoning.begin), re.escape(reasoning.end)
        opening = reasoning.opening or rf"\A{_WS}{begin}{_WS}"
        # Some models write the tag although the prompt ends with it. The pattern does not match while the
        # output may still become the tag.
        if in_reasoning:
            starts = "|".join(re.escape(reasoning.begin[:i]) for i in range(1, len(reasoning.begin)))
            amid = rf"\A{_WS}+(?:{begin}{_WS}|(?!{begin}|(?:{starts})\Z))"
            opening = f"{amid}|{reasoning.opening}" if reasoning.opening else amid
        fields[REASONING] = {
            "open_pattern": opening,
            "close_pattern": reasoning.closing or f"{_WS}{end}{_WS}",
        }
    for i, call in enumerate(tools.calls if tools else ()):
        fields[f"{NAME}{i}"] = {
            "open_pattern": f"{call.head}(?={call.name}{call.middle})",
            "close_pattern": f"(?={call.middle})",
        }
        fields[f"{ARGUMENTS}{i}"] = {
            # The lookahead comes first, because a lookbehind at every character of the content would be slow.
            "open_pattern": f"(?={call.middle})(?<={call.head}{call.name}){call.middle}",
            "close_pattern": call.end,
        }
    for field in fields.values():
        field["content_args"] = {"strip": False}
    at_once = {"close_pattern": r"(?=.)|\Z"}
    if tools and tools.arguments_first:
        groups = {name: f"{{{name}}}" for name in (NAME, ARGUMENTS)}
        fields[CALL] = {"open_pattern": tools.arguments_first, "transform": groups, **at_once}
    if dropped := (tools and tools.dropped) or (reasoning and reasoning.dropped):
        fields[TAG] = {"open_pattern": dropped, **at_once}
    # The anchor marks the place in a prompt from which the parser starts. The parser gets no prompt here, so
    # the anchor is a character that does not occur.
    return load_response_template({"start_anchor": "\0", "fields": fields})


def calls_grammar(
    text: CallText,
    functions: Sequence[tuple[str, dict[str, Any]]],
    literal: Callable[[str], str],
    *,
    parallel: bool,
    after_reasoning: bool,
) -> str:
    """Returns a Lark grammar for outputs that consist of calls to functions.

    Args:
        text: Text of the calls.
        functions: Name and JSON schema of the arguments of each function.
        literal: Converts text to a sequence of Lark strings and control tokens.
        parallel: Whether there may be several calls.
        after_reasoning: Whether the calls follow reasoning, usually on a new line.
    """
    more = f" ({literal(text.between)} call)*" if parallel else ""
    # Optional, because the output may have no reasoning before the calls.
    front = f"({literal(text.reasoning_prefix)})?" if text.reasoning_prefix else ""
    space = rf"/\n{{0,2}}/ {front}" if after_reasoning else ""
    lines = [
        f"start: {space} {literal(text.begin)} call{more} {literal(text.end)}",
        f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}",
    ]
    for i, (name, schema) in enumerate(functions):
        head = literal(text.head.replace("{name}", name))
        written = {**schema, "x-guidance": _SPACING}
        lines.append(f"call{i}: {head} arguments{i} {literal(text.tail)}")
        lines.append(f"arguments{i}: %json {json.dumps(written)}")
    return "\n".join(lines)
