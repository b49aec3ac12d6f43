"""Prompts in any form, bad ones, and the texts and log-probabilities that come back; a scripted executor."""

import dataclasses
import json
from collections.abc import MutableSequence

import numpy as np
import pytest
import tokenizers
from helpers.scripted_engine import EOS, LONG, TEMPLATE, VOCAB_SIZE, no_block_lost, run

from jax_paged import LLM, EngineArgs, LLMEngine, SamplingParams
from jax_paged.engine.composition import tokenizer_name
from jax_paged.engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("abc?", ["abc"]),
        (["abc?", "né?"], ["abc", "né"]),
        ({"prompt": "abc?"}, ["abc"]),
        ({"prompt_token_ids": [68, 69, 70, 5]}, None),
        ([68, 69, 70, 5], None),
        ([np.int32(68), 69, np.int64(5)], None),
        (np.array([68, 69, 5]), None),
        ([[68, 69, 5], {"prompt": "x?"}, "y?"], None),
        ([], []),
    ],
)
def test_forms_of_prompts(llm, prompts, texts):
    outs = llm.generate(prompts, LONG, use_tqdm=False)
    if texts is not None:
        assert [o.outputs[0].text for o in outs] == texts
    for out in outs:
        (completion,) = out.outputs
        assert completion.token_ids == [*out.prompt_token_ids[:-1], EOS]
        assert (completion.finish_reason, completion.stop_reason, out.finished) == ("stop", None, True)
        assert out.metrics.arrival_time <= out.metrics.first_token_time <= out.metrics.finished_time
    assert no_block_lost(llm.llm_engine)


def test_max_tokens_is_cut_to_max_model_len(llm):
    outs = llm.generate([[5] * 390] * 2, [SamplingParams(max_tokens=n) for n in (9, 11)], use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outs] == [9, 10]
    assert [o.outputs[0].finish_reason for o in outs] == ["length"] * 2


def test_order_and_parameters_of_each(llm):
    params = [SamplingParams(max_tokens=1 + i % 5) for i in range(20)]
    outs = llm.generate([f"{i:05}?" for i in range(20)], params, use_tqdm=True)
    assert [o.outputs[0].text for o in outs] == [f"{i:05}"[: 1 + i % 5] for i in range(20)]
    with pytest.raises(ValueError, match=r"the length of `sampling_params` must be .*got 2"):
        llm.generate(["a"], params[:2])


def test_chat(llm):
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    one = llm.chat(messages, LONG, use_tqdm=False)
    two = llm.chat([messages, messages], LONG, use_tqdm=False)
    assert [o.outputs[0].text for o in one + two] == ["u:hi;a"] * 3
    assert llm.get_tokenizer().decode(one[0].prompt_token_ids) == "u:hi;a:"


BAD = [
    ("", {}, "`prompt` must be .*got ''"),
    ([], {}, "prompt_token_ids"),
    ({"prompt_token_ids": "abc"}, {}, "`prompt_token_ids` must be .*got 'abc'"),
    ({"text": "abc"}, {}, '`prompt` must be a dict with "prompt", "prompt_token_ids" or both, and'),
    (7, {}, "`prompt` must be .*got 7"),
    ("\ud800", {}, "Unicode"),
    ([5, -1], {}, r"`prompt_token_ids\[1\]` must be an integer in \[0, 299\], got -1"),
    ([5, VOCAB_SIZE], {}, r"`prompt_token_ids\[1\]` must be an integer in \[0, 299\], got 300"),
    ([5, True], {}, r"`prompt_token_ids\[1\]` must be an integer in \[0, 299\], got True"),
    ([5, 2**40], {}, r"`prompt_token_ids\[1\]` must be an integer in \[0, 299\], got 1099511627776"),
    ([5, 1.0], {}, r"`prompt_token_ids\[1\]` must be an integer in \[0, 299\], got 1.0"),
    ([np.int32(300)], {}, r"`prompt_token_ids\[0\]` must be an integer in \[0, 299\], got 300"),
    ([np.float32(5)], {}, r"`prompt_token_ids\[0\]` must be an integer in \[0, 299\], got np.float32\(5.0\)"),
    (np.array([5.0]), {}, r"`prompt_token_ids\[0\]` must be an integer in \[0, 299\], got 5.0"),
    (np.array([True]), {}, r"`prompt_token_ids\[0\]` must be an integer in \[0, 299\], got True"),
    (np.zeros((2, 2), int), {}, r"`prompt_token_ids\[0\]` must be an integer in \[0, 299\], got \[0, 0\]"),
    ([5] * 400, {"max_tokens": 1}, r"must be at most 399 \(max_model_len - 1\), got 400"),
    (
        [5] * 400,
        {"max_tokens": None},
        r"the number of tokens of `prompt` must be at most 399 \(max_model_len - 1\), got 400",
    ),
    ("a", {"logprobs": 20}, r"`logprobs` must be an integer in \[0, 19\], got 20"),
    ("a", {"prompt_logprobs": 20}, "`prompt_logprobs` must be .*got 20"),
    (
        "a",
        {"logprobs": -1},
        r"`logprobs` must be at most 19 \(max_logprobs\), got -1, which means all 300 tokens of the",
    ),
    (
        "a",
        {"allowed_token_ids": [5, 300]},
        r"each token id in `allowed_token_ids` must be an integer in \[0, 299\], got 300",
    ),
    (
        "a",
        {"bad_words_token_ids": [[5], [6, 300]]},
        r"each token id in `bad_words_token_ids` must be an integer in \[0, 299\], got 300",
    ),
    ("a", {"bad_words": ["x"] * 129}, "the number of `bad_words` must be .*got 129"),
    (
        "a",
        {"stop_token_ids": [300]},
        r"each token id in `stop_token_ids` must be an integer in \[0, 299\], got 300",
    ),
    (
        "a",
        {"logit_bias": {300: 1.0}},
        r"each token id in `logit_bias` must be an integer in \[0, 299\], got 300",
    ),
]


@pytest.mark.parametrize(("prompt", "settings", "message"), BAD)
def test_bad_input_names_what_is_wrong_and_disturbs_nobody(scripted, prompt, settings, message):
    with LLMEngine(*scripted()) as engine:
        engine.add_request("good", "abc?", LONG)
        engine.step()
        with pytest.raises(ValueError, match=message):
            engine.add_request("bad", prompt, SamplingParams(**settings))
        assert run(engine)["good"].outputs[0].text == "abc"
        assert no_block_lost(engine)


def test_text_of_a_larger_vocabulary_names_prompt_and_tokenizer(scripted):
    def llm_of(vocab_size):
        args, executor = scripted()
        executor.config = dataclasses.replace(executor.config, vocab_size=vocab_size)
        return LLM(args.model, executor=executor)

    with llm_of(VOCAB_SIZE) as llm:
        highest = max(llm.llm_engine.tokenizer.encode("abc?"))
    message = rf"each token id of `prompt` must be .*\[0, {highest - 1}\], got {highest}"
    with llm_of(highest) as llm, pytest.raises(ValueError, match=message):
        llm.generate("abc?", use_tqdm=False)
    with llm_of(highest + 1) as llm:
        assert llm.generate("abc?", LONG, use_tqdm=False)[0].outputs[0].text == "abc"


def test_bad_prompt_in_a_list_runs_nothing(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: `prompt` must be .*got ''"):
        llm.generate(["abc?", ""], use_tqdm=False)
    assert llm.llm_engine.executor.num_steps == 0
    with pytest.raises(ValueError, match=r"`sampling_params` must be .*got 5"):
        llm.generate("a", 5)
    with pytest.raises(ValueError, match=r"`prompts` must be .*got None"):
        llm.generate(None)


def test_prompt_that_never_fits_the_pool_names_the_blocks(scripted):
    with LLMEngine(*scripted(num_gpu_blocks_override=3, block_size=4)) as engine:
        with pytest.raises(ValueError, match=r"KV blocks needed for `prompt` must be at most 2 .*got 3"):
            engine.add_request("big", [5] * 9)
        engine.add_request("fits", [5] * 8, LONG)
        assert run(engine)["fits"].outputs[0].finish_reason == "length"
        assert no_block_lost(engine)


def test_duplicate_request_id(scripted):
    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "abc?")
        with pytest.raises(ValueError, match=r"`request_id` must be .*got 'a'"):
            engine.add_request("a", "abc?")
        run(engine)
        engine.add_request("a", "abc?")


def test_without_a_tokenizer(scripted):
    with LLMEngine(*scripted(skip_tokenizer_init=True)) as engine:
        for prompt, settings in (("text", {}), ([5], {"stop": ["x"]})):
            with pytest.raises(ValueError, match="no tokenizer"):
                engine.add_request("a", prompt, SamplingParams(**settings))
        engine.add_request("a", [68, 69, 5], SamplingParams(logprobs=1))
        (completion,) = run(engine)["a"].outputs
        assert (completion.text, completion.token_ids) == ("", [68, 69, EOS])
        assert completion.logprobs[0][68].decoded_token is None


def test_stop_string_ends_the_sequence_and_keeps_its_tokens(scripted):
    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "hello world?", SamplingParams(stop=["wor", "zzz"], max_tokens=50))
        shown = []
        while engine.has_unfinished_requests():
            shown += engine.step()
        final = shown[-1].outputs[0]
        assert (final.text, final.finish_reason, final.stop_reason) == ("hello ", "stop", "wor")
        assert len(final.token_ids) == len("hello wor")
        assert all("hello ".startswith(o.outputs[0].text) for o in shown)
        assert no_block_lost(engine)


def test_stop_string_at_the_last_token_beats_length(llm):
    (out,) = llm.generate("abcd?", SamplingParams(stop="cd", max_tokens=4), use_tqdm=False)
    assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("ab", "stop")


def test_stop_token_is_no_text(llm):
    params = SamplingParams(stop_token_ids=[llm.llm_engine.tokenizer.encode("c")[0]])
    (out,) = llm.generate("abcd?", params, use_tqdm=False)
    completion = out.outputs[0]
    assert (completion.text, len(completion.token_ids), completion.stop_reason) == (
        "ab",
        3,
        params.stop_token_ids[0],
    )


def test_logprobs(llm):
    (out,) = llm.generate("ab?", SamplingParams(logprobs=1, prompt_logprobs=0, max_tokens=2), use_tqdm=False)
    completion = out.outputs[0]
    a, b = completion.token_ids
    assert completion.cumulative_logprob == -3.0
    assert list(completion.logprobs[0]) == [a, a + 1]
    assert [dataclasses.astuple(x) for x in completion.logprobs[0].values()] == [
        (-1.5, 2, "a"),
        (-0.5, 1, "b"),
    ]
    assert out.prompt_logprobs[0] is None
    assert [list(d) for d in out.prompt_logprobs[1:]] == [[b], [out.prompt_token_ids[2]]]


def test_prompt_logprobs_of_a_preempted_chunked_prompt_are_kept_once(scripted):
    with LLMEngine(*scripted(num_gpu_blocks_override=14, block_size=4, max_num_batched_tokens=8)) as engine:
        for i in range(3):
            engine.add_request(str(i), [10 + i] * 16, SamplingParams(prompt_logprobs=1, max_tokens=30))
        outs = run(engine)
        assert sum(o.metrics.num_preemptions for o in outs.values()) > 0
        for out in outs.values():
            assert [next(iter(d)) for d in out.prompt_logprobs[1:]] == out.prompt_token_ids[1:]
        assert no_block_lost(engine)


def test_a_user_who_changes_an_output_does_not_change_the_request(scripted):
    with LLMEngine(*scripted()) as engine:
        prompt = [68, 69, 70, 5]
        engine.add_request("a", prompt, LONG)
        while engine.has_unfinished_requests():
            (output,) = engine.step()
            output.prompt_token_ids.extend([9] * 50)
            token_ids = output.outputs[0].token_ids
            if output.finished:
                token_ids.clear()
            else:
                assert not isinstance(token_ids, MutableSequence)
        assert engine.executor.num_steps == 4
        assert prompt == [68, 69, 70, 5]
        assert no_block_lost(engine)


def test_tokenizer_of_its_own(scripted, make_llm, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").symlink_to(folder)
    for name, expected in (("~/mine", str(tmp_path / "mine")), ("someone/else", "someone/else")):
        assert tokenizer_name(EngineArgs(tokenizer=name)) == expected
    with LLMEngine(*scripted(tokenizer="pagelet", model="/nowhere")) as pagelet:
        assert pagelet.tokenizer.decode(pagelet.tokenizer.encode("def f(")) == "def f("
    with make_llm(tokenizer="~/mine") as llm:
        assert llm.generate("abc?", LONG, use_tqdm=False)[0].outputs[0].text == "abc"


@pytest.mark.parametrize("tokenizer_class", ["TokenizersBackend", "LlamaTokenizerFast"])
def test_truncation_and_padding_of_the_tokenizer_file_do_nothing(folder, tmp_path, tokenizer_class):
    backend = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": tokenizer_class, "chat_template": TEMPLATE, "model_max_length": 4}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(str(tmp_path))
    for text in ("a", "abcdefgh"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(tokenizer.encode_chat([{"role": "user", "content": text}])) == len(f"u:{text};a:")
        assert len(tokenizer.hf(text, truncation=True, max_length=1).input_ids) == 1
        assert tokenizer.encode(text) == ids
