"""Chat templates rendered without transformers, beside transformers; and what is left to it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest

from jax_paged.engine.text import chat_template
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.models.checkpoint import resolve_model_dir

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of Llama 3.1: macros, defaults, dates, tools as JSON.
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b") %}
    {%- endif %}
{%- endif %}
{%- macro header(role) %}<|{{ role }}|>{% endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- header('system') + date_string + system_message }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- t | tojson }}
        {{- t | tojson(separators=(',', ':'), sort_keys=true) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'ipython' or 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {{- header(message.role) + message.tool_calls[0].function.arguments | tojson }}
    {%- else %}
        {{- header(message['role']) + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header('assistant') }}
{%- endif %}
"""
# Namespaces, alternation, break, a missing token, documents, Jinja's own functions.
NAMESPACE = """
{% set ns = namespace(seen=0, last='') %}
{% for m in messages %}
    {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate, not ' ~ m.role) }}
    {% endif %}
    {% if ns.seen > 2 %}{% break %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% set ns.last = m.content %}
{{ ns.seen }}: {{ m.content | upper }} [{{ pad_token }}]
{% endfor %}
{{ ns.last }}{{ range(3) | list }}{{ documents is none }}{{ unheard_of }}{{ m is defined }}
"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "namespace": NAMESPACE}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "<é&'\">"}}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {"b": 1, "a": "ü"}}}]}
HI = {"role": "user", "content": " Hi, <|end|> & 漢字 "}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [HI],
    [{"role": "system", "content": "Be\nbrief. "}, HI],
    [HI, {"role": "assistant", "content": "  yes\n"}, HI],
    [HI, {"role": "assistant", "content": "", "name": None, "extra": [1, 2.5, True, None]}, HI, HI],
    [HI, CALL, HI],
    [HI, CALL | {"tool_calls": []}],
    [{"role": "user", "content": "\ud800"}],
]


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


def result(tokenizer: Tokenizer, messages: list[dict[str, Any]], **settings: Any) -> list[int] | str:
    try:
        return tokenizer.encode_chat(messages, **settings)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "LlamaTokenizerFast"])
def test_the_template_of_a_processor(tokenizer_class: str, tmp_path: Path) -> None:
    """Older models for images have theirs in chat_template.json, which no tokenizer of transformers reads."""
    own = make_tokenizer(tmp_path, CHATML, in_config=True)
    source, expected = own.chat_template_source, own.encode_chat([HI])
    folder = Path(own.name)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": None}
    config["tokenizer_class"] = tokenizer_class
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="must be one with a chat template"):
        Tokenizer(own.name).encode_chat([HI])
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    found = Tokenizer(own.name)
    assert found.chat_template_source == source
    assert found.encode_chat([HI]) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(tmp_path, TEMPLATES[name], in_config=name == "chatml")
    cases = [
        (messages, settings)
        for messages in CONVERSATIONS
        for settings in (
            {},
            {"add_generation_prompt": False},
            {"content_format": "openai"},
            {"tools": [TOOL, TOOL]},
            {"tools": []},
        )
    ]
    ours = [result(tokenizer, messages, **settings) for messages, settings in cases]
    assert "hf" not in vars(tokenizer), "transformers was used"
    assert sum(isinstance(ids, list) for ids in ours) > len(cases) // 4
    monkeypatch.setattr(Tokenizer, "_own_template", None)
    for (messages, settings), ids in zip(cases, ours, strict=True):
        expected = result(tokenizer, messages, **settings)
        if isinstance(expected, list) or messages != CONVERSATIONS[-1]:
            assert ids == expected
        else:  # what is wrong with text that is not Unicode is said in other words
            assert isinstance(ids, str)


def test_the_file_goes_before_the_config(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "file", chat_template="config")
    assert tokenizer.decode(tokenizer.encode_chat([HI])) == "file"
    assert "hf" not in vars(tokenizer)
    assert tokenizer.hf.chat_template == "file"


LEFT: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
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


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_transformers(name: str, tmp_path: Path) -> None:
    source, config, settings = LEFT[name]
    tokenizer = make_tokenizer(tmp_path, source, in_config=True, **config)
    assert "x" in tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "x"}], **settings))
    assert "hf" in vars(tokenizer)


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
def test_messages_that_are_left_to_transformers(message: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "{{ messages[0].content }}{{ messages[0].reasoning_content }}")
    text = tokenizer.decode(tokenizer.encode_chat([message]))
    assert text == "x" + message.get("reasoning", "")
    assert "hf" in vars(tokenizer)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ namespace(_a=1) }}",
        "{% set n = namespace %}{{ n({'__class__': 1}) }}",
    ],
)
def test_the_sandbox(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        chat_template.ChatTemplate(source, {}).render([HI], None, True)


def test_private_names_of_namespaces() -> None:
    with pytest.raises(jinja2.TemplateError):
        chat_template.ChatTemplate("{% set n = namespace() %}{% set n._a = 1 %}", {})


def test_pagelet_chats_without_transformers() -> None:
    script = """
import sys
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.models.checkpoint import resolve_model_dir
tokenizer = Tokenizer(str(resolve_model_dir("pagelet")))
tokenizer.prepare_chat()
assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
