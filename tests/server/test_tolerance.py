"""Requests that ask for nothing special: neutral values, deprecated fields, integers written as 1.0."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.scripted_engine import ScriptedExecutor
from server.conftest import Served, serving

from jax_paged import AsyncLLMEngine, EngineArgs, SamplingParams
from jax_paged.outputs import CompletionOutput, Logprob
from jax_paged.server.protocol.fields import _warnings
from jax_paged.server.routes.generation import tokenizer_of

CHAT = [{"role": "user", "content": "text?"}]
PATHS = {
    "/completions": {"prompt": "text?"},
    "/chat/completions": {"messages": CHAT},
    "/responses": {"input": "text?"},
}


@pytest.fixture(scope="module")
def server(scripted: Callable[..., Any]) -> Iterator[Served]:
    with serving(AsyncLLMEngine(*scripted()), "scripted") as served:
        yield served


ALL = [
    *({"seed": -1}, {"seed": 3.0}, {"top_k": -1}, {"top_k": 0.0}, {"top_p": 1}, {"min_p": 0}),
    *({"model": ""}, {"stream": False}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}),
    *({"stop": []}, {"logit_bias": {}}, {"bad_words": []}, {"stop_token_ids": []}, {"stop_token_ids": [7.0]}),
    *({"min_tokens": 0.0}, {"priority": 0.0}, {"repetition_penalty": 1}, {"truncate_prompt_tokens": -1.0}),
    *({"best_of": 1}, {"echo": False}, {"function_call": "none"}, {"documents": []}, {"background": False}),
    *({"structured_outputs": {}}, {"structured_outputs": {"json_object": False, "json": None}}),
    *({"logits_processors": []}, {"chat_template": None}, {"continue_final_message": False}, {"n": 1}),
]
COMPLETING = [
    *({"length_penalty": 1.0}, {"length_penalty": 1}, {"beam_width": 1}, {"use_beam_search": False}),
    *({"max_tokens": 16.0}, {"n": 1.0}, {"n": 2, "best_of": 2}, {"return_token_ids": False}),
    *({"response_format": {"type": "text"}}, {"prompt_logprobs": None}),
]
CHATTING = [
    *({"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}, {"max_completion_tokens": 16.0}),
    *({"tool_choice": "auto"}, {"tool_choice": "none", "tools": []}, {"top_logprobs": 2.0, "logprobs": True}),
]
RESPONDING = [{"max_output_tokens": 16.0}, {"top_logprobs": 0}, {"tools": []}, {"tool_choice": "auto"}]
BEAMS = [
    *({"top_k": -1}, {"stop": []}, {"logit_bias": {}}, {"n": 2, "best_of": 2}, {"top_p": 1.0}, {"seed": -1}),
    *({"stop_token_ids": []}, {"bad_words": []}, {"repetition_penalty": 1.0}, {"skip_special_tokens": True}),
]


@pytest.mark.parametrize("path", PATHS)
def test_values_that_change_nothing(server: Served, path: str) -> None:
    bodies = [*ALL, *{"/responses": RESPONDING}.get(path, COMPLETING)]
    bodies += {"/chat/completions": CHATTING, "/completions": [{"logprobs": 1.0}]}.get(path, [])
    refused = {}
    for body in bodies:
        answer = server.client.post(path, json=PATHS[path] | body)
        if answer.status_code != 200:
            refused[json.dumps(body)] = answer.json()["error"]["message"]
    assert not refused


def test_values_that_change_nothing_in_a_beam_search(server: Served) -> None:
    for body in BEAMS:
        beams = {"use_beam_search": True, "beam_width": 2, "max_tokens": 2, "prompt": "text?"}
        answer = server.client.post("/completions", json=beams | body)
        assert answer.status_code == 200, (body, answer.text)


def test_integral_floats_in_prompts_and_elsewhere(server: Served) -> None:
    ids = list(map(float, tokenizer_of(server.server.engine).encode("text?")))
    for prompt in (ids, [ids, ids]):
        assert server.post("/completions", prompt=prompt)["choices"][0]["text"] == "text"
    assert server.post("../detokenize", tokens=ids) == {"prompt": "text?"}
    for prompt in ([1.5], [[1.0, 2.5]]):
        assert server.client.post("/completions", json={"prompt": prompt}).status_code == 400
    for value in (1.5, 1e400, "1", True):
        body = json.dumps({"prompt": "a", "max_tokens": value})
        headers = {"Content-Type": "application/json"}
        assert server.client.post("/completions", content=body, headers=headers).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/chat/completions", {"top_logprobs": 1}, "top_logprobs"),
        ("/chat/completions", {"best_of": 2}, "best_of"),
        ("/completions", {"length_penalty": 0.5}, "length_penalty"),
        ("/completions", {"beam_width": 2}, "beam_width"),
        ("/completions", {"seed": -2}, "seed"),
        ("/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("/chat/completions", {"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_values_that_would_change_the_answer(
    server: Served, path: str, body: dict[str, Any], field: str
) -> None:
    answer = server.client.post(path, json=PATHS[path] | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_seed_of_minus_one_is_none() -> None:
    params = SamplingParams(seed=-1)
    assert params.seed is None
    params.seed = -1
    params.validate()
    assert params.seed is None


# The form of the output.


def test_structured_outputs_win_over_deprecated_fields(served: Served) -> None:
    """The guidance library sends both, the newer one last."""
    body = {"prompt": "A word: ", "max_tokens": 8, "guided_grammar": 'start: "x"', "guided_regex": "y"}
    answer = served.client.post(
        "/completions", json={**body, "structured_outputs": {"grammar": 'start: "z"'}}
    )
    assert answer.json()["choices"][0]["text"] == "z"
    ignored = [
        f'299 - "{name} is ignored because structured_outputs is set"'
        for name in ("guided_regex", "guided_grammar")
    ]
    assert answer.headers["warning"] == ", ".join(ignored)
    empty = {"prompt": "A word: ", "guided_regex": "y", "structured_outputs": {"json": None}}
    assert served.post("/completions", **empty)["choices"][0]["text"] == "y"


SET = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3}


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", {"guided_json": SET}),
        ("/chat/completions", {"response_format": json_format(SET)}),
        ("/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": SET}}}),
    ],
)
def test_what_is_not_enforced_is_a_header(
    served: Served, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = served.client.post(path, json={**PATHS[path], **body, "stream": stream})
    assert (answer.status_code, answer.headers["warning"]) == (200, '299 - "uniqueItems is not enforced"')
    plain = served.client.post(path, json={**PATHS[path], "stream": stream})
    assert "warning" not in plain.headers


def test_the_header_of_warnings_holds_anything() -> None:
    value = _warnings(['a "b" \\ \r\n é', "x" * 900, "y" * 900, *("z" * 190 for _ in range(9))])
    assert value.startswith(r'299 - "a \"b\" \\ ?? ?", 299 - "xxx')
    assert value.endswith('"')
    assert len(value) <= 1000
    assert value.isascii()
    assert value.isprintable()


# Token ids.


def test_token_ids(server: Served) -> None:
    tokenizer = tokenizer_of(server.server.engine)
    ids = [*tokenizer.encode("text"), 2]
    answer = server.post("/completions", prompt=["text?", "text?"], n=2, return_token_ids=True)
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == tokenizer.encode("text?")
        assert choice["token_ids"] == ids
    assert "prompt_token_ids" not in answer
    plain = server.post("/completions", prompt="text?")
    assert {"token_ids", "prompt_token_ids"}.isdisjoint(plain["choices"][0])
    echo = {"prompt": "text?", "echo": True, "max_tokens": 0, "return_token_ids": True}
    assert server.post("/completions", **echo)["choices"][0]["token_ids"] == []


def test_token_ids_of_a_chat(server: Served) -> None:
    tokenizer = tokenizer_of(server.server.engine)
    prompt = tokenizer.encode_chat(CHAT)
    answer = server.post("/chat/completions", messages=CHAT, n=2, return_token_ids=True, max_tokens=6)
    assert answer["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in answer["choices"]] == [prompt[:6]] * 2
    assert "prompt_token_ids" not in answer["choices"][0]


@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_token_ids_of_a_stream(server: Served, path: str) -> None:
    tokenizer = tokenizer_of(server.server.engine)
    body = PATHS[path] | {"n": 2, "max_tokens": 5, "return_token_ids": True}
    chunks = server.stream(path, **body)
    is_chat = path == "/chat/completions"
    prompt = tokenizer.encode_chat(CHAT) if is_chat else tokenizer.encode("text?")
    for index in range(2):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        holders = own if is_chat else [chunk["choices"][0] for chunk in own]
        assert [holder.get("prompt_token_ids") for holder in holders] == [prompt] + [None] * (len(own) - 1)
        drawn = [i for chunk in own for i in chunk["choices"][0].get("token_ids", ())]
        assert drawn == [*prompt[:-1], 2][:5]


# The end token.


def completion(**changes: Any) -> CompletionOutput:
    entries = [{i: Logprob(-1.0, 1, str(i))} for i in (5, 6, 2)]
    values = {"index": 0, "text": "56", "token_ids": [5, 6, 2], "cumulative_logprob": -3.0}
    values |= {"logprobs": entries, "finish_reason": "stop", "stop_reason": None}
    return CompletionOutput(**{**values, **changes})


def test_the_end_token_comes_apart_from_the_text(server: Served) -> None:
    split = server.server._generation._runner.split_end_token
    text, end = split(completion(), SamplingParams())
    assert (text.text, text.token_ids, len(text.logprobs or ()), text.finish_reason) == (
        "56",
        [5, 6],
        2,
        None,
    )
    assert (end.text, end.token_ids, len(end.logprobs or ()), end.finish_reason) == ("", [2], 1, "stop")
    assert len(split(completion(stop_reason=6, token_ids=[5, 6]), SamplingParams(stop_token_ids=[6]))) == 2
    for whole, params in (
        (completion(finish_reason="length"), SamplingParams()),
        (completion(finish_reason=None), SamplingParams()),
        (completion(stop_reason="6"), SamplingParams(stop="6")),
        (completion(token_ids=[5, 6, 7]), SamplingParams()),  # its form is complete
        (completion(logprobs=None), SamplingParams()),
        (completion(text=""), SamplingParams()),
        (completion(), SamplingParams(include_stop_str_in_output=True)),
    ):
        assert split(whole, params) == (whole,)


def test_tokens_of_a_chunk_are_its_text(server: Served) -> None:
    for _ in range(3):
        chunks = server.stream("/chat/completions", messages=CHAT, logprobs=True, max_tokens=50)
        for chunk in chunks[1:]:
            (choice,) = chunk["choices"]
            if content := choice["delta"].get("content"):
                assert "".join(token["token"] for token in choice["logprobs"]["content"]) == content
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        include = ["message.output_text.logprobs"]
        answer = server.client.post(
            "/responses", json={**PATHS["/responses"], "stream": True, "include": include}
        )
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        for event in events:
            if event["type"] == "response.output_text.delta" and event["delta"]:
                assert "".join(token["token"] for token in event["logprobs"]) == event["delta"]
        options = {"include_usage": True, "continuous_usage_stats": True}
        counted = server.stream("/completions", prompt="text?", logprobs=0, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in counted[:-1]]
        assert counts == sorted(set(counts))
        assert counts[-1] == counted[-1]["usage"]["completion_tokens"] == 5


# The model's default of max_tokens.


def test_max_new_tokens_of_the_generation_config(folder: str) -> None:
    args = EngineArgs(model=folder, async_scheduling=False)
    executor = ScriptedExecutor(args, sampling_defaults={"max_tokens": 3})
    with serving(AsyncLLMEngine(args, executor), "scripted") as served:
        chat = served.post("/chat/completions", messages=CHAT)
        assert chat["usage"]["completion_tokens"] == 3
        assert served.post("/responses", input="text?")["usage"]["output_tokens"] == 3
        # A default, and no limit, as in vLLM; completions have their own default of 16.
        assert (
            served.post("/chat/completions", messages=CHAT, max_tokens=5)["usage"]["completion_tokens"] == 5
        )
        assert served.post("/completions", prompt="text?")["usage"]["completion_tokens"] == 5
        beams = served.client.post("/chat/completions", json={"messages": CHAT, "use_beam_search": True})
        assert beams.json()["usage"]["completion_tokens"] == 3
        assert served.engine.input_processor.default_params.max_tokens == 3


def test_a_default_of_max_tokens_beyond_the_context_is_cut(folder: str) -> None:
    args = EngineArgs(model=folder, async_scheduling=False, max_model_len=64)
    executor = ScriptedExecutor(args, sampling_defaults={"max_tokens": 1000})
    with serving(AsyncLLMEngine(args, executor), "scripted") as served:
        assert served.post("/chat/completions", messages=CHAT)["choices"][0]["finish_reason"] == "stop"
        assert served.post("/responses", input="text?")["status"] == "completed"
        assert (
            served.client.post("/responses", json={"input": "a", "max_output_tokens": 64}).status_code == 400
        )
