"""langchain-openai, chats and completions."""

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

pytestmark = pytest.mark.server

TEXT = "What is a block table?"
QUESTION = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def server(url):
    return {
        "base_url": f"{url}/v1",
        "api_key": "none",
        "model": "pagelet",
        "temperature": 0,
        "max_retries": 0,
    }


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_chat(server, greedy, use_responses_api):
    chat = ChatOpenAI(**server, use_responses_api=use_responses_api)
    expected = greedy(QUESTION, max_tokens=None)
    answer = chat.invoke(TEXT)
    assert answer.text == expected
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream(TEXT)) == expected
    assert [answer.text for answer in chat.batch([TEXT, TEXT])] == [expected] * 2


def test_settings(server, greedy):
    chat = ChatOpenAI(**server, logprobs=True, top_logprobs=2, max_tokens=8, stop=["\n"])
    answer = chat.invoke([SystemMessage("Be short."), HumanMessage(TEXT)])
    messages = [{"role": "system", "content": "Be short."}, *QUESTION]
    assert answer.text == greedy(messages, max_tokens=8, stop=["\n"])
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_several_outputs(server):
    chat = ChatOpenAI(**{**server, "temperature": 1}, n=3, seed=1, max_tokens=8)
    assert len(chat.generate([[HumanMessage(TEXT)]]).generations[0]) == 3


def test_completion(server, greedy):
    model = OpenAI(**server, max_tokens=16)
    assert model.invoke("def read(self") == greedy("def read(self")
    assert "".join(model.stream("def read(self")) == greedy("def read(self")
