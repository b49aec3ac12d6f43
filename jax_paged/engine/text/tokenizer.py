"""Tokenizer: a model's tokenizer, loaded from files, with its chat template."""

import copy
import functools
import importlib.util
import json
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import tokenizers

from jax_paged.arguments.shown_values import one_of
from jax_paged.engine.text.gguf_tokenizer import read_tokenizer
from jax_paged.engine.text.text_codec import TextCodec, check_unicode
from jax_paged.errors import ArgumentError, check
from jax_paged.models.checkpoint import is_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]

# Tokenizer classes of transformers that need no file except tokenizer.json.
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Patterns of the files that transformers loads tokenizers from.
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "tekken.json")
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# The first byte of a SentencePiece file, which is a protobuf tag. tiktoken files may have the same names, but
# consist of base64 text.
_SENTENCEPIECE_START = b"\n"
# Modules that transformers needs to read a SentencePiece model, and the packages that contain them.
_SENTENCEPIECE_PACKAGES = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
# Matches chat templates that take a message's content as a list of parts: they name the part type "image".
_ABOUT_IMAGES = re.compile("""["']image["']""")
# Arguments of transformers' apply_chat_template that change the type or the format of its result.
_TEMPLATE_CALL_ARGS = (
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)


class Tokenizer(TextCodec):
    """A model's tokenizer, with its chat template. Thread-safe.

    Args:
        name: Folder in Hugging Face layout, hub id, or local GGUF file.

    Raises:
        ValueError: If there is no tokenizer that can be loaded.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # Contents of tokenizer_config.json and special_tokens_map.json; None if transformers has to load the
        # tokenizer.
        self._settings: dict[str, Any] | None = None
        self._chat_template: str | None = None  # replaces the tokenizer's own
        super().__init__(self._load_backend())

    @functools.cached_property
    def hf(self) -> "PreTrainedTokenizerBase":
        """The tokenizer as transformers loads it. The first access imports transformers (about a second)."""
        folder = Path(self.name)
        if is_gguf(self.name):
            return self._gguf_as_hf()
        if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
            raise ValueError(
                f"tokenizer {self.name!r} can't be loaded: the folder contains no tokenizer files. A model "
                "folder contains config.json, *.safetensors and tokenizer.json"
            )
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no advice to install torch
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # in notebooks without ipywidgets
            from transformers import AutoTokenizer

        try:
            # The tokenizers library can't run mistral-common's tokenizers. With mistral_format=False,
            # transformers converts tekken.json instead.
            loaded = AutoTokenizer.from_pretrained(self.name, trust_remote_code=False, mistral_format=False)
        except Exception as error:
            cause = _missing_packages(self.name) or error
            raise ValueError(f"tokenizer {self.name!r} can't be loaded: {cause}") from error
        if self._chat_template is not None:
            loaded.chat_template = self._chat_template
        elif not loaded.chat_template:
            loaded.chat_template = _legacy_chat_template(folder)
        return loaded

    @functools.cached_property
    def eos_token_id(self) -> int | None:
        """The id of the end token, as transformers reads it; None if the tokenizer has none."""
        if self._settings is None:
            return cast("int | None", self.hf.eos_token_id)
        token = self._settings.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        return None if content is None else self._backend.token_to_id(content)

    def encode_chat(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        max_model_len: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation, rendered by the chat template.

        Control tokens come only from the template: "<|end|>" in a message is encoded as text. Roles are
        different, because a template may turn them into control tokens, as in "<|" + role + "|>". A caller
        that accepts roles from users has to check them.

        Args:
            messages: The messages: dicts with "role" and "content". The content is a string or a list of
                {"type": "text", "text": ...}. An assistant's message with "tool_calls" may have no content.
            chat_template: A Jinja template that replaces the tokenizer's own; None for the tokenizer's own.
            content_format: The type of "content" that the template gets: "string", or "openai" for a list of
                parts, some of which may be {"type": "image"}. "auto" is "openai" for a template that handles
                image parts, else "string".
            add_generation_prompt: Whether to append the tokens that start an assistant's answer.
            continue_final_message: Whether the answer continues the last message instead of following it.
                Requires add_generation_prompt=False.
            tools: JSON schemas of functions, for templates that use them.
            template_kwargs: Further variables of the template. They take precedence over the arguments
                chat_template, add_generation_prompt, continue_final_message and tools if they have the same
                names.
            max_model_len: Maximum number of tokens of the rendered text; None for no limit. The messages may
                be longer, because a template may leave out parts of them.

        Raises:
            TooLongError: If the rendered text certainly has more than `max_model_len` tokens.
            ValueError: If the tokenizer has no chat template, if the template rejects the messages, or if
                template_kwargs contains an argument of transformers that would change the format of the
                result.
        """
        values: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            **_checked_variables(template_kwargs),
        }
        chat_template, tools = values.pop("chat_template", chat_template), values["tools"]
        formats = ("auto", "string", "openai")
        check(content_format in formats, "chat_template_content_format", content_format, one_of(formats))
        if content_format == "auto":
            source = chat_template if isinstance(chat_template, str) else self.chat_template_source
            content_format = "openai" if source and _ABOUT_IMAGES.search(source) else "string"
        as_parts = content_format == "openai"
        plain = [_plain_message(i, message, as_parts=as_parts) for i, message in enumerate(messages)]
        check(bool(plain), "messages", plain, "a list of at least one message")
        template = chat_template or self.hf.chat_template
        if not template:
            remedy = ". Pass a chat template, or use completions instead"
            raise ArgumentError("tokenizer", self.name, "a tokenizer with a chat template", remedy=remedy)
        if tools and isinstance(template, str) and "tools" not in template:
            raise ArgumentError("tools", tools, "None because the chat template does not use tools")
        (marked, values), mark = self._control.marked((plain, values))
        try:
            rendered = self.hf.apply_chat_template(
                marked, chat_template=chat_template, tokenize=False, **values
            )
            text = cast(str, rendered)
        except Exception as error:  # a template may raise any exception
            allowed = f"messages that the chat template accepts ({error})"
            raise ArgumentError("messages", plain, allowed) from error
        if not mark:
            return self.encode(text, add_special_tokens=False, max_model_len=max_model_len)
        self.check_length(text.replace(mark, ""), max_model_len)
        check_unicode(text)
        return self._control.encode(text, mark)

    @property
    def chat_template_source(self) -> str | None:
        """The chat template as Jinja source; None if there is no template or more than one."""
        source = self.hf.chat_template
        return source if isinstance(source, str) else None

    def replace_chat_template(self, source: str) -> None:
        """Replaces the chat template. Must be called before the tokenizer is used.

        Args:
            source: The Jinja source of the template.

        Raises:
            ValueError: If the template is not valid, or rejects a user's message.
        """
        self._chat_template = source
        # The next access loads the tokenizer with the template.
        vars(self).pop("hf", None)
        self.encode_chat([{"role": "user", "content": "a"}])

    def prepare_chat(self) -> None:
        """Loads everything that chats need, including transformers, so that the first chat is not delayed.

        Raises:
            ValueError: If the tokenizer can't be loaded.
        """
        _ = self._control.text_backend, self.hf

    def _load_backend(self) -> tokenizers.Tokenizer:
        """Loads the tokenizer. If tokenizer.json defines it completely, transformers is not used.

        Reading tokenizer.json takes a hundredth of the time that transformers takes. Settings such as
        add_bos_token, which transformers applies itself, are not part of that file.
        """
        if is_gguf(self.name):
            backend, self._settings = read_tokenizer(Path(self.name))
            return backend
        config, file = Path(self.name) / "tokenizer_config.json", Path(self.name) / "tokenizer.json"
        if config.is_file() and file.is_file():
            settings = json.loads(config.read_text(encoding="utf-8"))
            adds = any(key.startswith("add_") and value for key, value in settings.items())
            if settings.get("tokenizer_class") in _PLAIN_CLASSES and not adds:
                self._settings = settings | _special_tokens(Path(self.name) / "special_tokens_map.json")
                return tokenizers.Tokenizer.from_file(str(file))
        backend = getattr(self.hf, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"tokenizer {self.name!r} has no fast version for the tokenizers library")
        return copy.deepcopy(backend)  # transformers modifies its tokenizer in each call

    def _gguf_as_hf(self) -> "PreTrainedTokenizerBase":
        """Returns the tokenizer of a GGUF file as a tokenizer of transformers, which renders chats."""
        from transformers import PreTrainedTokenizerFast

        assert self._settings is not None, "the settings of a GGUF file are read with the tokenizer"
        settings = dict(self._settings)
        if self._chat_template is not None:
            settings["chat_template"] = self._chat_template
        return PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(self._backend), **settings)


def _checked_variables(template_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the template variables that a user has passed; empty if there are none.

    Raises:
        ValueError: If one of them is an argument of transformers that would change the format of the result.
    """
    values = {} if template_kwargs is None else template_kwargs
    ok = isinstance(values, dict)
    check(ok, "chat_template_kwargs", values, "None or a dict of the template's variables")
    for name in _TEMPLATE_CALL_ARGS:
        allowed = "unset because it is an argument of apply_chat_template and not a template variable"
        check(name not in values, f"chat_template_kwargs[{name!r}]", values.get(name), allowed)
    return values


def _legacy_chat_template(folder: Path) -> Any:
    """Returns the template in chat_template.json (older multimodal models); None without the file."""
    file = folder / "chat_template.json"
    return json.loads(file.read_text(encoding="utf-8"))["chat_template"] if file.is_file() else None


def _missing_packages(name: str) -> str | None:
    """Returns an error message if packages are missing that transformers needs for the tokenizer, else None.

    This concerns tokenizers that exist only as a SentencePiece model. If transformers can't read such a file,
    it assumes a tiktoken file, and its own error message asks for the wrong package.
    """
    if _local_file(name, "tokenizer.json") is not None:
        return None
    file = next((f for n in _SENTENCEPIECE_FILES if (f := _local_file(name, n)) is not None), None)
    missing = [p for module, p in _SENTENCEPIECE_PACKAGES.items() if not _is_installed(module)]
    if not missing or file is None:
        return None
    with file.open("rb") as stream:
        if stream.read(1) != _SENTENCEPIECE_START:
            return None
    return (
        f"{file.name} is a SentencePiece model, and packages that transformers needs to read it are missing. "
        f"Run pip install {' '.join(missing)}, or create a tokenizer.json on a machine that has them with "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _local_file(name: str, file: str) -> Path | None:
    """Returns the path of a file in a tokenizer's folder, or in the hub cache; None if it is not there."""
    path = Path(name) / file
    if not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, file)
        path = Path(cached if isinstance(cached, str) else "")
    return path if path.is_file() else None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _special_tokens(file: Path) -> dict[str, Any]:
    """Returns the contents of special_tokens_map.json; empty without the file.

    Older tokenizers have this file. It overrides tokenizer_config.json.
    """
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _plain_message(index: int, message: Any, *, as_parts: bool) -> dict[str, Any]:
    """Returns a checked message. Its content is a list of parts if `as_parts`, else a string."""
    name = f"messages[{index}]"
    ok = isinstance(message, dict) and isinstance(message.get("role"), str)
    check(ok, name, message, 'a dict with the string "role"')
    content = message.get("content")
    if content is None and (message["role"] == "assistant" or message.get("tool_calls")):
        content = ""  # the message may contain only tool calls or reasoning
    if isinstance(content, list):
        for part in content:
            ok = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            ok = ok or (as_parts and part == {"type": "image"})
            check(ok, f"{name}.content", part, 'a dict {"type": "text", "text": ...}')
        if not as_parts:
            content = "".join(part["text"] for part in content)
    elif as_parts and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    ok = isinstance(content, list if as_parts else str)
    check(ok, f"{name}.content", content, "a string or a list of text parts")
    return {**message, "content": content}
