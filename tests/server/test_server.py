import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

JSON = {"Content-Type": "application/json"}
CHAT = [{"role": "user", "content": "What is a block table?"}]


def text_of(chunks, index=0):
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def test_completion(served):
    answer = served.complete(user="me", store=False, metadata={"a": "b"})
    (choice,) = answer["choices"]
    assert choice["text"]
    assert (answer["object"], answer["model"], choice["index"]) == ("text_completion", "pagelet", 0)
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["logprobs"] is None
    ids = served.engine.tokenizer.encode("def f(")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["total_tokens"] == len(ids) + answer["usage"]["completion_tokens"]
    assert served.complete(ids)["choices"] == answer["choices"]


def test_several_prompts(served):
    prompts = ["def f(", "import ", "class A"]
    alone = [served.complete(prompt) for prompt in prompts]
    together = served.complete(prompts)
    assert [c["index"] for c in together["choices"]] == [0, 1, 2]
    assert [c["text"] for c in together["choices"]] == [a["choices"][0]["text"] for a in alone]
    for name in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][name] == sum(a["usage"][name] for a in alone)
    chunks = served.stream("/completions", prompt=prompts, temperature=0, max_tokens=24)
    assert [text_of(chunks, i) for i in range(3)] == [c["text"] for c in together["choices"]]
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.9, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {"300": 2}},
        {"temperature": 0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 3},
    ],
)
def test_stream_equals_the_whole(served, settings):
    body = {"prompt": "def read(self", "max_tokens": 40, "logprobs": 2, **settings}
    (whole,) = served.post("/completions", **body)["choices"]
    chunks = served.stream("/completions", **body, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == len(whole["logprobs"]["tokens"])
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert text_of(chunks) == whole["text"]
    parts = [c["choices"][0] for c in chunks[:-1]]
    assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    for name in ("tokens", "text_offset"):
        assert [x for p in parts for x in p["logprobs"][name]] == whole["logprobs"][name]
    # A prefix that is cached makes the step another one: float32 rounds otherwise.
    values = [x for p in parts for x in p["logprobs"]["token_logprobs"]]
    assert values == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-4)
    tops = [x for p in parts for x in p["logprobs"]["top_logprobs"]]
    for top, expected in zip(tops, whole["logprobs"]["top_logprobs"], strict=True):
        assert top == pytest.approx(expected, abs=1e-4)
    assert "usage" not in served.stream("/completions", **body)[-1]


def test_chat(served):
    answer = served.chat()
    (choice,) = answer["choices"]
    assert (answer["object"], choice["message"]["role"]) == ("chat.completion", "assistant")
    assert choice["message"]["content"]
    parts = [{"type": "text", "text": "What is a "}, {"type": "text", "text": "block table?"}]
    assert served.chat(parts)["choices"] == answer["choices"]
    chunks = served.stream("/chat/completions", messages=CHAT, temperature=0)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert text_of(chunks) == choice["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    for name in ("max_tokens", "max_completion_tokens"):
        short = served.chat(**{name: 2})
        assert (short["usage"]["completion_tokens"], short["choices"][0]["finish_reason"]) == (2, "length")


def test_chat_logprobs(served):
    answer = served.chat(logprobs=True, top_logprobs=3, max_tokens=5)
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(t["token"] for t in content) == choice["message"]["content"]
    for token in content:
        values = [t["logprob"] for t in token["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert token["logprob"] == values[0]  # greedy
        assert bytes(token["bytes"]).decode() == token["token"]
    assert (
        served.chat(logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    )


# A scripted model repeats its prompt without the last token, and ends.
SCRIPT = "u:é好🙂;a:"


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_parts_of_characters(scripted_server, stream):
    body = {"messages": [{"role": "user", "content": "é好🙂"}], "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = scripted_server.stream("/chat/completions", **body)
        parts = [chunk["choices"][0].get("logprobs") for chunk in chunks]
        content = [token for part in parts if part for token in part["content"]]
    else:
        content = scripted_server.post("/chat/completions", **body)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content) == SCRIPT[:-1].encode()
    for token in content:
        assert token["bytes"] in [top["bytes"] for top in token["top_logprobs"]]


def test_the_bytes_of_parts_of_characters_in_responses(scripted_server):
    body = {"input": "é好🙂", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    content = scripted_server.post("/responses", **body)["output"][0]["content"][0]["logprobs"]
    assert b"".join(bytes(token["bytes"]) for token in content) == SCRIPT[:-1].encode()
    with scripted_server.client.stream("POST", "/responses", json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    deltas = [event for event in map(json.loads, lines) if event["type"] == "response.output_text.delta"]
    assert [token for event in deltas for token in event["logprobs"]] == content


@pytest.mark.parametrize("stream", [False, True])
def test_the_offsets_of_parts_of_characters(scripted_server, stream):
    body = {"prompt": SCRIPT, "logprobs": 2, "echo": True, "max_tokens": 40}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in scripted_server.stream("/completions", **body)]
    else:
        parts = [scripted_server.post("/completions", **body)["choices"][0]["logprobs"]]
    offsets = [offset for part in parts if part for offset in part["text_offset"]]
    text = (SCRIPT + SCRIPT[:-1]).encode()  # each byte is a token, and the end token follows
    assert offsets == [len(text[:i].decode(errors="ignore")) for i in range(len(text) + 1)]


def test_prompt_logprobs(served):
    ids = served.engine.tokenizer.encode("import os\nimport sys\n")
    answer = served.complete(ids, prompt_logprobs=1)
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in rest] == [str(i) for i in ids[1:]]
    assert all(min(x["rank"] for x in entry.values()) == 1 for entry in rest)


def test_stop_strings(served):
    text = served.complete(max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    stop = text[9:13]
    expected = text[: text.find(stop)]
    (choice,) = served.complete(max_tokens=40, ignore_eos=True, stop=["never", stop])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    body = {"prompt": "def f(", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": stop}
    chunks = served.stream("/completions", **body)
    assert text_of(chunks) == expected
    assert chunks[-1]["choices"][0]["stop_reason"] == stop


def test_characters_of_several_tokens(served):
    # One byte after the other is made the most likely token, and each only once.
    tokenizer = served.engine.tokenizer
    ids = tokenizer.encode("好")
    assert len(ids) == 3, "a character of three tokens"
    bias = {str(i): value for i, value in zip(ids, (100, 66, 33), strict=True)}
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0, "repetition_penalty": 1e6, "logit_bias": bias}
    assert served.post("/completions", **body)["choices"][0]["text"] == "好"
    texts = [c["choices"][0]["text"] for c in served.stream("/completions", **body)]
    assert "".join(texts) == "好"  # parts may come joined
    cut = {**body, "max_tokens": 2}
    assert text_of(served.stream("/completions", **cut)) == "\ufffd"
    assert served.complete("你好 🙂", max_tokens=1)["usage"]["prompt_tokens"] == len(
        tokenizer.encode("你好 🙂")
    )


def test_sixteen_at_once_answer_as_alone(served):
    bodies = [
        {"prompt": f"def f{i}(x):\n", "max_tokens": 20 + i, "temperature": 0.8, "seed": i} for i in range(16)
    ]
    alone = [served.post("/completions", **body)["choices"][0]["text"] for body in bodies]

    def ask(i):
        if i % 2:
            return served.post("/completions", **bodies[i])["choices"][0]["text"]
        return text_of(served.stream("/completions", **bodies[i]))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone
    served.wait_until_idle()


BEAM = {"prompt": "a", "use_beam_search": True, "beam_width": 4}
BAD = [
    ("/completions", {}, "`prompt` is missing", "prompt"),
    (
        "/completions",
        {"prompt": "a", "guided_json": {"$dynamicRef": "#a"}},
        "$dynamicRef",
        "structured_outputs",
    ),
    ("/completions", {"prompt": "a", "guided_regex": "a("}, "unclosed group", "structured_outputs"),
    (
        "/completions",
        {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]},
        "must set at most one structured output field, got ['guided_regex', 'guided_choice']",
        None,
    ),
    ("/completions", {"prompt": "a", "structured_outputs": {"jsn": {}}}, "jsn", "structured_outputs"),
    (
        "/completions",
        {"prompt": "a", "prompt_embeds": "x"},
        "`prompt_embeds` must be unset because other values are not supported, got 'x'",
        "prompt_embeds",
    ),
    ("/completions", {"prompt": ""}, "`prompt` must be a non-empty string, got ''", "prompt"),
    (
        "/completions",
        {"prompt": None},
        "`prompt` must be a string, a list of token ids, or a list of prompts, got None",
        "prompt",
    ),
    ("/completions", {"prompt": []}, "at least one prompt", "prompt"),
    (
        "/completions",
        {"prompt": 5},
        "`prompt` must be a string, a list of token ids, or a list of prompts, got 5",
        "prompt",
    ),
    ("/completions", {"prompt": ["a", ""]}, "`prompt` must be a non-empty string, got ''", "prompt"),
    (
        "/completions",
        {"prompt": [5, -1]},
        "`prompt_token_ids[1]` must be an integer in [0, 2047], got -1",
        "prompt",
    ),
    (
        "/completions",
        {"prompt": [5, True]},
        "`prompt_token_ids[1]` must be an integer in [0, 2047], got True",
        "prompt",
    ),
    (
        "/completions",
        {"prompt": [5, 1.5]},
        "`prompt_token_ids[1]` must be an integer in [0, 2047], got 1.5",
        "prompt",
    ),
    ("/completions", {"prompt": [2048]}, "must be an integer in [0, 2047]", "prompt"),
    ("/completions", {"prompt": [10**30]}, "prompt_token_ids[0]", "prompt"),
    (
        "/completions",
        {"prompt": [5] * 500, "max_tokens": 13},
        "must be at most 512 (max_model_len), got 513",
        "prompt",
    ),
    (
        "/completions",
        {"prompt": "a", "temperature": -1},
        "`temperature` must be a finite number in [0, 1000000.0], got -1.0",
        "temperature",
    ),
    ("/completions", {"prompt": "a", "temperature": "1"}, "a valid number", "temperature"),
    ("/completions", {"prompt": "a", "temperature": True}, "a valid number", "temperature"),
    (
        "/completions",
        {"prompt": "a", "max_tokens": 0},
        "`max_tokens` must be an integer of at least 1, got 0",
        "max_tokens",
    ),
    ("/completions", {"prompt": "a", "max_tokens": 1.5}, "a valid integer", "max_tokens"),
    (
        "/completions",
        {"prompt": "a", "top_p": 0},
        "`top_p` must be a finite number in (0, 1], got 0.0",
        "top_p",
    ),
    (
        "/completions",
        {"prompt": "a", "seed": -2},
        "`seed` must be an integer in [0, 9223372036854775807], got -2",
        "seed",
    ),
    (
        "/completions",
        {"prompt": "a", "seed": 2**63},
        "`seed` must be an integer in [0, 9223372036854775807], got 9223372036854775808",
        "seed",
    ),
    ("/completions", {"prompt": "a", "n": 0}, "`n` must be an integer of at least 1, got 0", "n"),
    ("/completions", {"prompt": "a", "n": True}, "a valid integer", "n"),
    (
        "/completions",
        {"prompt": "a", "n": 17},
        "must be an integer in [1, 16] (the smaller of max_num_seqs and max_num_batched_tokens), got 17",
        "n",
    ),
    (
        "/completions",
        {"prompt": "a", "n": 3, "best_of": 2},
        "`best_of` must be an integer of at least 3 (n), got 2",
        "best_of",
    ),
    ("/completions", {"prompt": "a", "cache_salt": 5}, "a valid string", "cache_salt"),
    ("/completions", {"prompt": "a", "priority": 1}, "must be 0 with scheduling_policy='fcfs'", "priority"),
    ("/completions", {"prompt": "a", "priority": "high"}, "a valid integer", "priority"),
    ("/completions", {"prompt": "a", "beam_width": 2}, "unless use_beam_search is true", "beam_width"),
    (
        "/completions",
        {"prompt": "a", "length_penalty": 2},
        "unless use_beam_search is true",
        "length_penalty",
    ),
    ("/completions", {**BEAM, "n": 5}, "`n` must be an integer in [1, 4] (beam_width), got 5", "n"),
    ("/completions", {**BEAM, "n": 0}, "`n` must be an integer of at least 1, got 0", "n"),
    (
        "/completions",
        {**BEAM, "beam_width": 0},
        "`beam_width` must be an integer of at least 1, got 0",
        "beam_width",
    ),
    ("/completions", {**BEAM, "best_of": 4}, "`best_of` must be None with use_beam_search, got 4", "best_of"),
    ("/completions", {**BEAM, "top_p": 0.5}, "`top_p` must be 1.0 with use_beam_search, got 0.5", "top_p"),
    ("/completions", {**BEAM, "stop": "x"}, "`stop` must be None with use_beam_search, got 'x'", "stop"),
    (
        "/completions",
        {**BEAM, "logprobs": 0},
        "`logprobs` must be None with use_beam_search, got 0",
        "logprobs",
    ),
    (
        "/completions",
        {**BEAM, "length_penalty": 101},
        "`length_penalty` must be a finite number in [-10, 10], got 101.0",
        "length_penalty",
    ),
    (
        "/chat/completions",
        {"messages": CHAT, "use_beam_search": True},
        "`max_tokens` must be an integer of at least 1 with use_beam_search, got None",
        "max_tokens",
    ),
    (
        "/chat/completions",
        {"messages": CHAT, "best_of": 2},
        "`best_of` must be unset because other values are not supported, got 2",
        "best_of",
    ),
    (
        "/chat/completions",
        {"messages": CHAT, "echo": True},
        "`echo` must be unset because other values are not supported, got True",
        "echo",
    ),
    ("/chat/completions", {"messages": CHAT, "n": 17}, "must be an integer in [1, 16]", "n"),
    ("/completions", {"prompt": "a", "add_special_tokens": False}, "must be True", "add_special_tokens"),
    (
        "/chat/completions",
        {"messages": CHAT, "add_special_tokens": True},
        "must be False",
        "add_special_tokens",
    ),
    (
        "/chat/completions",
        {"messages": CHAT, "add_generation_prompt": False},
        "must be True",
        "add_generation_prompt",
    ),
    (
        "/completions",
        {"prompt": "a", "echo": "yes"},
        "`echo` is invalid: Input should be a valid boolean, got 'yes'",
        "echo",
    ),
    (
        "/completions",
        {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 2},
        "`prompt_logprobs` must be 1 (logprobs) with echo, got 2",
        "prompt_logprobs",
    ),
    (
        "/completions",
        {"prompt": "a", "suffix": "b"},
        "`suffix` is invalid: Input should be '', got 'b'",
        "suffix",
    ),
    (
        "/completions",
        {"prompt": "a", "logprobs": 21},
        "`logprobs` must be an integer in [0, 20], got 21",
        "logprobs",
    ),
    ("/completions", {"prompt": "a", "stop": [1]}, "a valid string", "stop"),
    (
        "/completions",
        {"prompt": "a", "stop": ""},
        "`stop` must be None, a non-empty string or a list of non-empty strings, got ''",
        "stop",
    ),
    ("/completions", {"prompt": "a", "stop": ["x"] * 65}, "65", "stop"),
    ("/completions", {"prompt": "a", "stop": "x" * 5000}, "5000", "stop"),
    (
        "/completions",
        {"prompt": "a", "stop_token_ids": [2048]},
        "each token id in `stop_token_ids` must be an integer in [0, 2047], got 2048",
        "stop_token_ids",
    ),
    ("/completions", {"prompt": "a", "logit_bias": {"x": 1}}, "token ids", "logit_bias"),
    (
        "/completions",
        {"prompt": "a", "logit_bias": {"2048": 1}},
        "each token id in `logit_bias` must be an integer in [0, 2047], got 2048",
        "logit_bias",
    ),
    (
        "/completions",
        {"prompt": "a", "logit_bias": {"5": 101}},
        "`logit_bias[5]` must be a finite number in [-100, 100], got 101.0",
        "logit_bias",
    ),
    (
        "/completions",
        {"prompt": "a", "stream_options": {"include_usage": 1}},
        "a valid boolean",
        "stream_options",
    ),
    ("/chat/completions", {}, "`messages` is missing", "messages"),
    ("/chat/completions", {"messages": []}, "at least one message", "messages"),
    ("/chat/completions", {"messages": "hi"}, "a valid list", "messages"),
    ("/chat/completions", {"messages": [{"content": "a"}]}, "messages[0]", "messages"),
    (
        "/chat/completions",
        {"messages": [{"role": "user"}]},
        "`messages[0].content` must be a string or a list of text parts, got None",
        "messages",
    ),
    (
        "/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "messages",
    ),
    ("/chat/completions", {"messages": CHAT, "tools": [{}]}, "tools", "tools"),
    (
        "/chat/completions",
        {"messages": CHAT, "response_format": {"type": "xml"}},
        "'text'",
        "response_format",
    ),
    (
        "/chat/completions",
        {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "schema",
        "response_format",
    ),
    ("/chat/completions", {"messages": CHAT, "top_logprobs": 2}, "unless logprobs is true", "top_logprobs"),
    ("/chat/completions", {"messages": CHAT, "max_tokens": 511}, "(max_model_len)", "messages"),
]


@pytest.mark.parametrize(("path", "body", "message", "param"), BAD)
def test_bad_input(served, path, body, message, param):
    for stream in (False, True):
        answer = served.client.post(path, json={**body, "stream": stream})
        error = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert error["code"] == ("context_length_exceeded" if "max_model_len" in message else None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt":', "not valid JSON"),
        (b"", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b'{"prompt": "a", "top_p": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "temperature": Infinity}', "Infinity is not a JSON number"),
        (b'{"prompt": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_bad_json(served, content, message):
    answer = served.client.post("/completions", content=content, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_json_without_its_header(served):
    for headers in ({}, {"Content-Type": "application/x-www-form-urlencoded"}):
        answer = served.client.post("/completions", content=b'{"prompt": "a"}', headers=headers)
        assert answer.status_code == 400, answer.text
        assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "start", "end"),
    [
        ({"prompt": [10**4000]}, "`prompt_token_ids[0]` must be an integer in [0, 2047], got 1000", "0"),
        (
            {"prompt": "a", "stop_token_ids": [10**4000]},
            "each token id in `stop_token_ids` must be an integer in [0, 2047], got 1000",
            "0",
        ),
        (
            {"prompt": "a", "max_tokens": "9" * 4000},
            "`max_tokens` is invalid: Input should be a valid integer, got '9999",
            "9'",
        ),
    ],
)
def test_errors_are_short(served, body, start, end):
    message = served.client.post("/completions", content=json.dumps(body), headers=JSON).json()["error"][
        "message"
    ]
    assert message.startswith(start)
    assert message.endswith(end)
    assert len(message) < 620


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("path", ["/completions", "/chat/completions"])
def test_long_texts_are_read_beside_the_event_loop(served, path, is_long, monkeypatch):
    check, loops = served.engine.check_request, []

    def recorded(*args, **kwargs):
        loops.append(asyncio._get_running_loop())
        return check(*args, **kwargs)

    monkeypatch.setattr(served.engine, "check_request", recorded)
    text = "    " * 300 if is_long else "a"
    body = {"prompt": text} if path == "/completions" else {"messages": [{"role": "user", "content": text}]}
    served.post(path, **body, max_tokens=1)
    assert [loop is None for loop in loops] == [is_long]


def test_unknown_model_and_path(served):
    answer = served.client.post("/completions", json={"model": "gpt-5", "prompt": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'pagelet'" in error["message"]
    for path, status in (("/nothing", 404), ("/completions", 405)):
        answer = served.client.get(path)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])


def test_bad_requests_do_not_disturb_others(served):
    expected = served.complete(max_tokens=60)["choices"]
    with ThreadPoolExecutor(8) as pool:
        good = [pool.submit(served.complete, max_tokens=60) for _ in range(4)]
        bad = [pool.submit(served.client.post, path, json=body) for path, body, *_ in BAD]
        assert all(b.result().status_code == 400 for b in bad)
        assert all(g.result()["choices"] == expected for g in good)
    served.wait_until_idle()


def test_models(served):
    (model,) = served.client.get("/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("pagelet", "model", 512)


def test_openapi_describes_the_requests(served):
    schema = json.dumps(served.client.get("../openapi.json").json())
    assert "max_completion_tokens" in schema
    assert "/v1/chat/completions" in schema
