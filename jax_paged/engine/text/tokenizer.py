"""Text to token ids and back, and the chat template."""

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
from tokenizers import normalizers

from jax_paged.arguments.shown_values import Text, one_of
from jax_paged.engine.text.control_tokens import ControlTokens
from jax_paged.engine.text.vocabulary import Vocabulary
from jax_paged.errors import ArgumentError, TooLongError, check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[dict[str, Any]]

# Classes of transformers that need no other file than tokenizer.json.
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# What a tokenizer of transformers is read from, in any of its forms.
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "tekken.json")
_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# The first byte of such a file: the tag of the first field, a piece. tiktoken's are lines of base64.
_SENTENCEPIECE_START = b"\n"
# What transformers needs to read such a file, by the names of the modules.
_SENTENCEPIECE_PACKAGES = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
# Characters that take less than 2 ms.
_SHORT_TEXT = 2048
# In a chat template that takes messages as lists of parts: what it calls an image.
_ABOUT_IMAGES = re.compile("""["']image["']""")
# Arguments of transformers' apply_chat_template that determine what it returns, and in which form.
_FORM_SETTINGS = (
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


class Tokenizer:
    """A model's tokenizer; thread-safe.

    Args:
        name: Folder in Hugging Face layout, or hub id.

    Raises:
        ValueError: If there is no tokenizer that can be read.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # What the tokenizer's files say, if tokenizer.json is all to load; None if transformers is needed.
        self._settings: dict[str, Any] | None = None
        self._chat_template: str | None = None  # in place of the tokenizer's own
        self._backend = self._load_backend()
        self._backend.no_padding()
        self._backend.no_truncation()
        self._control = ControlTokens(self._backend)
        self._vocabulary = Vocabulary(self._backend)

    @functools.cached_property
    def hf(self) -> "PreTrainedTokenizerBase":
        """The tokenizer as transformers loads it; the first use imports transformers (about a second)."""
        folder = Path(self.name)
        if folder.is_dir() and not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
            raise ValueError(
                f"tokenizer {self.name!r} can't be loaded: the folder holds none; a model folder holds "
                "config.json, *.safetensors and tokenizer.json"
            )
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install torch
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # in notebooks without ipywidgets
            from transformers import AutoTokenizer

        try:
            # mistral-common's tokenizers can't be run by the tokenizers library; tekken.json is converted.
            loaded = AutoTokenizer.from_pretrained(self.name, trust_remote_code=False, mistral_format=False)
        except Exception as error:
            cause = _missing_packages(self.name) or error
            raise ValueError(f"tokenizer {self.name!r} can't be loaded: {cause}") from error
        if self._chat_template is not None:
            loaded.chat_template = self._chat_template
        elif not loaded.chat_template:
            loaded.chat_template = _processor_template(folder)
        return loaded

    @functools.cached_property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, as transformers reads it; None if the tokenizer names none."""
        if self._settings is None:
            return cast("int | None", self.hf.eos_token_id)
        token = self._settings.get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        return None if content is None else self._backend.token_to_id(content)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_model_len: int | None = None
    ) -> list[int]:
        """Returns the ids of `text`.

        Args:
            text: Valid Unicode.
            add_special_tokens: Whether to add the special tokens that the tokenizer itself adds.
            max_model_len: Limit (tokens) of the model that the text is for; None for no limit. Text that is
                certainly longer is not tokenized.

        Raises:
            TooLongError: If `text` certainly has more than `max_model_len` tokens.
            ValueError: If `text` is not valid Unicode.
        """
        self.check_length(text, max_model_len)
        _check_unicode(text)
        if len(text) <= _SHORT_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Unlike encode, this one lets other Python threads run meanwhile: 80 ms for 100,000 characters.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    @functools.cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before and after a text."""
        encoding = self._backend.encode("a")
        mask = encoding.special_tokens_mask
        num_before = mask.index(0) if 0 in mask else len(mask)
        num_after = mask[::-1].index(0) if 0 in mask else 0
        return encoding.ids[:num_before], encoding.ids[len(mask) - num_after :]

    def lower_texts(self) -> None:
        """Makes texts lower case before they are tokenized, but not the special tokens in them.

        Not for a tokenizer that is in use.
        """
        given = self._backend.normalizer
        first = normalizers.Lowercase()
        self._backend.normalizer = first if given is None else normalizers.Sequence([first, given])

    def to_json(self) -> str:
        """Returns it in the form of tokenizer.json."""
        return self._backend.to_str()

    def token_id(self, text: str) -> int | None:
        """Returns the token that is a text as the vocabulary has it; None if there is none."""
        return self._backend.token_to_id(text)

    def check_length(self, text: str, max_model_len: int | None) -> None:
        """Checks that `text` may have at most `max_model_len` tokens, without tokenizing it.

        Long text costs time to tokenize. A text that passes may still have too many tokens.

        Args:
            text: Of any length.
            max_model_len: Limit (tokens); None for no limit.

        Raises:
            TooLongError: If every text of so many characters has more tokens.
        """
        if max_model_len is not None:
            least = self._vocabulary.min_tokens(text)
            if least > max_model_len:
                raise TooLongError(Text(f"at least {least}"), max_model_len)

    def encode_pair(
        self, first: str, second: str, *, max_model_len: int | None = None
    ) -> tuple[list[int], int | None]:
        """Returns the ids of two texts in one, and where the second begins if the tokenizer says so.

        Args:
            first: Valid Unicode.
            second: Valid Unicode.
            max_model_len: As for `encode`.

        Raises:
            TooLongError: If a text certainly has more than `max_model_len` tokens.
            ValueError: If a text is not valid Unicode.
        """
        for text in (first, second):
            self.check_length(text, max_model_len)
        _check_unicode(first + second)
        encoding = self._backend.encode(first, second)
        return encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; ids that the tokenizer does not know add nothing."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def adds_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Returns whether `decode` turns a token into text: the tokenizer knows it, and does not skip it."""
        skipped = skip_special_tokens and token_id in self._control.ids
        return not skipped and self._backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """Returns what a token adds to a text, with its leading space; U+FFFD for part of a character."""
        text = self._token_texts.get(token_id)
        if text is None:
            anchor, start = self._anchor
            text = self.decode([*anchor, token_id], skip_special_tokens=False)[start:]
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns what a token adds to a text in UTF-8, with its leading space.

        Unlike `token_text`, a token that is a part of a character has bytes of its own.
        """
        text = self.token_text(token_id)
        own = self._vocabulary.incomplete_bytes(token_id) if "\ufffd" in text else None
        return text.encode() if own is None else own

    def control_token_id(self, text: str) -> int | None:
        """Returns the id of a control token, such as "<|end|>"; None if a text is none."""
        return self._control.id_of(text)

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Returns the vocabulary's entries of token ids, before they become text; None for no entry."""
        return [self._backend.id_to_token(token_id) for token_id in token_ids]

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
        """Returns the ids of a conversation up to where the assistant's answer starts.

        Control tokens come from the template alone: "<|end|>" in a message stays text. (A template may make
        one of a role, as in "<|" + role + "|>": whoever takes roles from others has to check them.)

        Args:
            messages: dicts with "role", and with "content": a string, or a list of
                {"type": "text", "text": ...}. An assistant's message with "tool_calls" may have no content.
            chat_template: A Jinja template in place of the tokenizer's own.
            content_format: How the template gets "content": as a string ("string"), or as a list of parts
                ("openai"), some of which may be {"type": "image"}. "auto" is the latter for a template that
                knows such parts.
            add_generation_prompt: Whether to append what an answer starts with.
            continue_final_message: Whether the answer continues the last message instead of following it;
                needs add_generation_prompt=False.
            tools: JSON schemas of functions, for templates that use them.
            template_kwargs: Further variables of the template. They take precedence over the
                arguments chat_template, add_generation_prompt, continue_final_message and tools, which they
                may also name.
            max_model_len: As for `encode`. The rendered text counts: a template may leave out parts of
                messages.

        Raises:
            TooLongError: If the rendered text certainly has more than `max_model_len` tokens.
            ValueError: If the tokenizer has no chat template, if it does not take the messages, or if
                template_kwargs names a setting of transformers that would change the form of the result.
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
        check(bool(plain), "messages", plain, "at least one message")
        template = chat_template or self.hf.chat_template
        if not template:
            remedy = ". Use completions instead"
            raise ArgumentError("tokenizer", self.name, "one with a chat template", remedy=remedy)
        if tools and isinstance(template, str) and "tools" not in template:
            raise ArgumentError("tools", tools, "None because the chat template does not use tools")
        (plain, values), mark = self._control.marked((plain, values))
        try:
            rendered = self.hf.apply_chat_template(
                plain, chat_template=chat_template, tokenize=False, **values
            )
            text = cast(str, rendered)
        except Exception as error:  # templates raise what they like
            allowed = f"messages that the chat template accepts ({error})"
            raise ArgumentError("messages", plain, allowed) from error
        if not mark:
            return self.encode(text, add_special_tokens=False, max_model_len=max_model_len)
        self.check_length(text.replace(mark, ""), max_model_len)
        _check_unicode(text)
        return self._control.encode(text, mark)

    @property
    def chat_template_source(self) -> str | None:
        """The chat template in Jinja's language; None if there is none, or if there are several."""
        source = self.hf.chat_template
        return source if isinstance(source, str) else None

    def replace_chat_template(self, source: str) -> None:
        """Makes all chats that follow use another template; not for a tokenizer that is in use.

        Args:
            source: In Jinja's language.

        Raises:
            ValueError: If it is not valid, or does not take the message of a user.
        """
        self._chat_template = source
        vars(self).pop("hf", None)  # the next use loads it with the template
        self.encode_chat([{"role": "user", "content": "a"}])

    def prepare_chat(self) -> None:
        """Loads what chats need, transformers included: now instead of for the first of them.

        Raises:
            ValueError: If the tokenizer can't be loaded.
        """
        _ = self._control.text_backend, self.hf

    def _load_backend(self) -> tokenizers.Tokenizer:
        """Reads tokenizer.json alone if there is nothing else to read: it takes a hundredth of the time."""
        config, file = Path(self.name) / "tokenizer_config.json", Path(self.name) / "tokenizer.json"
        if config.is_file() and file.is_file():
            settings = json.loads(config.read_text(encoding="utf-8"))
            adds = any(key.startswith("add_") and value for key, value in settings.items())
            if settings.get("tokenizer_class") in _PLAIN_CLASSES and not adds:
                self._settings = settings | _special_tokens(Path(self.name) / "special_tokens_map.json")
                return tokenizers.Tokenizer.from_file(str(file))
        backend = getattr(self.hf, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"tokenizer {self.name!r} has no form that the tokenizers library can run")
        return copy.deepcopy(backend)  # transformers changes its own from call to call

    @functools.cached_property
    def _token_texts(self) -> dict[int, str]:
        return {}

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], int]:
        """A token to decode others after (some decoders strip the first space), and its text's length."""
        for piece in ("a", "▁a"):
            token_id = self._backend.token_to_id(piece)
            if token_id is not None:
                return [token_id], len(self.decode([token_id]))
        return [], 0


def _checked_variables(template_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the variables that a user gives a template, unless one would change more than the template."""
    values = {} if template_kwargs is None else template_kwargs
    ok = isinstance(values, dict)
    check(ok, "chat_template_kwargs", values, "None or a dict of the template's variables")
    for name in _FORM_SETTINGS:
        allowed = "unset because it is no variable of the template"
        check(name not in values, f"chat_template_kwargs[{name!r}]", values.get(name), allowed)
    return values


def _processor_template(folder: Path) -> Any:
    """Returns the template that older models for images have in a file of its own; None if there is none."""
    file = folder / "chat_template.json"
    return json.loads(file.read_text(encoding="utf-8"))["chat_template"] if file.is_file() else None


def _missing_packages(name: str) -> str | None:
    """Returns which packages a tokenizer needs that exists as a SentencePiece model alone; None for none.

    transformers takes such a file for one of tiktoken if it can't read it, and asks for that package.
    """
    if _local_file(name, "tokenizer.json") is not None:
        return None
    found = next((f for n in _SENTENCEPIECE_FILES if (f := _local_file(name, n)) is not None), None)
    missing = [p for module, p in _SENTENCEPIECE_PACKAGES.items() if not _is_installed(module)]
    if not missing or found is None:
        return None
    with found.open("rb") as file:
        if file.read(1) != _SENTENCEPIECE_START:
            return None
    return (
        f"{found.name} is a SentencePiece model, and what transformers reads it with is not installed: "
        f"pip install {' '.join(missing)}; or make a tokenizer.json where they are, with "
        "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _local_file(name: str, file: str) -> Path | None:
    """Returns a file of a tokenizer's folder, or of the cache of a hub id; None if there is none."""
    path = Path(name) / file
    if not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, file)
        path = Path(cached if isinstance(cached, str) else "")
    return path if path.is_file() else None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in is missing
        return False


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError("prompt", text, f"valid Unicode ({error})") from error


def _special_tokens(file: Path) -> dict[str, Any]:
    """Returns the special tokens of a file that older tokenizers have, and which goes before their config."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _plain_message(index: int, message: Any, *, as_parts: bool) -> dict[str, Any]:
    """Returns a checked message whose content is one string, or a list of parts."""
    name = f"messages[{index}]"
    ok = isinstance(message, dict) and isinstance(message.get("role"), str)
    check(ok, name, message, "a dict with a role")
    content = message.get("content")
    if content is None and (message["role"] == "assistant" or message.get("tool_calls")):
        content = ""  # the message may have calls or reasoning alone
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
