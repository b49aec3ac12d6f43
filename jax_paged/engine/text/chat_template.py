"""Chat templates without transformers, whose import takes a second: usual templates with usual messages.

What is not usual (`read_chat_template` and `is_usual` say what is) is left to transformers.
"""

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.nodes import Name, NSRef
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# A template may use these of a tokenizer's settings; others that end in "_token" are of single models.
_TOKENS = frozenset(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# transformers passes a message's thoughts on under all of these names.
_THOUGHTS = frozenset({"reasoning_content", "thinking", "reasoning"})


class ChatTemplate:
    """A chat template, compiled for a sandbox; thread-safe.

    Args:
        source: In Jinja's language.
        special_tokens: Variables of the template, such as "eos_token".

    Raises:
        jinja2.TemplateError: If it is not valid, or needs what only transformers offers.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        # As transformers sets it up, but for {% generation %} and a `dict` of its own.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _raise, "strftime_now": _now, "namespace": _namespace}
        environment.globals.update(functions)
        tree = environment.parse(source)
        if any(name.name == "dict" for name in tree.find_all(Name)):
            raise jinja2.TemplateError("dict is not offered")
        _check_public(reference.attr for reference in tree.find_all(NSRef))
        self.source = source
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """Returns the text of a conversation.

        Args:
            messages: Usual ones; values that are None count as absent.
            tools: JSON schemas, usual ones.
            add_generation_prompt: Whether to append what an answer starts with.

        Raises:
            Exception: Whatever the template raises.
        """
        present = [{k: v for k, v in message.items() if v is not None} for message in messages]
        variables = {"messages": present, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return self._template.render({**self._special_tokens, **variables, "documents": None})


def read_chat_template(
    folder: Path, settings: Mapping[str, Any], replacement: str | None = None
) -> ChatTemplate | None:
    """Returns the chat template of a tokenizer; None if there is none, or transformers is needed for it.

    Args:
        folder: Of a tokenizer that tokenizer.json is all of.
        settings: Its tokenizer_config.json, with the special tokens of older files.
        replacement: A template in place of the tokenizer's own; None takes that.
    """
    tokens: dict[str, Any] = {k: v for k, v in settings.items() if k.endswith("_token") and v is not None}
    tokens = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    source, file = settings.get("chat_template"), folder / "chat_template.jinja"
    if replacement is not None:
        source = replacement
    elif file.is_file():
        source = file.read_text(encoding="utf-8")
    elif source is None:
        source = processor_template(folder)
    several = (folder / "additional_chat_templates").is_dir()
    named = isinstance(settings.get("extra_special_tokens"), dict) or not tokens.keys() <= _TOKENS
    named = named or "model_specific_special_tokens" in settings
    if not isinstance(source, str) or several or named or settings.get("split_special_tokens"):
        return None
    if not all(isinstance(token, str) for token in tokens.values()):
        return None
    try:
        return ChatTemplate(source, tokens)
    except jinja2.TemplateError:
        return None


def processor_template(folder: Path) -> Any:
    """Returns the template that older models for images have in a file of its own; None if there is none."""
    file = folder / "chat_template.json"
    return json.loads(file.read_text(encoding="utf-8"))["chat_template"] if file.is_file() else None


def is_usual(messages: Sequence[dict[str, Any]], tools: Any) -> bool:
    """Returns whether a template may be given these as they are: plain JSON, and no thoughts."""
    return all(_is_json(m) and _THOUGHTS.isdisjoint(m) for m in messages) and _is_json(tools)


def _is_json(value: Any) -> bool:
    # No subclasses: their methods would be within reach of the template.
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)


def _check_public(names: Iterable[Any]) -> None:
    for name in names:
        if str(name).startswith("_"):
            raise jinja2.TemplateError(f"a namespace may not have {name}")


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    values = dict(*args, **kwargs)
    _check_public(values)
    return Namespace(values)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes what is special in HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
