"""Calls of tools and thoughts over HTTP, of a model that answers with the text that a test asks for."""

import dataclasses
import json

import httpx
import pytest
from helpers.copying_model import write_copying_model
from helpers.listening import listening
from jsonschema import validate
from pydantic import TypeAdapter

from jax_paged import AsyncLLMEngine, EngineArgs
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.server.app import OpenAIServer
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.protocol.messages import messages_for
from jax_paged.server.protocol.schemas import ResponsesResponse
from jax_paged.server.tools.chat_settings import _parameters

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 12, "description": 'A "place" // or %json { # \n'}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time-now"}},
]
SCHEMAS = {"weather": WEATHER, "time-now": {"const": {}}}
PARIS, OSLO = '{"city": "Paris", "days": 3}', '{"city": "Ösło", "days": 1}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
    "llama3": f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "weather", "parameters": {OSLO}}}',
    "mistral": f"@TOOL_CALLS@weather@ARGS@{PARIS}@TOOL_CALLS@weather@ARGS@{OSLO}",
    "deepseek_r1": "<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>\n"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{OSLO}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>"
    f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OSLO}",
}


@dataclasses.dataclass
class Chats:
    """Asks a server for texts, and reads what becomes of them."""

    client: httpx.Client

    def body(self, text, **fields):
        return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}

    def post(self, text, **fields):
        return self.client.post("/chat/completions", json=self.body(text, **fields))

    def whole(self, text, **fields):
        answer = self.post(text, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def streamed(self, text, **fields):
        """Returns the choices of a stream, put together in the form of whole ones, and its usage."""
        body = self.body(text, **fields, stream=True, stream_options={"include_usage": True})
        choices, usage = {}, None
        with self.client.stream("POST", "/chat/completions", json=body) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines.pop() == "[DONE]", lines
        for chunk in map(json.loads, lines):
            usage = chunk["usage"] or usage
            for choice in chunk["choices"]:
                made = choices.setdefault(
                    choice["index"], {"message": {}, "logprobs": [], "finish_reason": None}
                )
                assert made["finish_reason"] is None, "nothing follows the end"
                made["finish_reason"] = choice["finish_reason"]
                made["logprobs"] += (choice.get("logprobs") or {}).get("content", [])
                for name, value in choice["delta"].items():
                    if name == "tool_calls":
                        for call in value:
                            calls = made["message"].setdefault(name, [])
                            function = call.pop("function")
                            if call["index"] == len(calls):
                                calls.append({**call, "function": function})
                            else:
                                assert call.keys() | function.keys() == {"index", "arguments"}
                                calls[call["index"]]["function"]["arguments"] += function["arguments"]
                    elif name == "role":
                        made["message"][name] = value
                    else:
                        made["message"][name] = made["message"].get(name, "") + value
        return [choices[i] for i in range(len(choices))], usage

    def both(self, text, **fields):
        """Returns the message of a whole answer, after a check that a stream brings the same."""
        answer = self.whole(text, **fields)
        (choice,), usage = self.streamed(text, **fields)
        (expected,) = answer["choices"]
        assert usage == answer["usage"] | {"prompt_tokens_details": usage["prompt_tokens_details"]}
        assert choice["finish_reason"] == expected["finish_reason"]
        message = choice["message"]
        for i, call in enumerate(message.get("tool_calls", ())):
            assert call.pop("index") == i
        message["content"] = message["content"] or (None if "tool_calls" in message else "")
        assert without_ids(message) == without_ids(expected["message"])
        return expected["message"], expected["finish_reason"]


def without_ids(message):
    calls = [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


def calls_of(message):
    for call in message["tool_calls"]:
        assert call["type"] == "function"
        assert len(call["id"]) == 9
        assert call["id"].isalnum()
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_copying_model(tmp_path_factory.mktemp("copying"))


@pytest.fixture(scope="module")
def engine(folder):
    args = EngineArgs(
        model=str(folder), dtype="float32", max_num_seqs=4, max_model_len=2048, num_gpu_blocks_override=600
    )
    engine = AsyncLLMEngine(args)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def chats_of(engine):
    """Returns a client of a server of the engine, with given parsers."""
    running, kept = [], {}

    def chats_of(tools=None, reasoning=None):
        key = tools, reasoning
        if key not in kept:
            options = ServerOptions(port=0, tool_call_parser=tools, reasoning_parser=reasoning)
            running.append(listening(OpenAIServer(engine, "copying", options)))
            port = running[-1].__enter__()
            kept[key] = Chats(httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60))
        return kept[key]

    yield chats_of
    for server in running:
        server.__exit__(None, None, None)


def test_what_is_not_enforced_of_forced_calls_is_a_header(chats_of):
    digit = {"type": "string", "pattern": r"^(?!x)[0-9]$"}
    numbers = {"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 1}
    parameters = {"properties": {"digit": digit, "numbers": numbers}, "required": ["digit", "numbers"]}
    fields = {"tools": [tool(parameters=parameters)], "tool_choice": "required", "max_tokens": 100}
    answer = chats_of("hermes").post("Well.", **fields)
    assert answer.headers["warning"] == (
        r'299 - "pattern ^(?!x)[0-9]$ is enforced without look-around and word boundaries", '
        '299 - "uniqueItems is not enforced"'
    )
    ((_, arguments),) = calls_of(answer.json()["choices"][0]["message"])
    assert json.loads(arguments)["digit"] in "0123456789"
    assert "warning" not in chats_of("hermes").post("Well.", **{**fields, "tool_choice": "auto"}).headers


@pytest.mark.parametrize("tools", CALLS)
def test_calls_that_are_up_to_the_model(chats_of, tools):
    chats = chats_of(tools)
    message, finish_reason = chats.both(CALLS[tools], tools=TOOLS)
    assert calls_of(message) == [("weather", PARIS), ("weather", OSLO)]
    assert (message["content"], finish_reason) == (None, "tool_calls")
    message, _ = chats.both(CALLS[tools], tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(message) == [("weather", PARIS)]
    assert chats.both("No, Wörld: 1 < 2", tools=TOOLS, tool_choice="auto") == (
        {"role": "assistant", "content": "No, Wörld: 1 < 2"},
        "stop",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("tools", [*CALLS, None])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_that_are_forced(chats_of, tools, choice):
    chats = chats_of(tools)
    for wanted in (CALLS[tools or "llama3"], "I won't do this.", '{"city": 5, "days": "7"'):
        message, finish_reason = chats.both(wanted, tools=TOOLS, tool_choice=choice, max_tokens=400)
        assert finish_reason == "tool_calls", message
        for name, arguments in calls_of(message):
            validate(json.loads(arguments), SCHEMAS[name])
            assert name == "weather" or choice == "required"
        assert message["content"] is None
    message, _ = chats.both(CALLS[tools or "llama3"], tools=TOOLS, tool_choice="required")
    assert calls_of(message) == [("weather", PARIS), ("weather", OSLO)]
    message, _ = chats.both(
        CALLS[tools or "llama3"], tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
    )
    assert calls_of(message) == [("weather", PARIS)]


def test_calls_that_are_forbidden_stay_text(chats_of):
    for chats in (chats_of("hermes"), chats_of()):
        message, finish_reason = chats.both(CALLS["hermes"], tools=TOOLS, tool_choice="none")
        assert message == {"role": "assistant", "content": CALLS["hermes"]}
        assert finish_reason == "stop"


@pytest.mark.parametrize(
    "text", ["<tool_call>\n{no JSON}\n</tool_call>", '<tool_call>{"name": "x"}', "a <tool_"]
)
def test_what_is_no_call_stays_text(chats_of, text):
    assert chats_of("hermes").both(text, tools=TOOLS)[0] == {"role": "assistant", "content": text}


def test_calls_that_are_written_badly(chats_of):
    chats = chats_of("hermes")
    for name, arguments in (("weather", '{"city": '), ("nobody", "{}")):
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}'
        message, _ = chats.both(text, tools=TOOLS)
        assert calls_of(message) == [(name, arguments if name == "nobody" else arguments + "}")]
    message, finish_reason = chats.both(CALLS["hermes"], tools=TOOLS, max_tokens=60)
    assert finish_reason == "length"
    ((name, arguments),) = calls_of(message)
    assert name == "weather"
    assert PARIS.startswith(arguments)


def test_several_choices_with_log_probabilities(chats_of):
    fields = {"tools": TOOLS, "n": 3, "logprobs": True, "top_logprobs": 1, "temperature": 1, "seed": 1}
    whole = chats_of("hermes").whole(CALLS["hermes"], **fields)
    choices, usage = chats_of("hermes").streamed(CALLS["hermes"], **fields)
    num_tokens = len(CALLS["hermes"].encode()) + 1
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] == 3 * num_tokens
    assert len(choices) == len(whole["choices"]) == 3
    for choice, expected in zip(choices, whole["choices"], strict=True):
        assert calls_of(choice["message"]) == calls_of(expected["message"])
        assert len(calls_of(expected["message"])) == 2
        assert len(choice["logprobs"]) == len(expected["logprobs"]["content"]) == num_tokens
        assert choice["finish_reason"] == expected["finish_reason"] == "tool_calls"


def test_thoughts(chats_of):
    chats = chats_of("hermes", "qwen3")
    thoughts = {"reasoning": "Well, {1}", "reasoning_content": "Well, {1}"}
    message, finish_reason = chats.both("<think>\nWell, {1}\n</think>\n\nYes.")
    assert (message, finish_reason) == ({"role": "assistant", "content": "Yes.", **thoughts}, "stop")
    message, finish_reason = chats.both(f"<think>Well, {{1}}</think>{CALLS['hermes']}", tools=TOOLS)
    assert calls_of(message) == [("weather", PARIS), ("weather", OSLO)]
    assert message["reasoning"] == "Well, {1}"
    assert chats.both("No thoughts.")[0] == {"role": "assistant", "content": "No thoughts."}
    message, finish_reason = chats.both("<think>Too long", max_tokens=10)
    assert message == {"role": "assistant", "content": "", "reasoning": "Too", "reasoning_content": "Too"}
    assert finish_reason == "length"


NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NUMBER |= {"additionalProperties": False}


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_a_constrained_answer_without_reasoning(chats_of, reasoning):
    chats = chats_of("hermes", reasoning)
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": NUMBER}}
    fields = {"response_format": form, "max_tokens": 60}
    (choice,) = chats.whole('{"a":5}', **fields)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a":5}', "stop")
    assert not choice["message"].get("reasoning")
    (choice,), _ = chats.streamed('{"a":5}', **fields)
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"a":5}', "stop")
    body = {"input": '{"a":5}', "temperature": 0, "max_output_tokens": 60}
    body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": NUMBER}}
    answer = chats.client.post("/responses", json=body).json()
    (item,) = answer["output"]
    assert (item["content"][0]["text"], item["status"]) == ('{"a":5}', "completed")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 0
    # With reasoning first, it is as before.
    message, _ = chats.both("<think>\nIs it {so}?</think>No", **fields)
    assert message["reasoning"] == "Is it {so}?"
    validate(json.loads(message["content"]), NUMBER)


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_a_forced_call_without_reasoning(chats_of, reasoning):
    text = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
    choice = {"type": "function", "function": {"name": "weather"}}
    chats = chats_of("hermes", reasoning)
    fields = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    (whole,) = chats.whole(text, **fields)["choices"]
    (streamed,), _ = chats.streamed(text, **fields)
    for made in (whole, streamed):
        (call,) = made["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": PARIS}
        assert made["finish_reason"] == "tool_calls"
    assert not whole["message"].get("reasoning")


def with_nulls(item):
    """Returns an item of a response as the model_dump() of openai-python has it."""
    if item["type"] == "reasoning":
        return {**item, "encrypted_content": None, "summary": []}
    parts = [{**part, "annotations": [], "logprobs": part["logprobs"] or None} for part in item["content"]]
    return {**item, "phase": None, "content": parts}


def test_a_grammar_begins_behind_the_thoughts(chats_of):
    chats = chats_of("hermes", "deepseek_r1")
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    message, finish_reason = chats.both("Is it {so}?</think>\n\nNo call.", **fields)
    assert message["reasoning"] == "Is it {so}?"
    for name, arguments in calls_of(message):
        validate(json.loads(arguments), SCHEMAS[name])
    assert finish_reason == "tool_calls"
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    message, _ = chats.both("So</think>I don't know", response_format=schema, max_tokens=100)
    assert message["reasoning"] == "So"
    assert message["content"] in ("true", "false")


def test_conversations_with_calls_go_through_the_template(chats_of, folder):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    broken = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": "{"}}
    messages = [
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "Rain."},
        {"role": "assistant", "content": "Rain.", "tool_calls": []},
        {"role": "user", "content": "Thanks."},
    ]
    tokenizer = Tokenizer(str(folder))
    prompt = tokenizer.decode(tokenizer.encode_chat(messages_for(tokenizer, messages), tools=TOOLS))
    assert (
        "assistant:  weather(city=Paris days=3 ) f({)\ntool: Rain.\nassistant: Rain.\nuser: Thanks." in prompt
    )
    assert '"description": "Tells it."' in prompt
    answer = chats_of("hermes").client.post(
        "/chat/completions", json={"messages": messages[:3], "tools": TOOLS, "temperature": 0}
    )
    assert answer.json()["choices"][0]["message"]["content"] == "Rain."


def test_variables_of_the_template(chats_of):
    chats = chats_of()
    plain = chats.whole("Hello")["usage"]["prompt_tokens"]
    answer = chats.whole("Hello", chat_template_kwargs={"note": "12345"})
    assert answer["usage"]["prompt_tokens"] == plain + 5
    assert answer["choices"][0]["message"]["content"] == "Hello"
    for name in ("chat_template", "tools", "messages", "add_generation_prompt", "tokenize"):
        error = chats.post("Hello", chat_template_kwargs={name: "x"})
        assert (error.status_code, error.json()["error"]["param"]) == (400, "chat_template_kwargs")


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


BAD = [
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": [tool(name="two words")]}, "tools"),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tools": [tool(parameters={"type": "string"})]}, "tools"),
    ({"tools": [tool(parameters=[1])]}, "tools"),
    ({"tools": [tool(parameters={"properties": {"a": {"type": "text"}}})]}, "tools"),
    ({"tools": [tool(parameters={"properties": {"a": {"anyOf": {}}}})]}, "tools"),
    ({"tools": [tool(parameters={"properties": {"a": 3}})]}, "tools"),
    ({"tools": [tool(parameters={"required": "a"})]}, "tools"),
    ({"tools": [tool(parameters={"$ref": "#/$defs/a"})], "tool_choice": "required"}, "tools"),
    (
        {"tools": [tool(parameters={"properties": {"a": {"pattern": "("}}})], "tool_choice": "required"},
        "tools",
    ),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "use_beam_search": True, "max_tokens": 5}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_input(chats_of, fields, param):
    for stream in (False, "use_beam_search" not in fields):
        answer = chats_of("hermes").post("a", **fields, stream=stream)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text


def test_without_a_parser_calls_are_not_up_to_the_model(chats_of):
    answer = chats_of().post("a", tools=TOOLS)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tool_choice"
    assert "--tool-call-parser" in answer.json()["error"]["message"]


def test_a_template_that_knows_no_tools(served):
    answer = served.client.post(
        "/chat/completions",
        json={"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "none"},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("<think>\nIs it {so}?\n</think>\n\nIt is.", "Is it {so}?", "It is."),
        ("No thoughts.", "", "No thoughts."),
        ("<think>\nToo long", "Too long", ""),
    ],
)
def test_responses_tell_thoughts_from_text(chats_of, text, thoughts, content):
    client = chats_of(reasoning="qwen3").client
    body = {"input": text, "temperature": 0}
    answer = client.post("/responses", json=body).json()
    TypeAdapter(ResponsesResponse).validate_python(answer, extra="forbid")
    *thinking, message = answer["output"]
    assert message["content"][0]["text"] == content
    num_tokens = answer["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert num_tokens == len(thoughts)  # each character is a token
    assert [item["content"][0]["text"] for item in thinking] == [thoughts] * bool(thoughts)
    assert [item["type"] for item in thinking] == ["reasoning"] * bool(thoughts)
    events = []
    with client.stream("POST", "/responses", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
    for kind, expected in (("reasoning_text", thoughts), ("output_text", content)):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == expected
        assert [e["text"] for e in events if e["type"] == f"response.{kind}.done"] == [expected] * (
            kind == "output_text" or bool(thoughts)
        )
    items = {e["output_index"]: e["item"] for e in events if e["type"] == "response.output_item.done"}
    assert [items[i] for i in range(len(items))] == events[-1]["response"]["output"]
    details = events[-1]["response"]["usage"]["output_tokens_details"]
    assert details == answer["usage"]["output_tokens_details"]
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in events[-1]["response"]["output"]]


@pytest.mark.parametrize("limit", [3, 14, 60])
@pytest.mark.parametrize("text", ["<think>\nSo {so}?\n</think>\n\nIt is.", "No thoughts."])
@pytest.mark.parametrize("as_sdk", [dict, with_nulls])
def test_the_output_of_a_response_is_accepted_as_input(chats_of, text, limit, as_sdk):
    client, question = chats_of(reasoning="qwen3").client, {"role": "user", "content": text}
    body = {"input": [question], "temperature": 0, "max_output_tokens": limit, "top_logprobs": 1}
    body["include"] = ["message.output_text.logprobs"]
    outputs = [client.post("/responses", json=body).json()["output"]]
    with client.stream("POST", "/responses", json={**body, "stream": True}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines]
    outputs.append([event["item"] for event in events if event["type"] == "response.output_item.done"])
    for output in outputs:
        again = client.post("/responses", json={**body, "input": [question, *map(as_sdk, output), question]})
        assert again.status_code == 200, again.text
        again = client.post(
            "/responses", json={**body, "input": [question, *map(as_sdk, output[:1]), question]}
        )
        assert again.status_code == 200, again.text


@pytest.mark.parametrize("limit", [3, 14, 200])
@pytest.mark.parametrize("text", ["<think>\nSo {so}?\n</think>\n\nIt is.", "No.", CALLS["hermes"]])
def test_the_message_of_a_chat_is_accepted_as_input(chats_of, text, limit):
    chats = chats_of("hermes", "qwen3")
    message = chats.whole(text, tools=TOOLS, max_tokens=limit)["choices"][0]["message"]
    streamed = chats.streamed(text, tools=TOOLS, max_tokens=limit)[0][0]["message"]
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
    question = {"role": "user", "content": "Rain."}
    for sent in (
        message,
        streamed | {"role": "assistant"},
        {"tool_calls": None, **nulls, **message},
        {**nulls, **message, "content": message["content"] or None},
        {"role": "assistant", "content": None, "refusal": "I can't."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I can't."}]},
    ):
        body = {"messages": [question, sent, question], "tools": TOOLS, "temperature": 0}
        answer = chats.client.post("/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "Rain."


def test_a_free_form_tool_can_be_forced_to_be_told_something():
    assert _parameters({"name": "f", "parameters": {"type": "object"}}) == {"type": "object"}
    assert _parameters({"name": "f"}) == {"type": "object", "additionalProperties": False}
    named = {"type": "object", "properties": {"a": True}}
    assert _parameters({"name": "f", "parameters": named})["additionalProperties"] is False
