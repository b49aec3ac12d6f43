"""litellm, which proxies and agents call servers with."""

import litellm
import pytest

pytestmark = pytest.mark.server

QUESTION = [{"role": "user", "content": "What is a block table?"}]


@pytest.fixture(scope="module")
def server(url):
    return {"api_base": f"{url}/v1", "api_key": "none", "model": "openai/pagelet", "max_retries": 0}


def test_chat(server, greedy):
    expected = greedy(QUESTION, max_tokens=None)
    answer = litellm.completion(**server, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == expected
    chunks = litellm.completion(**server, messages=QUESTION, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    several = litellm.completion(
        **server, messages=QUESTION, n=3, seed=1, logprobs=True, top_logprobs=2, max_tokens=8
    )
    assert len(several.choices) == 3
    assert len(several.choices[0].logprobs.content[0].top_logprobs) == 2


def test_completion(server, greedy):
    server = {**server, "model": "text-completion-openai/pagelet"}
    answer = litellm.text_completion(**server, prompt="def read(self", temperature=0, stop=["\n"])
    assert answer.choices[0].text == greedy("def read(self", stop=["\n"])


def test_response(server, greedy):
    answer = litellm.responses(**server, input=QUESTION[0]["content"], temperature=0)
    assert answer.output[0].content[0].text == greedy(QUESTION, max_tokens=None)
    events = list(litellm.responses(**server, input=QUESTION[0]["content"], temperature=0, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output[0].content[0].text


def test_errors(server):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**server, messages=[{"role": "user", "content": "a " * 600}])
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**server, "model": "openai/other"}, messages=QUESTION)
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**server, messages=QUESTION, n=0)
    with pytest.raises(litellm.Timeout):
        litellm.completion(
            **server, messages=QUESTION, timeout=0.05, max_tokens=400, extra_body={"ignore_eos": True}
        )
