"""Calls of tools and thoughts, with the clients that agents are written with."""

import json

import litellm
import openai
import pytest
from helpers.copying_model import write_copying_model
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

pytestmark = pytest.mark.server


class Weather(BaseModel):
    """Tells what the weather will be."""

    city: str = Field(max_length=20)
    days: int = Field(ge=1, le=9)


PARIS = {"city": "Paris", "days": 3}
WANTED = [PARIS, {"city": "Ösło", "days": 1}]
OBJECTS = [json.dumps({"name": "Weather", "arguments": x}, ensure_ascii=False) for x in WANTED]
CALLS = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in OBJECTS)
# The model answers with what it is asked.
TEXT = f"<think>\nRain?\n</think>\n\nLet's see.\n{CALLS}"
# Where a call is forced, it comes right behind the thoughts.
FORCED = f"<think>\nRain?\n</think>\n\n{CALLS}"
MESSAGES = [{"role": "user", "content": TEXT}]
FUNCTION = {"name": "Weather", "parameters": Weather.model_json_schema()}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "Weather"}}


@pytest.fixture(scope="module")
def base_url(start, tmp_path_factory):
    folder = write_copying_model(tmp_path_factory.mktemp("copying"))
    options = ["--tool-call-parser=hermes", "--reasoning-parser=qwen3", "--served-model-name=copying"]
    return f"{start(f'--model={folder}', '--max-model-len=4096', '--max-num-seqs=4', *options)}/v1"


@pytest.fixture(scope="module")
def client(base_url):
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def chat(base_url):
    return ChatOpenAI(base_url=base_url, api_key="none", model="copying", temperature=0, max_retries=0)


def arguments_of(calls):
    assert {call.function.name for call in calls} == {"Weather"}
    return [json.loads(call.function.arguments) for call in calls]


def test_openai(client):
    body = {"model": "copying", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    (choice,) = client.chat.completions.create(**body).choices
    assert arguments_of(choice.message.tool_calls) == WANTED
    assert (choice.message.content, choice.message.reasoning) == ("Let's see.", "Rain?")
    assert choice.finish_reason == "tool_calls"
    # As agents go on: the message as it is, and what the tool has returned, which is the next answer.
    call_id = choice.message.tool_calls[0].id
    tool = {"role": "tool", "tool_call_id": call_id, "content": "<think>Oh</think>It rains."}
    again = client.chat.completions.create(**{**body, "messages": [*MESSAGES, choice.message, tool]})
    assert again.choices[0].message.content == "It rains."

    with client.chat.completions.stream(**body) as stream:
        events = list(stream)
        (final,) = stream.get_final_completion().choices
    assert arguments_of(final.message.tool_calls) == WANTED
    assert final.finish_reason == "tool_calls"
    deltas = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 4, "arguments come while they are written"


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
@pytest.mark.parametrize("text", [FORCED, "<think>Rain?</think>I don't want to."])
def test_openai_forced(client, tool_choice, text):
    body = {
        "model": "copying",
        "tools": TOOLS,
        "temperature": 0,
        "tool_choice": tool_choice,
        "max_tokens": 400,
    }
    body["messages"] = [{"role": "user", "content": text}]
    (choice,) = client.chat.completions.create(**body).choices
    for arguments in arguments_of(choice.message.tool_calls):
        Weather.model_validate(arguments)
    with client.chat.completions.stream(**body) as stream:
        (final,) = stream.get_final_completion().choices
    assert arguments_of(final.message.tool_calls) == arguments_of(choice.message.tool_calls)


def test_openai_parsed(client):
    (choice,) = client.chat.completions.parse(
        model="copying", messages=MESSAGES, temperature=0, tools=[openai.pydantic_function_tool(Weather)]
    ).choices
    assert [call.function.parsed_arguments for call in choice.message.tool_calls] == [
        Weather(**w) for w in WANTED
    ]


def test_openai_errors(client):
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="copying", messages=MESSAGES, **fields)
        assert caught.value.param == param


def test_langchain_tools(chat):
    bound = chat.bind_tools([Weather])
    answer = bound.invoke(TEXT)
    assert [call["args"] for call in answer.tool_calls] == WANTED
    assert answer.content == "Let's see."
    whole = None
    for chunk in bound.stream(TEXT):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == WANTED
    tool = ToolMessage("It rains.", tool_call_id=answer.tool_calls[0]["id"])
    assert bound.invoke([HumanMessage(TEXT), answer, tool]).content == "It rains."
    forced = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False).invoke(FORCED)
    assert [call["args"] for call in forced.tool_calls] == WANTED[:1]
    broken = bound.invoke('<tool_call>{"name": "Weather", "arguments": {"city": }}</tool_call>')
    assert [call["name"] for call in broken.invalid_tool_calls] == ["Weather"]


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_structured_output(chat, method):
    structured = chat.with_structured_output(Weather, method=method)
    wanted = json.dumps(PARIS, separators=(",", ":"))
    text = f"<think>Rain?</think>{CALLS if method == 'function_calling' else wanted}"
    assert structured.invoke(text) == Weather(**PARIS)
    assert list(structured.stream(text))[-1] == Weather(**PARIS)


@pytest.mark.parametrize(
    ("fields", "text", "expected"),
    [
        ({}, TEXT, WANTED),
        ({"tool_choice": "required"}, FORCED, WANTED),
        ({"tool_choice": "required", "parallel_tool_calls": False}, FORCED, WANTED[:1]),
        ({"tool_choice": NAMED}, FORCED, WANTED[:1]),
    ],
)
def test_litellm(base_url, fields, text, expected):
    server = {"api_base": base_url, "api_key": "none", "model": "openai/copying", "max_retries": 0}
    messages = [{"role": "user", "content": text}]
    body = {**server, "messages": messages, "tools": TOOLS, "temperature": 0, **fields}
    (choice,) = litellm.completion(**body).choices
    assert arguments_of(choice.message.tool_calls) == expected
    assert choice.message.reasoning_content == "Rain?"
    assert choice.finish_reason == "tool_calls"
    chunks = list(litellm.completion(**body, stream=True))
    (built,) = litellm.stream_chunk_builder(chunks, messages=messages).choices
    assert arguments_of(built.message.tool_calls) == expected
    assert built.finish_reason == "tool_calls"
