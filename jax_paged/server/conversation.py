"""Messages as clients of OpenAI's API send them, in the form that chat templates take."""

import json
from typing import Any

from jax_paged.checks import check, check_choice
from jax_paged.engine.tokenizer import Tokenizer

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "text")


def messages_for(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in a template's terms.

    To most templates a developer speaks as the system, and arguments of calls are objects. (Those that a
    model has written wrong stay text.)

    Raises:
        ValueError: If calls of tools have another form than OpenAI's.
    """
    if any("tool_calls" in message for message in messages):
        messages = [_with_objects(f"messages[{i}]", message) for i, message in enumerate(messages)]
    source = tokenizer.chat_template_source
    if source is None or "developer" in source:
        return messages
    return [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]


def _with_objects(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose calls have objects as arguments."""
    if "tool_calls" not in message:
        return message
    calls, rest = message["tool_calls"], {k: v for k, v in message.items() if k != "tool_calls"}
    if calls is None:
        return rest
    check(isinstance(calls, list), f"{name}.tool_calls", calls, "a list")
    new = []
    for i, call in enumerate(calls):
        own = f"{name}.tool_calls[{i}]"
        check(isinstance(call, dict), own, call, "an object")
        function = call.get("function")
        ok = isinstance(function, dict) and isinstance(function.get("name"), str)
        check(ok, f"{own}.function", function, "an object with a name")
        arguments = function.get("arguments")
        arguments = {} if arguments is None else arguments
        check(isinstance(arguments, str | dict), f"{own}.function.arguments", arguments, "JSON as text")
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
    """Returns the messages of the input of /v1/responses, after the instructions.

    Args:
        items: Text of a user, or messages with parts of text.
        instructions: Of the system; None for none.

    Raises:
        ValueError: If an item is no message of text.
    """
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        check(bool(items), "input", items, "text that is not empty")
        return [*first, {"role": "user", "content": items}]
    check(bool(items), "input", items, "at least one message")
    return first + [_message(f"input[{i}]", item) for i, item in enumerate(items)]


def _message(name: str, item: dict[str, Any]) -> dict[str, Any]:
    check_choice(f"{name}.type", item.get("type", "message"), ("message",))
    check_choice(f"{name}.role", item.get("role"), _ROLES)
    content = item.get("content")
    if isinstance(content, list):
        content = "".join(_text(f"{name}.content[{i}]", part) for i, part in enumerate(content))
    check(isinstance(content, str), f"{name}.content", content, "text or a list of parts of text")
    return {"role": item["role"], "content": content}


def _text(name: str, part: Any) -> str:
    check(isinstance(part, dict), name, part, "a part of text")
    check_choice(f"{name}.type", part.get("type"), _PARTS)
    check(isinstance(part.get("text"), str), f"{name}.text", part.get("text"), "text")
    return part["text"]
