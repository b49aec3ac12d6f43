"""Every way of asking the server for a form gives text that has it."""

import json
import re
import threading
import time

import jsonschema
import pytest
from pydantic import TypeAdapter

from jax_paged.engine.features.structured_output import grammars
from jax_paged.server.protocol.schemas import ResponsesResponse

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "count": {"enum": [1, 2, 3]}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
JSON = [
    {"response_format": FORMAT},
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"structured_outputs": {"json": SCHEMA}},
]
PATTERNS = [
    ({"guided_regex": "[a-f]{3}[0-9]"}, "[a-f]{3}[0-9]"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"guided_grammar": 'start: "a" "b"+ "c"'}, "ab+c"),
    ({"structured_outputs": {"choice": ["left"]}}, "left"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", JSON)
def test_json(served, body, stream):
    body = {"temperature": 1, "seed": 3, "max_tokens": 60, "n": 2, **body}
    if stream:
        texts = ["", ""]
        messages = [{"role": "user", "content": "Where?"}]
        for chunk in served.stream("/chat/completions", messages=messages, **body):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    else:
        choices = served.chat("Where?", **body)["choices"]
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        texts = [choice["message"]["content"] for choice in choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(("body", "pattern"), PATTERNS)
def test_completions(served, body, pattern):
    (choice,) = served.complete("A word: ", temperature=1, seed=2, max_tokens=40, **body)["choices"]
    assert re.fullmatch(pattern, choice["text"])
    assert choice["finish_reason"] == "stop"


def test_json_object(served):
    text = served.chat(response_format={"type": "json_object"}, max_tokens=60)["choices"][0]["message"][
        "content"
    ]
    assert isinstance(json.loads(text), dict)


def test_structural_tag(served):
    tag = {"type": "structural_tag", "triggers": ["<a"]}
    tag["structures"] = [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}]
    body = {"prompt": "a", "max_tokens": 8, "response_format": tag}
    answer = served.client.post("/completions", json=body)
    assert answer.status_code == 200
    assert "x-ignored-fields" not in answer.headers


def test_responses(served):
    form = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    body = {"input": "Where?", "text": {"format": form}, "max_output_tokens": 60}
    answer = served.client.post("/responses", json=body)
    assert "x-ignored-fields" not in answer.headers
    jsonschema.validate(json.loads(answer.json()["output"][0]["content"][0]["text"]), SCHEMA)
    assert answer.json()["text"]["format"] == form
    TypeAdapter(ResponsesResponse).validate_python(answer.json(), extra="forbid")


def test_a_dead_end_is_an_error_and_no_stop(served):
    answer = served.client.post(
        "/completions", json={"prompt": "a", "guided_grammar": 'start: "a" b\nb: b "c"'}
    )
    assert answer.status_code == 400
    assert "no token is allowed: allowed_token_ids" in answer.json()["error"]["message"]


SLOW_PATHS = [pytest.param(path, marks=pytest.mark.slow) for path in ("/completions", "/responses")]


@pytest.mark.parametrize("path", ["/chat/completions", *SLOW_PATHS])
def test_a_slow_form_holds_nobody_up(served, monkeypatch, path):
    """Neither the event loop, nor the threads that read texts, nor other forms for long."""
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.5)
    served.complete(guided_regex="a", max_tokens=2)
    slow = {"allOf": [{"type": "string", "pattern": f".*a.{{{10 + i}}}b.*"} for i in range(40)]}
    body = {"/completions": {"prompt": "a"}, "/responses": {"input": "a"}}.get(
        path, {"messages": [{"role": "user", "content": "a"}]}
    )
    answers = []

    def ask():
        form = {"structured_outputs": {"json": slow}, **body}
        answers.append(served.client.post(path, json=form, timeout=60))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    seconds = []
    while any(thread.is_alive() for thread in threads):
        start = time.monotonic()
        assert served.client.get("../health").status_code == 200
        served.complete("a block table " * 90, max_tokens=1)  # is read in a thread
        seconds.append(time.monotonic() - start)
    # Each form takes 0.5 s at least: had it held the server up, so many rounds would have taken that long. A
    # busy machine may hold up one of them as long.
    assert sum(taken > 0.5 for taken in seconds) < len(threads) / 2, seconds
    for answer in answers:
        assert answer.status_code == 400
        assert "takes more than 0.5 s to compile" in answer.json()["error"]["message"]
    assert served.complete(guided_regex="b{3}", max_tokens=8)["choices"][0]["text"] == "bbb"
