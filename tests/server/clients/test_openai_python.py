"""openai-python, which most users write their programs with."""

import asyncio

import openai
import pytest

pytestmark = pytest.mark.server

QUESTION = [{"role": "user", "content": "What is a block table?"}]
PROMPT = "def read(self"


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_models(client):
    (model,) = client.models.list()
    assert model.id == client.models.retrieve("pagelet").id == "pagelet"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stop", [None, ["\n\n", ")"]])
def test_completion(client, greedy, stop):
    body = {"model": "pagelet", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "stop": stop}
    answer = client.completions.create(**body)
    assert answer.choices[0].text == greedy(PROMPT, max_tokens=24, stop=stop)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(client.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason


def test_several_outputs_and_logprobs(client):
    answer = client.completions.create(model="pagelet", prompt=[PROMPT, "import"], n=3, seed=1, logprobs=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for choice in answer.choices:
        assert "".join(choice.logprobs.tokens).startswith(choice.text)  # and maybe an end token
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo(client, max_tokens):
    answer = client.completions.create(
        model="pagelet", prompt=PROMPT, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert choice.text.startswith(PROMPT)
    assert (choice.text == PROMPT) == (max_tokens == 0)
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text.startswith(token, offset)
    assert answer.usage.completion_tokens == max_tokens


def test_chat(client, greedy):
    body = {"model": "pagelet", "messages": QUESTION, "temperature": 0, "max_completion_tokens": 64}
    answer = client.chat.completions.create(**body)
    assert answer.choices[0].message.content == greedy(QUESTION, max_tokens=64)
    assert answer.choices[0].message.tool_calls is None
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage or chunks[-1].usage.total_tokens == answer.usage.total_tokens
    del body["max_completion_tokens"]
    with client.chat.completions.stream(**body) as stream:
        assert stream.get_final_completion().choices[0].message.content.startswith(text)


def test_continuous_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model="pagelet", messages=QUESTION, max_tokens=5, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0


def test_roles_and_parts(client):
    def ask(*messages):
        answer = client.chat.completions.create(
            model="pagelet", messages=messages, temperature=0, max_tokens=16
        )
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    system, developer = ({"role": role, "content": "Be short."} for role in ("system", "developer"))
    parts = [{"type": "text", "text": "What is a "}, {"type": "text", "text": "block table?"}]
    assert ask(system, *QUESTION) == ask(developer, {"role": "user", "content": parts})


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="pagelet", messages=QUESTION, logprobs=True, top_logprobs=3, max_tokens=5, n=2, seed=3
    )
    for choice in answer.choices:
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)


def test_response(client, greedy):
    answer = client.responses.create(model="pagelet", input=QUESTION[0]["content"], temperature=0)
    assert answer.output_text == greedy(QUESTION, max_tokens=None)
    assert (answer.status, answer.store, answer.error) == ("completed", False, None)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    cut = client.responses.create(model="pagelet", input=QUESTION, temperature=0, max_output_tokens=3)
    assert answer.output_text.startswith(cut.output_text)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_response_with_instructions_and_history(client, greedy):
    history = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "output_text", "text": "A list."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Of what?"}]},
    ]
    answer = client.responses.create(
        model="pagelet", instructions="Be short.", input=history, temperature=0, max_output_tokens=16
    )
    plain = [
        {"role": "system", "content": "Be short."},
        *QUESTION,
        {"role": "assistant", "content": "A list."},
        {"role": "user", "content": "Of what?"},
    ]
    assert answer.output_text == greedy(plain)


def test_response_stream(client):
    body = {"model": "pagelet", "input": QUESTION[0]["content"], "temperature": 0, "max_output_tokens": 12}
    body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 12
    (part,) = whole.output[0].content
    assert [x.token for event in deltas for x in event.logprobs] == [x.token for x in part.logprobs]
    assert all(len(x.top_logprobs) == 2 for x in part.logprobs)
    del body["max_output_tokens"]
    with client.responses.stream(**body) as stream:
        assert stream.get_final_response().output_text.startswith(whole.output_text)


@pytest.mark.parametrize(
    ("call", "error", "code", "param"),
    [
        (
            lambda c: c.completions.create(model="other", prompt="a"),
            "NotFoundError",
            "model_not_found",
            "model",
        ),
        (
            lambda c: c.completions.create(model="pagelet", prompt="a " * 600),
            "BadRequestError",
            "context_length_exceeded",
            "prompt",
        ),
        (
            lambda c: c.chat.completions.create(
                model="pagelet", messages=QUESTION, max_tokens=512, stream=True
            ),
            "BadRequestError",
            "context_length_exceeded",
            "messages",
        ),
        (lambda c: c.completions.create(model="pagelet", prompt="a", n=0), "BadRequestError", None, "n"),
        (
            lambda c: c.completions.create(
                model="pagelet", prompt="a", stream_options={"include_usage": True}
            ),
            "BadRequestError",
            None,
            "stream_options",
        ),
        (
            lambda c: c.responses.create(model="pagelet", input="a", previous_response_id="resp_1"),
            "BadRequestError",
            None,
            "previous_response_id",
        ),
        (
            lambda c: c.responses.create(model="pagelet", input="a", background=True),
            "BadRequestError",
            None,
            "background",
        ),
        (lambda c: c.responses.retrieve("resp_1"), "NotFoundError", None, None),
    ],
)
def test_errors(client, call, error, code, param):
    with pytest.raises(getattr(openai, error)) as caught:
        list(call(client))
    assert (caught.value.code, caught.value.param) == (code, param)


def test_a_client_that_gives_up(client, greedy):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(
            model="pagelet", prompt=["a", "b"], max_tokens=500, extra_body={"ignore_eos": True}
        )
    answer = client.completions.create(model="pagelet", prompt=PROMPT, temperature=0)
    assert answer.choices[0].text == greedy(PROMPT)


def test_unknown_fields(client):
    answer = client.completions.with_raw_response.create(
        model="pagelet", prompt="a", max_tokens=1, extra_body={"no_such_field": 1, "top_k": 5}
    )
    assert answer.headers["x-ignored-fields"] == "no_such_field"


def test_sixteen_at_once(url, greedy):
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asked = [
                client.completions.create(model="pagelet", prompt=f"def f{i}(", temperature=0)
                for i in range(16)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    assert asyncio.run(ask_all()) == [greedy(f"def f{i}(") for i in range(16)]
