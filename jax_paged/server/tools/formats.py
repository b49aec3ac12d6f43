"""How models write thoughts and calls of tools: templates for transformers' streaming parser, and grammars.

Each region of an output is a field of a template. A call is two of them, its name and its arguments, so that
both can be streamed; whatever opens no region is the content. White space around a tag belongs to the tag.
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax_paged.structured_outputs import JSON_WRITING

# How the JSON of a grammar is spaced: as chat templates write it.
_SPACING = {**JSON_WRITING, "item_separator": ", ", "key_separator": ": "}

REASONING, CONTENT, NAME, ARGUMENTS, CALL, TAG = "reasoning", "content", "name", "arguments", "call", "tag"
# One of these stands before arguments, in all formats.
BEFORE_ARGUMENTS = ('"arguments"', '"parameters"', "[TOOL_CALLS]", "｜>", "<|message|>")

# White space, bounded: a model that writes nothing else must not make the search for a tag slow.
_W = r"\s{0,16}"
_QUOTED = r'[^"\\<\[]{1,256}'  # no tag, at which another region might end
_STRING = r'"(?:[^"\\]|\\.)*+"'
_KEY = rf'{_W}\{{{_W}"name"{_W}:{_W}"'
_VALUE = rf'"{_W},{_W}"(?:arguments|parameters)"{_W}:{_W}'


@dataclasses.dataclass(frozen=True)
class CallPattern:
    """Patterns of the parts of a call.

    Args:
        head: What stands before the name.
        end: What stands behind the arguments, if anything does; the end of the output ends them too.
        name: The name.
        middle: What stands between the name and the arguments.
    """

    head: str
    end: str
    name: str = _QUOTED
    middle: str = _VALUE


@dataclasses.dataclass(frozen=True)
class CallText:
    """How calls are written where a grammar demands them.

    Args:
        head: Before the arguments; {name} stands for the name of the function.
        tail: Behind them.
        between: Between two calls.
        begin: Before all calls.
        end: Behind all calls.
        behind_thoughts: Before `begin`, where the calls follow thoughts.
        needs: A control token without which a tokenizer's model does not write in this way; "" for none.
    """

    head: str
    tail: str
    between: str
    begin: str = ""
    end: str = ""
    behind_thoughts: str = ""
    needs: str = ""


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How a family of models calls tools.

    Args:
        calls: Patterns of its calls.
        texts: Ways to write them; the first that the tokenizer's control tokens allow is taken.
        tags: What a tokenizer may have as control tokens.
        whole: Pattern of a whole call that has the arguments first, with groups for them and for the name.
        dropped: Pattern of tags that belong to no call, and are no content.
    """

    calls: tuple[CallPattern, ...]
    texts: tuple[CallText, ...]
    tags: tuple[str, ...]
    whole: str | None = None
    dropped: str | None = None


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models thinks.

    Args:
        begin: The tag before the thoughts.
        end: The tag behind them.
        always: Whether an output begins amid thoughts even where the prompt does not say so.
        answer: The tag before an answer, if the thoughts' end is not followed by it at once.
        header: The beginning of `begin` that is also the beginning of `answer`.
        tags: What a tokenizer may have as control tokens; none stands for begin and end.
        opening: Pattern of what begins thoughts, if they may begin amid an output.
        closing: Pattern of what ends them; None for `end`.
        dropped: Pattern of tags that belong to no thoughts, and are no content.
    """

    begin: str
    end: str
    always: bool = False
    answer: str = ""
    header: str = ""
    tags: tuple[str, ...] = ()
    opening: str | None = None
    closing: str | None = None
    dropped: str | None = None

    def is_thinking(self, prompt: str) -> bool:
        """Returns whether an output begins amid thoughts.

        Args:
            prompt: The end of it, with control tokens.
        """
        text = prompt.rstrip()
        return text.endswith(self.begin) or (self.always and not text.endswith(self.end))


def _cut(tag: str) -> str:
    """Returns a pattern of the first characters of a tag, of all but the last of them, or of none."""
    pattern = ""
    for character in reversed(tag[:-1]):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return pattern


_HERMES = ToolFormat(
    calls=(CallPattern(rf"{_W}<tool_call>{_KEY}", rf"</tool_call>{_W}"),),
    texts=(CallText('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "\n"),),
    tags=("<tool_call>", "</tool_call>"),
    whole=rf'{_W}<tool_call>{_W}\{{{_W}"arguments"{_W}:{_W}(?P<arguments>(?:{_STRING}|(?!</tool_call>)[^"])*?){_W},'
    rf'{_W}"name"{_W}:{_W}"(?P<name>{_QUOTED})"{_W}\}}{_W}(?:</tool_call>{_W}|{_cut("</tool_call>")}\Z)',
)

_LLAMA_KEY = rf'{_W}\{{{_W}(?:"type"{_W}:{_W}"function"{_W},{_W})?"name"{_W}:{_W}"'
_LLAMA_NEXT = rf"(?=;{_LLAMA_KEY})"
_LLAMA = ToolFormat(
    calls=(
        CallPattern(rf"{_W}(?:(?<=\A{_W}|</think>{_W})|<\|python_tag\|>){_LLAMA_KEY}", _LLAMA_NEXT),
        CallPattern(rf"(?<=\}}{_W});{_LLAMA_KEY}", _LLAMA_NEXT),
    ),
    texts=(CallText('{"name": "{name}", "parameters": ', "}", "; "),),
    tags=("<|python_tag|>",),
)

_MISTRAL_NEXT = rf"(?=,{_KEY}{_QUOTED}{_VALUE})"
_MISTRAL = ToolFormat(
    calls=(
        CallPattern(rf"{_W}\[TOOL_CALLS\]{_W}\[{_KEY}", _MISTRAL_NEXT),
        CallPattern(rf"(?<=\}}{_W}),{_KEY}(?<=\[TOOL_CALLS\]{_W}\[.*)", _MISTRAL_NEXT),
        # Newer models write a tag before each call.
        CallPattern(
            rf"{_W}\[TOOL_CALLS\]{_W}",
            r"(?=\[TOOL_CALLS\])",
            r"[\w.-]{1,256}",
            rf"(?:\[CALL_ID\]\w{{1,64}})?{_W}(?:\[ARGS\]{_W})?(?=\{{)",
        ),
    ),
    texts=(
        CallText("[TOOL_CALLS]{name}[ARGS]", "", "", needs="[ARGS]"),
        CallText('{"name": "{name}", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]"),
    ),
    tags=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
)

_DEEPSEEK = ToolFormat(
    calls=(
        CallPattern(
            rf"{_W}(?:<｜tool▁calls▁begin｜>{_W})?<｜tool▁call▁begin｜>{_W}"
            r"(?:function<｜tool▁sep｜>)?(?!function<)",
            rf"{_W}(?:```{_W})?<｜tool▁call▁end｜>",
            r"[\w.-]{1,256}",
            rf"(?:{_W}```json{_W}|<｜tool▁sep｜>{_W})",
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
    dropped=rf"(?<=<｜tool▁call▁end｜>){_W}<｜tool▁calls▁end｜>{_W}",
)

# Harmony: an output is messages, each with a header that says whom it is for.
_HARMONY_TAGS = tuple(
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")
)
_START = rf"{_W}<\|start\|>assistant{_W}"
_MESSAGE = rf"(?:{_W}<\|constrain\|>\w{{1,32}}|\s{{1,16}}\w{{1,32}})?{_W}<\|message\|>{_W}"
_HARMONY_END = rf"{_W}(?:<\|(?:end|call|return)\|>{_W}|(?=<\|(?:start|channel)\|>))"
_HARMONY_HEADER = rf"(?:{_START})?{_W}<\|channel\|>(?:final|commentary){_MESSAGE}"
_HARMONY_DROPPED = rf"(?:{_HARMONY_HEADER}|{_W}<\|(?:end|call|return)\|>{_W})"
_HARMONY_CALL = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
_HARMONY = ToolFormat(
    calls=(
        CallPattern(
            rf"(?:{_START})?{_W}<\|channel\|>(?:commentary|analysis){_W}to=(?:functions\.)?",
            _HARMONY_END,
            r"[\w.-]{1,256}",
            _MESSAGE,
        ),
        CallPattern(
            rf"(?:\A{_W}|{_START})to=(?:functions\.)?",
            _HARMONY_END,
            r"[\w.-]{1,256}",
            rf"{_W}<\|channel\|>(?:commentary|analysis){_MESSAGE}",
        ),
    ),
    texts=(CallText(_HARMONY_CALL, "", "<|call|><|start|>assistant", behind_thoughts="<|start|>assistant"),),
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
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        answer="<|channel|>final<|message|>",
        header="<|channel|>",
        tags=_HARMONY_TAGS,
        opening=rf"(?:{_START})?{_W}<\|channel\|>analysis{_MESSAGE}",
        closing=_HARMONY_END,
        dropped=_HARMONY_DROPPED,
    ),
}


@functools.cache
def response_template(tools: ToolFormat | None, reasoning: ReasoningFormat | None, is_thinking: bool) -> Any:
    """Returns the template by which transformers' ResponseParser takes an output apart.

    Args:
        tools: How calls are written; None where there are none to find.
        reasoning: How thoughts are written; None where they are a part of the content.
        is_thinking: Whether the output begins amid thoughts.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install torch
    from transformers.utils.chat_parsing.response_templates import load_response_template  # takes a second

    fields: dict[str, dict[str, Any]] = {CONTENT: {}}
    if reasoning is not None:
        begin, end = re.escape(reasoning.begin), re.escape(reasoning.end)
        opening = reasoning.opening or rf"\A{_W}{begin}{_W}"
        if is_thinking:  # some models write the tag nevertheless: what may become one is waited for
            starts = "|".join(re.escape(reasoning.begin[:i]) for i in range(1, len(reasoning.begin)))
            amid = rf"\A{_W}+(?:{begin}{_W}|(?!{begin}|(?:{starts})\Z))"
            opening = f"{amid}|{reasoning.opening}" if reasoning.opening else amid
        fields[REASONING] = {
            "open_pattern": opening,
            "close_pattern": reasoning.closing or f"{_W}{end}{_W}",
        }
    for i, call in enumerate(tools.calls if tools else ()):
        fields[f"{NAME}{i}"] = {
            "open_pattern": f"{call.head}(?={call.name}{call.middle})",
            "close_pattern": f"(?={call.middle})",
        }
        fields[f"{ARGUMENTS}{i}"] = {
            # Looks ahead first: to look behind at every character of a content would be slow.
            "open_pattern": f"(?={call.middle})(?<={call.head}{call.name}){call.middle}",
            "close_pattern": call.end,
        }
    for field in fields.values():
        field["content_args"] = {"strip": False}
    at_once = {"close_pattern": r"(?=.)|\Z"}
    if tools and tools.whole:
        groups = {name: f"{{{name}}}" for name in (NAME, ARGUMENTS)}
        fields[CALL] = {"open_pattern": tools.whole, "transform": groups, **at_once}
    if dropped := (tools and tools.dropped) or (reasoning and reasoning.dropped):
        fields[TAG] = {"open_pattern": dropped, **at_once}
    # Nothing of a prompt is parsed, so no anchor is looked for in it.
    return load_response_template({"start_anchor": "\0", "fields": fields})


def calls_grammar(
    text: CallText,
    functions: Sequence[tuple[str, dict[str, Any]]],
    literal: Callable[[str], str],
    *,
    parallel: bool,
    behind_thoughts: bool,
) -> str:
    """Returns a Lark grammar of outputs that are calls of functions.

    Args:
        text: How calls are written.
        functions: Names, and schemas of arguments.
        literal: Makes a text the sequence of Lark's strings and control tokens that it is written with.
        parallel: Whether there may be several calls.
        behind_thoughts: Whether what it describes follows thoughts, often in a line of its own.
    """
    more = f" ({literal(text.between)} call)*" if parallel else ""
    # Optional, as the calls may also be all of an output.
    front = f"({literal(text.behind_thoughts)})?" if text.behind_thoughts else ""
    space = rf"/\n{{0,2}}/ {front}" if behind_thoughts else ""
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
