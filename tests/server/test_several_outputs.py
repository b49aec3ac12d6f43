"""Several outputs of one prompt over HTTP: parallel samples, the best of several, and beams."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_paged import BeamSearchParams, SamplingParams

SAMPLED = {"prompt": "def read(self", "max_tokens": 24, "temperature": 0.9, "seed": 5}
BEAMS = {"prompt": "def f(", "max_tokens": 12, "use_beam_search": True, "beam_width": 4, "n": 2}


def texts_of(answer):
    return [choice["text"] for choice in answer["choices"]]


def parts_by_index(chunks):
    """Returns the choices of a stream by their index."""
    parts = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return parts


def test_each_choice_is_a_request_with_its_own_seed(served):
    answer = served.post("/completions", **SAMPLED, n=4)
    seed_of = SamplingParams(seed=5).seed_of
    alone = [served.post("/completions", **{**SAMPLED, "seed": seed_of(i)}) for i in range(4)]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts_of(answer) == [texts_of(a)[0] for a in alone]
    assert len(set(texts_of(answer))) == 4
    assert answer["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == sum(a["usage"]["completion_tokens"] for a in alone)


def test_choices_of_several_prompts_come_in_order(served):
    prompts = ["def f(", "import ", "class A"]
    together = served.post("/completions", **{**SAMPLED, "prompt": prompts}, n=2)
    alone = [served.post("/completions", **{**SAMPLED, "prompt": prompt}, n=2) for prompt in prompts]
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert texts_of(together) == [text for answer in alone for text in texts_of(answer)]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(a["usage"][name] for a in alone)


def test_best_of_returns_the_likeliest(served):
    every = served.post("/completions", **SAMPLED, n=5, logprobs=0)["choices"]
    every.sort(key=lambda choice: sum(choice["logprobs"]["token_logprobs"]), reverse=True)
    answer = served.post("/completions", **SAMPLED, n=2, best_of=5)
    assert texts_of(answer) == [choice["text"] for choice in every[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]


@pytest.mark.parametrize("prompts", ["def read(self", ["def read(self", "import "]])
def test_streams_of_n_equal_the_whole(served, prompts):
    body = {**SAMPLED, "prompt": prompts, "n": 4, "logprobs": 1, "stop": ["\n", "="]}
    whole = served.post("/completions", **body)
    chunks = served.stream("/completions", **body, stream_options={"include_usage": True})
    # What an earlier prompt left in the cache is no part of an answer.
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks[:-1])
    parts = parts_by_index(chunks)
    assert sorted(parts) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        own = parts[choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        reasons = [part["finish_reason"] for part in own]
        assert reasons == [None] * (len(own) - 1) + [choice["finish_reason"]]
        for name in ("tokens", "text_offset"):
            assert [x for part in own for x in part["logprobs"][name]] == choice["logprobs"][name]


def test_chat_streams_all_choices(served):
    messages = [{"role": "user", "content": "What is a block table?"}]
    body = {"messages": messages, "temperature": 1.2, "seed": 3, "n": 3, "max_tokens": 20}
    whole = served.post("/chat/completions", **body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    parts = parts_by_index(served.stream("/chat/completions", **body))
    for choice in whole["choices"]:
        first, *rest = parts[choice["index"]]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in rest)
        assert "".join(p["delta"].get("content", "") for p in rest) == choice["message"]["content"]
        assert [p["finish_reason"] for p in rest if p["finish_reason"]] == [choice["finish_reason"]]


async def outputs_of(engine, prompt, params, request_id, **more):
    return [output async for output in engine.generate(prompt, params, request_id, **more)]


def test_beams(served):
    engine = served.server.engine
    *before, last = asyncio.run(outputs_of(engine, "def f(", BeamSearchParams(4, max_tokens=12), "beams"))
    assert all(output.outputs == [] for output in before)
    best = [beam.text for beam in last.outputs]
    assert len(best) == 4
    answer = served.post("/completions", **BEAMS)
    assert texts_of(answer) == best[:2]
    assert answer["usage"]["completion_tokens"] == sum(len(beam.token_ids) for beam in last.outputs[:2])
    assert texts_of(served.post("/completions", **{**BEAMS, "beam_width": None})) != []
    assert texts_of(served.post("/completions", **{**BEAMS, "n": None})) == best[:1]
    assert texts_of(served.post("/completions", **{**BEAMS, "n": 4, "beam_width": None})) == best
    chat = served.chat(use_beam_search=True, n=3, max_tokens=8)
    assert len({choice["message"]["content"] for choice in chat["choices"]}) == 3


def test_beams_take_the_length_penalty(served):
    beams = BeamSearchParams(4, max_tokens=30, length_penalty=-2, temperature=1.5)
    (*_, last) = asyncio.run(outputs_of(served.server.engine, "x = ", beams, "penalty"))
    body = {"use_beam_search": True, "n": 4, "max_tokens": 30, "length_penalty": -2, "temperature": 1.5}
    answer = served.post("/completions", prompt="x = ", **body)
    assert texts_of(answer) == [beam.text for beam in last.outputs]


def test_outputs_of_an_async_engine_grow(served):
    engine = served.server.engine
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=16, logprobs=1)
    outputs = asyncio.run(outputs_of(engine, "def f(", params, "grow"))
    for output in outputs:
        for part, whole in zip(output.outputs, outputs[-1].outputs, strict=True):
            n = len(part.token_ids)
            assert part.token_ids == whole.token_ids[:n]
            assert whole.text.startswith(part.text)
            assert part.logprobs == whole.logprobs[:n]
    params = SamplingParams(n=2, best_of=3, temperature=0.9, seed=5, max_tokens=16)
    *before, last = asyncio.run(outputs_of(engine, "def f(", params, "best"))
    assert before
    assert all(output.outputs == [] for output in before)
    ranked = sorted(outputs[-1].outputs, key=lambda x: x.cumulative_logprob, reverse=True)
    assert [output.token_ids for output in last.outputs] == [output.token_ids for output in ranked[:2]]
    for more, message in (({"priority": 1}, "fcfs"), ({"cache_salt": None}, "a string")):
        with pytest.raises(ValueError, match=message):
            asyncio.run(outputs_of(engine, "a", None, "bad", **more))
    served.wait_until_idle()


def test_a_salt_keeps_prefixes_apart(served):
    prompt = "Who knows what a salted prefix is for? " * 8

    def num_cached(**body):
        answer = served.post("/completions", prompt=prompt, max_tokens=1, **body)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert num_cached(cache_salt="one") == 0
    assert num_cached(cache_salt="one") > 0
    assert num_cached(cache_salt="two") == num_cached() == 0


def test_mixed_batch_answers_as_alone(served):
    prefix = "class Pool:\n    def take(self):\n        " * 4
    bodies = [
        {"prompt": "def f(", "temperature": 0, "max_tokens": 30},
        {"prompt": prefix, "temperature": 0, "max_tokens": 30},
        # Of this seed no draw falls where float32's rounding decides.
        {**SAMPLED, "prompt": prefix, "n": 4, "seed": 8},
        {**SAMPLED, "n": 2, "stop": "\n"},
        BEAMS,
        {**BEAMS, "prompt": prefix, "n": 4},
    ]
    alone = [served.post("/completions", **body)["choices"] for body in bodies]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda body: served.post("/completions", **body)["choices"], bodies))
    assert together == alone
    served.wait_until_idle()


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        (
            {"n": 2, "best_of": 3},
            "`best_of` must be 2 (n) if stream is true because the best outputs are known",
            "best_of",
        ),
        ({"use_beam_search": True}, "must be False if stream is true", "use_beam_search"),
    ],
)
def test_what_is_known_at_the_end_only_is_not_streamed(served, more, message, param):
    body = {"prompt": "a", "max_tokens": 2, **more}
    answer = served.client.post("/completions", json={**body, "stream": True})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    served.post("/completions", **body)


def test_best_of_and_beams_count_as_sequences(served):
    for more, most in (({"best_of": 17}, 16), ({"use_beam_search": True, "beam_width": 11}, 10)):
        answer = served.client.post("/completions", json={"prompt": "a", **more})
        assert answer.status_code == 400
        assert (
            answer.json()["error"]["message"]
            .partition("` must be ")[2]
            .startswith(f"an integer in [1, {most}]")
        )
