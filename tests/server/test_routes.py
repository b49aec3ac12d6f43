"""Routes and fields beside plain completions: echo, tokens, the Responses API, unknown fields, documents."""

import asyncio
import json
import types
import typing
from pathlib import Path

import httpx
import pytest

from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.server.app import OpenAIServer
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.protocol import schemas
from jax_paged.server.protocol.logprobs import _bytes_in
from jax_paged.server.protocol.responses import ApiError
from jax_paged.server.routes.pooling import EmbeddingRequest

PROMPT = "def read(self"
QUESTION = "What is a block table?"


def post(served, path, **body):
    return served.client.post(path, json=body)


def error_of(answer):
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def events_of(served, **body):
    """Returns the events of a streamed response, in order."""
    answer = post(served, "/responses", stream=True, **body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# Echo.


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo(served, as_tokens, max_tokens):
    ids = served.engine.tokenizer.encode(PROMPT)
    body = {"prompt": ids if as_tokens else PROMPT, "logprobs": 2, "max_tokens": max_tokens}
    answer = served.complete(**body, echo=True)
    (choice,) = answer["choices"]
    alone = served.complete(PROMPT, max_tokens=max(max_tokens, 1), logprobs=2, prompt_logprobs=2)["choices"][
        0
    ]
    output = alone["text"] if max_tokens else ""
    assert choice["text"] == PROMPT + output
    assert (answer["usage"]["completion_tokens"], choice["finish_reason"]) == (max_tokens, "length")
    assert "prompt_logprobs" not in choice
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert [choice["text"][i:].startswith(t) for i, t in zip(*offsets_of(logprobs), strict=True)] == [
        True
    ] * (len(ids) + max_tokens)
    first, *rest = alone["prompt_logprobs"]
    assert first is None
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    expected = [entry[str(i)]["logprob"] for entry, i in zip(rest, ids[1:], strict=True)]
    expected += alone["logprobs"]["token_logprobs"][:max_tokens]
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    for value, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert value in top.values()


def offsets_of(logprobs):
    return logprobs["text_offset"], logprobs["tokens"]


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_echo_of_several_choices_is_streamed_as_a_whole_one(served, max_tokens):
    body = {"prompt": [PROMPT, "import"], "n": 2, "seed": 3, "logprobs": 1, "echo": True}
    body |= {"max_tokens": max_tokens, "ignore_eos": True}
    whole = served.post("/completions", **body)["choices"]
    chunks = served.stream("/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens"] == 4 * max_tokens
    for choice in whole:
        parts = [x for chunk in chunks for x in chunk["choices"] if x["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "text_offset"):
            assert [x for part in parts for x in part["logprobs"][name]] == choice["logprobs"][name]


def test_echo_of_a_prompt_that_is_cut(served):
    body = {"prompt": "x y z def f(", "truncate_prompt_tokens": 3, "echo": True, "logprobs": 0}
    (choice,) = served.complete(**body, max_tokens=0)["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == " def f("


def test_echo_without_logprobs_and_of_beams(served):
    assert served.complete(PROMPT, echo=True, max_tokens=0)["choices"][0]["text"] == PROMPT
    beams = {"use_beam_search": True, "beam_width": 2, "n": 2, "max_tokens": 4}
    for choice in served.post("/completions", prompt=PROMPT, echo=True, **beams)["choices"]:
        assert choice["text"].startswith(PROMPT)
        assert len(choice["text"]) > len(PROMPT)
    assert (
        error_of(post(served, "/completions", prompt="a", echo=True, **{**beams, "max_tokens": 0}))[0] == 400
    )


@pytest.mark.parametrize(
    ("text", "offset", "token", "is_special", "length"),
    [
        ("def f", 0, "def", False, 3),
        ("def f", 3, " f", False, 2),
        ("def f", 0, "<s>", True, 0),  # the tokenizer has put it in front
        ("<s>def", 0, "<s>", True, 3),  # the client has
        ("def f", 0, " def", False, 3),  # some tokenizers put a space in front of the text
        ("好", 0, b"\xe5", False, 1),
    ],
)
def test_bytes_that_a_prompt_token_stands_for(text, offset, token, is_special, length):
    token = token.encode() if isinstance(token, str) else token
    assert len(_bytes_in(text.encode(), offset, token, is_special)) == length


# Token counts of streams.


def test_continuous_usage(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": QUESTION}], "n": 2, "max_tokens": 5, "ignore_eos": True}
    chunks = served.stream("/chat/completions", **body, stream_options=options)
    for index in range(2):
        usages = [c["usage"] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in usages]
        assert (counts[0], counts[-1]) == (0, 5)
        assert counts == sorted(counts)
        assert {usage["prompt_tokens"] for usage in usages} == {chunks[-1]["usage"]["prompt_tokens"]}
    assert chunks[-1]["usage"]["completion_tokens"] == 10
    without = served.stream("/completions", prompt="a", stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in without)


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/responses"])
def test_stream_options_need_a_stream(served, path):
    prompt = {"/completions": {"prompt": "a"}, "/responses": {"input": "a"}}
    body = prompt.get(path, {"messages": [{"role": "user", "content": "a"}]})
    answer = post(served, path, **body, stream_options={"include_usage": True})
    assert error_of(answer)[::2] == (400, "stream_options")


# Information.


def test_one_model(served):
    (card,) = served.client.get("/models").json()["data"]
    assert served.client.get("/models/pagelet").json() == card
    for name in ("gpt", "org/name", "pagelet/"):
        assert error_of(served.client.get(f"/models/{name}")) == (404, "model_not_found", "model")


def test_a_model_whose_name_is_a_path(served):
    app = OpenAIServer(served.server.engine, "org/name").app()
    assert asyncio.run(ask(app, "GET", "/v1/models/org%2Fname")).json()["id"] == "org/name"
    assert asyncio.run(ask(app, "GET", "/v1/models/org/name")).json()["id"] == "org/name"


async def ask(app, method, path, **settings):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **settings)


def test_version(served):
    assert served.client.get("../version").json()["version"]
    answer = served.client.delete("/models")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_every_get_route_answers_head(served, caplog):
    """As GET, without a body: container health checks use `wget --spider`."""
    paths = [
        p
        for p, operations in served.client.get("../openapi.json").json()["paths"].items()
        if "get" in operations
    ]
    paths = [path.replace("{model}", "pagelet") for path in paths]
    assert "/health" in paths
    caplog.set_level("INFO", "jax_paged.server.observability.access")
    for path in [*paths, "/", "/ui/state", "/docs", "/openapi.json"]:
        head, whole = served.client.head(f"..{path}"), served.client.get(f"..{path}")
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers.keys() == whole.headers.keys(), path
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert served.client.head("/nothing").status_code == 404
    assert served.client.head("/completions").status_code == 405
    assert "200 HEAD /v1/models" in caplog.text


def test_head_has_no_body_whatever_runs_the_application(served):
    """ASGI servers drop it, but applications that mount this one may pass it on."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "HEAD", "path": "/v1/models", "query_string": b"", "headers": []}
    app = OpenAIServer(served.server.engine, "pagelet").app()
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 200
    assert int(dict(sent[0]["headers"])[b"content-length"]) > 0
    assert b"".join(message["body"] for message in sent[1:]) == b""
    assert scope["method"] == "HEAD"


def test_tokenize_and_detokenize(served):
    tokenizer = served.engine.tokenizer
    text = "def f(x):  # 好 🙂"
    answer = post(served, "../tokenize", prompt=text, return_token_strs=True).json()
    ids = tokenizer.encode(text)
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 512)
    assert answer["token_strs"] == tokenizer.tokens(ids)
    assert answer["token_strs"][1] == "Ġf"
    assert post(served, "../detokenize", tokens=ids).json() == {"prompt": text}
    assert post(served, "../detokenize", tokens=[]).json() == {"prompt": ""}
    assert post(served, "../tokenize", prompt="").json()["tokens"] == []


def test_tokenize_a_conversation(served):
    tokenizer = served.engine.tokenizer
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "It is"}]
    for settings in (
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        answer = post(served, "../tokenize", messages=messages, **settings).json()
        assert answer["tokens"] == tokenizer.encode_chat(messages, **settings)
        assert answer["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("../tokenize", {}, "prompt"),
        ("../tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("../tokenize", {"messages": []}, "messages"),
        ("../tokenize", {"prompt": [1]}, "prompt"),
        (
            "../tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("../detokenize", {"tokens": [2048]}, "tokens"),
        ("../detokenize", {"tokens": [-1]}, "tokens"),
        ("../detokenize", {"tokens": ["a"]}, "tokens"),
        ("../detokenize", {}, "tokens"),
        ("/responses", {"input": ""}, "input"),
        ("/responses", {"input": []}, "input"),
        ("/responses", {"input": [{"type": "function_call"}]}, "input"),
        ("/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ("/responses", {"input": [{"role": "robot", "content": "a"}]}, "input"),
        ("/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ("/responses", {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("/responses", {"input": "a", "background": True}, "background"),
        ("/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
        ("/responses", {"input": "a", "truncation": "auto"}, "truncation"),
    ],
)
def test_bad_input(served, path, body, param):
    assert error_of(post(served, path, **body)) == (400, None, param)


@pytest.mark.parametrize(
    "path", ["/completions", "/chat/completions", "/responses", "../tokenize", "../detokenize"]
)
def test_unknown_models(served, path):
    body = {"input": "a", "tokens": [1], "messages": [{"role": "user", "content": "a"}]}
    if path == "/completions":
        body["prompt"] = "a"
    assert error_of(post(served, path, model="gpt", **body)) == (404, "model_not_found", "model")


# Fields that the server does not know.


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/responses", "../tokenize"])
def test_unknown_fields_are_ignored_with_a_header_or_refused(served, path):
    prompt = {
        "/completions": {"prompt": "a", "max_tokens": 1},
        "/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/responses": {"input": "a", "max_output_tokens": 1},
        "../tokenize": {"prompt": "a"},
    }[path]
    assert "x-ignored-fields" not in post(served, path, **prompt).headers
    answer = post(served, path, **prompt, first=1, **{"a\r\nX-Injected: b": None, "ü": 2})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "first, a%0D%0AX-Injected%3A%20b, %C3%BC"
    assert "x-injected" not in answer.headers
    many = post(served, path, **prompt, **{f"field_{i}" * 20: i for i in range(100)})
    assert len(many.headers["x-ignored-fields"]) <= 1000
    strict = OpenAIServer(served.server.engine, "pagelet", ServerOptions(strict=True)).app()
    url = f"/v1{path}".replace("/v1..", "")
    refused = asyncio.run(ask(strict, "POST", url, json={**prompt, "first": 1}))
    assert error_of(refused) == (400, None, "first")
    assert "`first` is an unknown field" in refused.json()["error"]["message"]


def test_unknown_fields_of_parts_are_named(served):
    answer = post(
        served, "/completions", prompt="a", max_tokens=1, stream=True, stream_options={"unheard_of": 1}
    )
    assert answer.headers["x-ignored-fields"] == "stream_options.unheard_of"


def test_fields_that_would_change_the_answer_are_no_unknown_ones(served):
    body = {"prompt": "a", "max_tokens": 1}
    assert error_of(post(served, "/completions", **body, documents=["a"])) == (400, None, "documents")
    neutral = post(served, "/completions", **body, guided_regex=None, structured_outputs={})
    assert neutral.status_code == 200
    assert "x-ignored-fields" not in neutral.headers


_BODIES = {
    "/completions": {"prompt": "a", "max_tokens": 1},
    "/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/responses": {"input": "a", "max_output_tokens": 1},
    "../tokenize": {"prompt": "a"},
    "../detokenize": {"tokens": [5]},
}
_GENERATING = tuple(_BODIES)[:3]


@pytest.mark.parametrize(
    ("paths", "name", "bad", "neutral"),
    [
        (tuple(_BODIES), "mm_processor_kwargs", 7, {}),
        (tuple(_BODIES), "mm_processor_kwargs", {"max_pixels": 512}, None),
        (tuple(_BODIES), "media_io_kwargs", {"image": {}}, {}),
        (tuple(_BODIES), "chat_template", "{{ messages }}", ""),
        (("../tokenize",), "tools", [{"type": "function"}], []),
        (("../tokenize",), "chat_template_kwargs", {"enable_thinking": False}, {}),
        (_GENERATING, "thinking_token_budget", 0, -1),
        (_GENERATING, "repetition_detection", {"max_pattern_size": 2}, None),
        (_GENERATING, "logprob_token_ids", [5], None),
        (_GENERATING, "vllm_xargs", {"a": 1}, {}),
        (_GENERATING, "modalities", ["text", "audio"], ["text"]),
        (_GENERATING, "guided_whitespace_pattern", " *", None),
        (("/responses",), "use_beam_search", True, False),
    ],
)
def test_fields_that_are_not_built_are_errors_on_every_route(served, paths, name, bad, neutral):
    """As in LLM, where the same tables say which values leave them off."""
    for path in paths:
        answer = post(served, path, **_BODIES[path], **{name: bad})
        assert error_of(answer) == (400, None, name), path
        assert f"`{name}` must be " in answer.json()["error"]["message"]
        answer = post(served, path, **_BODIES[path], **{name: neutral})
        assert answer.status_code == 200, answer.text
        assert "x-ignored-fields" not in answer.headers


@pytest.mark.parametrize(
    ("name", "bad", "neutral"),
    [
        ("mm_processor_kwargs", 7, {}),
        ("add_special_tokens", False, True),
        ("embed_dtype", "float16", "float32"),
        ("endianness", "big", "little"),
    ],
)
def test_fields_that_are_not_built_of_embeddings(name, bad, neutral):
    body = EmbeddingRequest.model_validate({"input": "a", name: neutral})
    body.check_unsupported()
    assert body.unknown_fields() == []
    with pytest.raises(ApiError, match=rf"`{name}` must be .*got .*"):
        EmbeddingRequest.model_validate({"input": "a", name: bad}).check_unsupported()


def test_what_llm_ignores_is_ignored_with_a_header(served):
    answer = post(served, "/completions", **_BODIES["/completions"], spaces_between_special_tokens=False)
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "spaces_between_special_tokens")


def test_fields_of_vllm(served):
    plain = served.complete("def f(", max_tokens=8, logprobs=0)["choices"][0]
    banned = plain["logprobs"]["tokens"][0].strip()
    assert not served.complete("def f(", bad_words=[banned])["choices"][0]["text"].startswith(banned)
    only = served.engine.tokenizer.encode("self")[0]
    answer = served.complete("def f(", allowed_token_ids=[only], max_tokens=2)
    assert answer["choices"][0]["text"] == 2 * served.engine.tokenizer.token_text(only)
    stop = plain["text"][2:4]
    assert served.complete("def f(", stop=stop, include_stop_str_in_output=True)["choices"][0][
        "text"
    ].endswith(stop)
    cut = served.complete("x y z def f(", truncate_prompt_tokens=3)
    assert cut["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("path", ["/completions", "/responses"])
def test_a_request_that_leaves_no_token_to_choose_is_wrong(served, path):
    body = {"prompt": "a"} if path == "/completions" else {"input": "a"}
    body |= {"allowed_token_ids": [served.engine.tokenizer.eos_token_id], "min_tokens": 1}
    assert error_of(post(served, path, **body)) == (400, None, None)
    assert error_of(post(served, path, **body, stream=True)) == (400, None, None)


# Conversations.


def test_developers_speak_as_the_system(served):
    texts = []
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be short."}, {"role": "user", "content": QUESTION}]
        texts.append(served.post("/chat/completions", messages=messages, temperature=0)["choices"])
    assert texts[0] == texts[1]


def test_another_chat_template(tmp_path):
    own = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    tokenizer = Tokenizer("jax_paged/models/pagelet")
    question = [{"role": "user", "content": QUESTION}]
    before = tokenizer.encode_chat(question)
    tokenizer.replace_chat_template(own)
    assert tokenizer.encode_chat(question) == tokenizer.encode(f"[user] {QUESTION}") != before
    assert tokenizer.chat_template_source == own
    for wrong in ("{% for m in", "{{ raise_exception('no') }}"):
        with pytest.raises(
            ValueError,
            match="`messages` must be messages that the chat template accepts",
        ):
            tokenizer.replace_chat_template(wrong)


# The Responses API.


def test_response(served):
    answer = served.post("/responses", input=QUESTION, temperature=0, metadata={"a": "b"})
    chat = served.chat(QUESTION)
    (item,) = answer["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert (answer["status"], answer["store"], answer["metadata"]) == ("completed", False, {"a": "b"})
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]


def test_response_stream(served):
    body = {"input": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_output_tokens": 6}
    whole = served.post("/responses", **body)
    events = events_of(served, **body)
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == whole["output"][0]["content"][0]["text"]
    last = events[-1]
    assert last["type"] == "response.incomplete"
    for name in ("status", "incomplete_details", "usage"):
        assert last["response"][name] == whole[name]
    assert events[0]["response"]["id"] == last["response"]["id"]
    assert events[0]["response"]["status"] == "in_progress"


def test_a_response_that_fails_says_so(served, steps):
    steps.spoil(666, 2)
    events = events_of(served, input=QUESTION, seed=666, ignore_eos=True, max_output_tokens=9)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert post(served, "/responses", input=QUESTION, seed=666, ignore_eos=True).status_code == 500
    served.wait_until_idle()


# Documents.


def test_answers_have_the_documented_forms(served):
    messages = [{"role": "user", "content": QUESTION}]
    more = {"max_tokens": 3, "prompt_logprobs": 1}
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 3}
    fits(schemas.CompletionResponse, served.post("/completions", prompt="a", **more, logprobs=1))
    chat = served.post("/chat/completions", messages=messages, **more, logprobs=True, top_logprobs=1)
    fits(schemas.ChatCompletionResponse, chat)
    fits(schemas.ResponsesResponse, served.post("/responses", input="a", **logprobs))
    fits(schemas.TokenizeResponse, post(served, "../tokenize", prompt="a").json())
    fits(schemas.DetokenizeResponse, post(served, "../detokenize", tokens=[1]).json())
    fits(schemas.ErrorResponse, post(served, "/completions").json())
    forms = {"models": schemas.ModelList, "models/pagelet": schemas.ModelCard}
    forms |= {"../version": schemas.VersionResponse}
    forms |= dict.fromkeys(("../health", "../ping", "../ready"), schemas.HealthResponse)
    for path, form in forms.items():
        fits(form, served.client.get(path).json())


def fits(form, value, name="answer"):
    """Checks that a value has the keys of a TypedDict and no others, all the way down, and their types."""
    origin, args = typing.get_origin(form), typing.get_args(form)
    if origin is typing.NotRequired:
        fits(args[0], value, name)
    elif typing.is_typeddict(form):
        assert form.__required_keys__ <= value.keys() <= form.__annotations__.keys(), name
        hints = typing.get_type_hints(form)
        for key, item in value.items():
            fits(hints[key], item, f"{name}.{key}")
    elif origin is list:
        for item in value:
            fits(args[0], item, name)
    elif origin is dict:
        for item in value.values():
            fits(args[1], item, name)
    elif origin in (typing.Union, types.UnionType):
        if value is not None:
            fits(next(arg for arg in args if arg is not type(None)), value, name)
    elif origin is typing.Literal:
        assert value in args, name
    elif form not in (typing.Any, None):
        assert isinstance(value, int | float if form is float else form), name


def test_the_document_names_every_route_and_error(served):
    document = served.client.get("../openapi.json").json()
    forms = document["components"]["schemas"]
    assert "HTTPValidationError" not in forms
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "422" not in operation["responses"]
            assert {"200", "500"} <= operation["responses"].keys(), path
            if method == "post":
                assert {"400", "404", "413", "429", "503"} <= operation["responses"].keys()
            for status, answer in operation["responses"].items():
                schema = answer["content"].get("application/json", {}).get("schema")
                if status != "200":
                    assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
    assert forms["ErrorResponse"]["required"] == ["error"]


def test_the_page_of_the_document_needs_nothing_else(served):
    page = served.client.get("../docs")
    assert page.headers["content-type"].startswith("text/html")
    for path in served.client.get("../openapi.json").json()["paths"]:
        assert f" {path}</code>" in page.text
    for outside in ("<script", "http://", "https://", "src=", "<link"):
        assert outside not in page.text


def test_detokenize_takes_no_more_tokens_than_the_model(served):
    answer = served.client.post("../detokenize", json={"tokens": [5] * 513})
    assert answer.status_code == 400
    assert (
        "the length of `tokens` must be an integer in [0, 512], got 513" in answer.json()["error"]["message"]
    )


def test_the_document_names_every_route(scripted_server):
    options = ServerOptions(developer_routes=True)
    routes = OpenAIServer(scripted_server.server.engine, "m", options).app()._paths
    document = Path(__file__).resolve().parents[2] / "docs" / "server.md"
    table = document.read_text(encoding="utf-8").split("\n## Routes\n")[1].split("\n## ")[0]
    for route in routes:
        assert f"`{route.replace(':path', '')}`" in table, route
