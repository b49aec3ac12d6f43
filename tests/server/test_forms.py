"""Every way of asking the server for a form gives text that has it."""

import json
import re

import jsonschema
import pytest

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


def test_a_dead_end_is_an_error_and_no_stop(served):
    answer = served.client.post(
        "/completions", json={"prompt": "a", "guided_grammar": 'start: "a" b\nb: b "c"'}
    )
    assert answer.status_code == 400
    assert "leaves no token" in answer.json()["error"]["message"]
