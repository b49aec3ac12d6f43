"""Calls as vLLM's scripts make them: of LLM, LLMEngine and AsyncLLMEngine; a scripted executor."""

import asyncio
import functools

import pytest
from helpers.scripted_engine import EOS, LONG, no_block_lost, run
from tqdm import tqdm

from jax_paged import LLM, AsyncLLMEngine, BeamSearchParams, LLMEngine, RequestOutputKind, SamplingParams

HI = [{"role": "user", "content": "hi"}]


def answer(prompt_text):
    """What the scripted model says to a chat's prompt: all of it but the last token."""
    return prompt_text[:-1]


def test_positional_arguments_of_llm(scripted, folder):
    args, executor = scripted()
    with LLM(args.model, folder, executor=executor) as llm:
        assert llm.llm_engine.args.tokenizer == folder
        (output,) = llm.generate("abc?", LONG, use_tqdm=False, lora_request=None)
        assert output.outputs[0].text == "abc"
        assert output.outputs[0].finished()
        assert llm.get_tokenizer() is llm.llm_engine.get_tokenizer()
    with pytest.raises(ValueError, match=r"`tokenizer` must be .*got ''"):
        LLM(folder, "")


def test_adapters_are_refused(llm):
    calls = [
        lambda: llm.generate("a", lora_request="x"),
        lambda: llm.chat(HI, lora_request="x"),
        lambda: llm.beam_search("a", BeamSearchParams(1), lora_request="x"),
        lambda: llm.llm_engine.add_request("r", "a", LONG, None, "x"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"`lora_request` must be None.*got 'x'"):
            call()


def test_progress_bars_of_the_user(llm):
    made = []

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            made.append(kwargs)
            super().__init__(*args, **kwargs)

    llm.generate(["a?", "b?"], LONG, use_tqdm=functools.partial(Bar, desc="mine"))
    llm.chat(HI, LONG, use_tqdm=Bar)
    assert [(bar["total"], bar["disable"]) for bar in made] == [(2, False), (1, False)]
    assert made[0]["desc"] == "mine"


def test_default_parameters(llm):
    params = llm.get_default_sampling_params()
    assert params == SamplingParams()
    params.max_tokens = 1
    assert llm.get_default_sampling_params() == SamplingParams()
    assert len(llm.generate("abcdef?", params, use_tqdm=False)[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("settings", "prompt"),
    [
        ({}, "u:hi;a:"),
        ({"chat_template": "{{ messages[0]['content'] }}!?"}, "hi!?"),
        ({"chat_template": "{{ x }}?", "chat_template_kwargs": {"x": "given"}}, "given?"),
        (
            {"chat_template": "{{ messages[0].content[0].text }}?", "chat_template_content_format": "openai"},
            "hi?",
        ),
        ({"chat_template": "{{ messages[0].content }}?", "chat_template_content_format": "string"}, "hi?"),
        ({"chat_template": "{{ tools[0].function.name }}?", "tools": [{"function": {"name": "f"}}]}, "f?"),
        (
            {"chat_template": "x{% if add_generation_prompt %}y{% endif %}?", "add_generation_prompt": False},
            "x?",
        ),
    ],
)
def test_chat_settings(llm, settings, prompt):
    (output,) = llm.chat(HI, LONG, use_tqdm=False, **settings)
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == prompt
    assert output.outputs[0].text == answer(prompt)


def test_a_message_is_continued(llm):
    template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    messages = [*HI, {"role": "assistant", "content": "I a"}]
    settings = {"add_generation_prompt": False, "continue_final_message": True, "chat_template": template}
    (output,) = llm.chat(messages, LONG, use_tqdm=False, **settings)
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "hi;I a"
    with pytest.raises(ValueError, match="`messages` must be messages that the chat template accepts"):
        llm.chat(messages, LONG, use_tqdm=False, continue_final_message=True)


def test_variables_of_the_template_take_precedence_over_arguments(llm):
    template = "{{ x }}{% if add_generation_prompt %}y{% endif %}{{ tools[0].function.name }}?"
    variables = {
        "chat_template": template,
        "add_generation_prompt": False,
        "continue_final_message": False,
        "tools": [{"function": {"name": "f"}}],
        "x": "given",
    }
    arguments = {"chat_template": "not this", "tools": [{"function": {"name": "nor this"}}]}
    for settings in ({}, arguments):
        (output,) = llm.chat(HI, LONG, use_tqdm=False, chat_template_kwargs=variables, **settings)
        assert llm.get_tokenizer().decode(output.prompt_token_ids) == "givenf?"
    assert variables["x"] == "given"


@pytest.mark.parametrize("name", ["tokenize", "return_dict", "return_tensors", "truncation"])
def test_variables_of_the_template_are_no_settings(llm, name):
    with pytest.raises(ValueError, match=rf"`chat_template_kwargs\['{name}'\]` must be unset .*got True"):
        llm.chat(HI, LONG, chat_template_kwargs={name: True})
    with pytest.raises(ValueError, match=r"`chat_template_kwargs` must be None or a dict.*got 'x'"):
        llm.chat(HI, LONG, chat_template_kwargs="x")


def test_chat_takes_no_settings_of_images(llm):
    for empty in (None, {}):
        assert llm.chat(HI, LONG, use_tqdm=False, mm_processor_kwargs=empty)
    with pytest.raises(ValueError, match=r"`mm_processor_kwargs` must be None or {} .*got \{'x': 1\}"):
        llm.chat(HI, LONG, mm_processor_kwargs={"x": 1})


def test_chat_refuses_what_a_template_does_not_take(llm):
    with pytest.raises(
        ValueError, match=r"`tools` must be None because the chat template does not use tools, got"
    ):
        llm.chat(HI, LONG, tools=[{"function": {"name": "f"}}])
    with pytest.raises(ValueError, match=r"`chat_template_content_format` must be one of.*got 'xml'"):
        llm.chat(HI, LONG, chat_template_content_format="xml")
    calls = [*HI, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    assert llm.chat(calls, LONG, use_tqdm=False)[0].outputs[0].text == "u:hi;a:;a"
    with pytest.raises(
        ValueError, match=r"`messages\[1\].content` must be a string or a list of text parts, got None"
    ):
        llm.chat([*HI, {"role": "user", "content": None}], LONG)


def test_output_kinds_of_step(scripted):
    kinds = {kind.name: kind for kind in RequestOutputKind}
    with LLMEngine(*scripted()) as engine:
        for name, kind in kinds.items():
            engine.add_request(name, "abcd?", SamplingParams(max_tokens=None, output_kind=kind))
        texts = {name: [] for name in kinds}
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[output.request_id].append(output.outputs[0].text)
    assert "".join(texts["DELTA"]) == "abcd"
    assert len(texts["DELTA"]) > 2
    assert texts["CUMULATIVE"][-1] == "abcd"
    assert len(texts["CUMULATIVE"]) == len(texts["DELTA"])
    assert texts["FINAL_ONLY"] == ["abcd"]


def test_llm_returns_whole_outputs_of_any_kind(llm):
    for kind in RequestOutputKind:
        (output,) = llm.generate("abcd?", SamplingParams(output_kind=kind), use_tqdm=False)
        assert output.outputs[0].text == "abcd"


def test_stops_in_the_text(scripted):
    stop_token = SamplingParams(stop_token_ids=[], include_stop_str_in_output=True)
    with LLMEngine(*scripted()) as engine:
        stop_token.stop_token_ids = [engine.tokenizer.encode("c")[0]]
        engine.add_request("token", "abcde?", stop_token)
        for shown in (False, True):
            params = SamplingParams(stop="cd", include_stop_str_in_output=shown)
            engine.add_request(str(shown), "abcde?", params)
        outputs = run(engine)
        texts = {name: output.outputs[0].text for name, output in outputs.items()}
        assert texts == {"token": "abc", "False": "ab", "True": "abcd"}
        assert outputs["True"].outputs[0].stop_reason == "cd"


def test_no_text(scripted):
    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "abc?", SamplingParams(detokenize=False, logprobs=1, max_tokens=8))
        (completion,) = run(engine)["a"].outputs
    assert (completion.text, completion.token_ids[-1], len(completion.token_ids)) == ("", EOS, 4)
    assert completion.logprobs[0][completion.token_ids[0]].decoded_token is None


def test_changes_while_a_request_runs_have_no_effect(scripted):
    params = SamplingParams(max_tokens=6, stop=["zz"])
    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "abcdefghi?", params)
        engine.step()
        params.max_tokens, params.temperature = 2, -1
        params.stop.append("c")
        assert run(engine)["a"].outputs[0].text == "abcdef"


def test_aborts_of_several_requests(scripted):
    with LLMEngine(*scripted()) as engine:
        for name in "abcd":
            engine.add_request(name, "abc?", LONG, None, priority=0)
        engine.step()
        engine.abort_request(["a", "nobody", "b"])
        engine.abort_request("c")
        assert list(run(engine)) == ["d"]
        assert no_block_lost(engine)


def test_async_engine(scripted):
    async def main():
        engine = AsyncLLMEngine(*scripted())
        texts = {}

        async def collect(name, prompt, kind):
            params = SamplingParams(max_tokens=None, output_kind=kind)
            outputs = engine.generate(prompt=prompt, sampling_params=params, request_id=name)
            texts[name] = [output.outputs[0].text async for output in outputs]

        kinds = {kind.name: kind for kind in RequestOutputKind}
        await asyncio.gather(*(collect(name, {"prompt": "abcd?"}, kind) for name, kind in kinds.items()))
        long = SamplingParams(max_tokens=300, ignore_eos=True)
        for name, several in (("x", False), ("y", True)):
            ended = []
            async for output in engine.generate("abc?", long, name):
                ended.append(output.finished)
                if several:
                    await engine.abort([name, "nobody"])
                else:
                    engine.abort(name)
            assert ended[-1]
        with pytest.raises(ValueError, match=r"`lora_request` must be .*got 'z'"):
            await anext(engine.generate("abc?", long, "z", "z"))
        engine.shutdown()
        return texts

    texts = asyncio.run(main())
    assert "".join(texts["DELTA"]) == "abcd"
    assert texts["CUMULATIVE"][-1] == "abcd"
    assert texts["FINAL_ONLY"] == ["abcd"]
