"""Chat templates: where they are read from, and what they may do."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.models.checkpoint import resolve_model_dir

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = {"role": "user", "content": " Hi, <|end|> & 漢字 "}


def make_tokenizer(folder: Path, source: Any, in_config: bool = False, **settings: Any) -> Tokenizer:
    """Returns a new tokenizer: pagelet's with another template."""
    folder = folder / "tokenizer"
    folder.mkdir()
    pagelet = resolve_model_dir("pagelet")
    shutil.copy(pagelet / "tokenizer.json", folder)
    config = json.loads((pagelet / "tokenizer_config.json").read_text())
    config |= {"bos_token": {"content": "<|user|>", "__type": "AddedToken"}, "pad_token": None} | settings
    if in_config:
        config |= {"chat_template": source}
    else:
        (folder / "chat_template.jinja").write_text(source)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(str(folder))


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "LlamaTokenizerFast"])
def test_the_template_of_a_processor(tokenizer_class: str, tmp_path: Path) -> None:
    """Older models for images have theirs in chat_template.json, which no tokenizer of transformers reads."""
    own = make_tokenizer(tmp_path, CHATML, in_config=True)
    source, expected = own.chat_template_source, own.encode_chat([HI])
    folder = Path(own.name)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": None}
    config["tokenizer_class"] = tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="`tokenizer` must be a tokenizer with a chat template, got "):
        Tokenizer(own.name).encode_chat([HI])
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    found = Tokenizer(own.name)
    assert found.chat_template_source == source
    assert found.encode_chat([HI]) == expected


def test_the_error_of_a_template_shows_messages_as_they_were_given(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "{{ raise_exception('no') }}")
    with pytest.raises(
        ValueError, match=r"`messages` must be messages that .* accepts \(no\), got "
    ) as error:
        tokenizer.encode_chat([{"role": "user", "content": "a <|endoftext|> b"}])
    assert "a <|endoftext|> b" in str(error.value)


def test_the_file_goes_before_the_config(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "file", chat_template="config")
    assert tokenizer.decode(tokenizer.encode_chat([HI])) == "file"
    assert tokenizer.hf.chat_template == "file"


FORMS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "another tag": ("{% generation %}x{% endgeneration %}", {}, {}),
    "a dict": ("{{ dict(a=1).a }}x", {}, {}),
    "several templates": ([{"name": "default", "template": "x"}], {}, {}),
    "tokens of one model": ("{{ image_token }}x", {"image_token": "<i>"}, {}),
    "a list of such": ("{{ image_token }}x", {"extra_special_tokens": {"image_token": "<i>"}}, {}),
    "variables": ("{{ x }}", {}, {"template_kwargs": {"x": "x"}}),
    "a template": ("y", {}, {"chat_template": "x"}),
    "a message that goes on": (
        "{{ messages[0].content }}",
        {},
        {"continue_final_message": True, "add_generation_prompt": False},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_templates(name: str, tmp_path: Path) -> None:
    source, config, settings = FORMS[name]
    tokenizer = make_tokenizer(tmp_path, source, in_config=True, **config)
    assert "x" in tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "x"}], **settings))


class Name(str):
    """A string that is more than that."""


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": Name("x")},
        {"role": "user", "content": "x", "when": object()},
        {"role": "user", "content": "x", "pair": (1, 2)},
        {"role": "user", "content": "x", "table": {1: 2}},
        {"role": "user", "content": "x", "reasoning": "y"},
    ],
)
def test_forms_of_messages(message: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "{{ messages[0].content }}{{ messages[0].reasoning_content }}")
    text = tokenizer.decode(tokenizer.encode_chat([message]))
    assert text == "x" + message.get("reasoning", "")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_the_sandbox(source: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="messages that the chat template accepts"):
        make_tokenizer(tmp_path, source).encode_chat([HI])
