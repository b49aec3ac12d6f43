"""Messages as clients of OpenAI's API send them, in the form that chat templates take."""

from typing import Any

from jax_paged.checks import check, check_choice
from jax_paged.engine.tokenizer import Tokenizer

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "text")


def messages_for(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages whose roles a template knows: to most, a developer speaks as the system."""
    source = tokenizer.chat_template_source
    if source is None or "developer" in source:
        return messages
    return [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]


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
