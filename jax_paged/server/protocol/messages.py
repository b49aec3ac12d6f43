"""Conversion of chat messages from the OpenAI API to the format that chat templates expect."""

import json
from typing import Any

from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import check, check_choice

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "text", "refusal")


def messages_for(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in the format that the tokenizer's chat template expects.

    The role "developer" becomes "system", unless the template handles that role. The arguments of tool calls
    become objects; arguments that are not valid JSON objects stay strings. Fields that are null are removed,
    and refusals of the assistant become text.

    Raises:
        ValueError: If tool calls are not in OpenAI's format.
    """
    messages = [_present(message) for message in messages]
    if any("tool_calls" in message for message in messages):
        messages = [_with_objects(f"messages[{i}]", message) for i, message in enumerate(messages)]
    source = tokenizer.chat_template_source
    if source is None or "developer" in source:
        return messages
    return [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]


def _present(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without fields that are null, and with the assistant's refusal as its content."""
    present = {name: value for name, value in message.items() if value is not None}
    if present.get("role") != "assistant":
        return present
    content, refusal = present.get("content"), present.pop("refusal", None)
    if isinstance(content, list):
        present["content"] = [_refusal_as_text(part) for part in content]
    elif content is None and isinstance(refusal, str):
        present["content"] = refusal
    return present


def _refusal_as_text(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


def _with_objects(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with the arguments of its tool calls as objects.

    Args:
        name: Path of the message, for error messages.
        message: The message.
    """
    if "tool_calls" not in message:
        return message
    calls, rest = message["tool_calls"], {k: v for k, v in message.items() if k != "tool_calls"}
    if calls is None:
        return rest
    check(isinstance(calls, list), f"{name}.tool_calls", calls, "a list")
    new = []
    for i, call in enumerate(calls):
        path = f"{name}.tool_calls[{i}]"
        check(isinstance(call, dict), path, call, "an object")
        function = call.get("function")
        ok = isinstance(function, dict) and isinstance(function.get("name"), str)
        check(ok, f"{path}.function", function, "an object with the name of the function")
        arguments = function.get("arguments")
        arguments = {} if arguments is None else arguments
        check(isinstance(arguments, str | dict), f"{path}.function.arguments", arguments, "a JSON string")
        new.append({**call, "function": {**function, "arguments": _object(arguments)}})
    return {**rest, "tool_calls": new} if new else rest


def _object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def messages_of_input(items: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Returns the chat messages of the fields `input` and `instructions` of POST /v1/responses.

    Args:
        items: Text of a user message, or a list of items of the types "message" and "reasoning". Reasoning
            becomes the `reasoning_content` of the assistant message that follows.
        instructions: Text of a system message that is put first. None for no such message.

    Raises:
        ValueError: If an item has another type or an invalid format.
    """
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        check(bool(items), "input", items, "a non-empty string")
        return [*first, {"role": "user", "content": items}]
    check(bool(items), "input", items, "at least one message")
    messages, reasoning = first, ""
    for i, item in enumerate(items):
        name = f"input[{i}]"
        kind = "message" if item.get("type") is None else item["type"]
        check_choice(f"{name}.type", kind, ("message", "reasoning"))
        if kind == "reasoning":
            reasoning += _reasoning(name, item)
            continue
        message = _message(name, item)
        if reasoning and message["role"] != "assistant":
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
        elif reasoning:
            message["reasoning_content"] = reasoning
        reasoning = ""
        messages.append(message)
    if reasoning:
        messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
    return messages


def _message(name: str, item: dict[str, Any]) -> dict[str, Any]:
    check_choice(f"{name}.role", item.get("role"), _ROLES)
    content = item.get("content")
    if isinstance(content, list):
        content = _joined(f"{name}.content", content, _PARTS)
    check(isinstance(content, str), f"{name}.content", content, "a string or a list of text parts")
    return {"role": item["role"], "content": content}


def _reasoning(name: str, item: dict[str, Any]) -> str:
    """Returns the text of a reasoning item, or its summary if it has no text."""
    encrypted = item.get("encrypted_content")
    allowed = "null because this server cannot decrypt reasoning"
    check(encrypted is None, f"{name}.encrypted_content", encrypted, allowed)
    for field, part in (("content", "reasoning_text"), ("summary", "summary_text")):
        parts = [] if item.get(field) is None else item[field]
        check(isinstance(parts, list), f"{name}.{field}", parts, "a list of text parts")
        if parts:
            return _joined(f"{name}.{field}", parts, (part,))
    return ""


def _joined(name: str, parts: list[Any], types: tuple[str, ...]) -> str:
    """Returns the concatenated text of an item's parts.

    Args:
        name: Path of the parts, for error messages.
        parts: The parts.
        types: Allowed types of the parts.
    """
    return "".join(_text(f"{name}[{i}]", part, types) for i, part in enumerate(parts))


def _text(name: str, part: Any, types: tuple[str, ...]) -> str:
    check(isinstance(part, dict), name, part, "a text part")
    check_choice(f"{name}.type", part.get("type"), types)
    field = "refusal" if part["type"] == "refusal" else "text"
    check(isinstance(part.get(field), str), f"{name}.{field}", part.get(field), "a string")
    return part[field]
