"""The engine around the device: a runner of scripted tokens stands in for the model."""

import asyncio
import dataclasses
import json
import os
import signal
import threading
import time
import types

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import jax_paged
from jax_paged import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams, engine
from jax_paged.model_runner import StepOutput, TokenLogprobs
from jax_paged.tokenizer import Tokenizer

VOCAB_SIZE, EOS = 300, 2
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of single bytes, and no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<unk>", "<s>", "</s>", *alphabet]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    backend.add_special_tokens(pieces[:3])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("bytes")
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


class ScriptedRunner:
    """Answers "text?" with text, token by token, then with the end token."""

    num_blocks = 40
    sampling_defaults = types.MappingProxyType({})

    def __init__(self, args, loaded=None):
        self.config = types.SimpleNamespace(
            model_name="scripted",
            architecture="None",
            vocab_size=VOCAB_SIZE,
            max_model_len=args.max_model_len or 400,
            dtype="float32",
            backend="none",
            block_size=args.block_size,
            num_blocks=args.num_gpu_blocks_override or self.num_blocks,
            kv_cache_bytes=3 * 2**20,
            weight_bytes=2**31,
            max_num_seqs=args.max_num_seqs or 8,
            max_num_batched_tokens=args.max_num_batched_tokens or 64,
            eos_token_ids=frozenset({EOS}),
            max_logprobs=19,
            sampling_defaults=dict(self.sampling_defaults),
        )
        self.buckets = ("decode 1", "decode 8", "mixed 64x8")
        self.num_steps = 0
        self.num_closed = 0
        self.seeds = {}
        self.during_step = lambda output: None
        self.bad_request = None

    def execute(self, output):
        self.num_steps += 1
        self.during_step(output)
        rows = output.scheduled
        tokens = [self._next(row) if row.samples else None for row in rows]
        self.seeds |= {row.group.request_id: row.group.sampling_params.seed for row in rows}
        entries = [None if t is None else self._entry(t) for t in tokens]
        prompts = [self._prompt(row) for row in rows]
        return StepOutput(
            tokens, entries, prompts, [row.group.request_id != self.bad_request for row in rows]
        )

    def close(self):
        self.num_closed += 1

    def compile_plan(self):
        return "a table"

    @staticmethod
    def _next(row):
        prompt, i = row.seq.prompt_token_ids, len(row.seq.output_token_ids)
        return prompt[i] if i < len(prompt) - 1 else EOS

    @staticmethod
    def _entry(token):
        top = [(token + 1) % VOCAB_SIZE, token]
        return TokenLogprobs(-1.5, 2, top, [-0.5, -1.5])

    def _prompt(self, row):
        if row.group.sampling_params.prompt_logprobs is None:
            return []
        stop = min(row.start + row.num_tokens + 1, len(row.seq.prompt_token_ids))
        return [self._entry(t) for t in row.seq.prompt_token_ids[row.start + 1 : stop]]


@pytest.fixture
def scripted(monkeypatch, folder):
    """Makes EngineArgs of engines that run ScriptedRunner."""
    monkeypatch.setattr(engine, "ModelRunner", ScriptedRunner)
    return lambda **settings: EngineArgs(**{"model": folder, **settings})


@pytest.fixture
def llm(scripted):
    with LLM(**dataclasses.asdict(scripted())) as llm:
        yield llm


def run(engine):
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    return outputs


def no_block_lost(engine):
    manager = engine.scheduler.block_manager
    manager.check_integrity()
    return manager.num_free_blocks == manager.num_usable_blocks


LONG = SamplingParams(max_tokens=None)


@pytest.mark.parametrize(
    ("prompts", "texts"),
    [
        ("abc?", ["abc"]),
        (["abc?", "né?"], ["abc", "né"]),
        ({"prompt": "abc?"}, ["abc"]),
        ({"prompt_token_ids": [68, 69, 70, 5]}, None),
        ([68, 69, 70, 5], None),
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


def test_order_and_parameters_of_each(llm):
    params = [SamplingParams(max_tokens=1 + i % 5) for i in range(20)]
    outs = llm.generate([f"{i:05}?" for i in range(20)], params, use_tqdm=True)
    assert [o.outputs[0].text for o in outs] == [f"{i:05}"[: 1 + i % 5] for i in range(20)]
    with pytest.raises(ValueError, match="sampling_params has 2 entries"):
        llm.generate(["a"], params[:2])


def test_chat(llm):
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    one = llm.chat(messages, LONG, use_tqdm=False)
    two = llm.chat([messages, messages], LONG, use_tqdm=False)
    assert [o.outputs[0].text for o in one + two] == ["u:hi;a"] * 3
    assert llm.get_tokenizer().decode(one[0].prompt_token_ids) == "u:hi;a:"


BAD = [
    ("", {}, "prompt is ''"),
    ([], {}, "prompt_token_ids"),
    ({"prompt_token_ids": "abc"}, {}, "prompt_token_ids is 'abc'"),
    ({"text": "abc"}, {}, "just one of the keys"),
    (7, {}, "prompt is 7"),
    ("\ud800", {}, "Unicode"),
    ([5, -1], {}, r"prompt_token_ids\[1\] is -1"),
    ([5, VOCAB_SIZE], {}, r"prompt_token_ids\[1\] is 300; allowed: an integer in \[0, 299\]"),
    ([5, True], {}, r"prompt_token_ids\[1\] is True"),
    ([5, 2**40], {}, r"prompt_token_ids\[1\] is 1099511627776"),
    ([5, 1.0], {}, r"prompt_token_ids\[1\] is 1.0"),
    ([np.int32(5)], {}, r"prompt_token_ids\[0\]"),
    ([5] * 390, {"max_tokens": 11}, "390 tokens and max_tokens is 11: 401 tokens in all; allowed.*400"),
    ([5] * 400, {"max_tokens": None}, "400 tokens"),
    ("a", {"logprobs": 20}, r"logprobs is 20; allowed: an integer in \[0, 19\]"),
    ("a", {"prompt_logprobs": 20}, "prompt_logprobs is 20"),
    ("a", {"stop_token_ids": [5] * 600, "min_tokens": 1}, "length of stop_token_ids is 600; allowed.*511"),
    ("a", {"stop_token_ids": [300]}, "a token id of stop_token_ids is 300"),
    ("a", {"logit_bias": {300: 1.0}}, "a token id of logit_bias is 300"),
]


@pytest.mark.parametrize(("prompt", "settings", "message"), BAD)
def test_bad_input_names_what_is_wrong_and_disturbs_nobody(scripted, prompt, settings, message):
    with LLMEngine(scripted()) as engine:
        engine.add_request("good", "abc?", LONG)
        engine.step()
        with pytest.raises(ValueError, match=message):
            engine.add_request("bad", prompt, SamplingParams(**settings))
        assert run(engine)["good"].outputs[0].text == "abc"
        assert no_block_lost(engine)


def test_text_of_a_larger_vocabulary_names_prompt_and_tokenizer(llm, monkeypatch):
    highest = max(llm.llm_engine.tokenizer.encode("abc?"))
    monkeypatch.setattr(llm.llm_engine.runner.config, "vocab_size", highest)
    with pytest.raises(ValueError, match=rf"prompt has the token id {highest}; .*\[0, {highest - 1}\]"):
        llm.generate("abc?", use_tqdm=False)
    monkeypatch.setattr(llm.llm_engine.runner.config, "vocab_size", highest + 1)
    assert llm.generate("abc?", LONG, use_tqdm=False)[0].outputs[0].text == "abc"


def test_bad_prompt_in_a_list_runs_nothing(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt is ''"):
        llm.generate(["abc?", ""], use_tqdm=False)
    assert llm.llm_engine.runner.num_steps == 0
    with pytest.raises(ValueError, match="sampling_params is 5"):
        llm.generate("a", 5)
    with pytest.raises(ValueError, match="prompts is None"):
        llm.generate(None)


def test_prompt_that_never_fits_the_pool_names_the_blocks(scripted):
    with LLMEngine(scripted(num_gpu_blocks_override=3, block_size=4)) as engine:
        with pytest.raises(ValueError, match="9 tokens and needs 3 blocks of 4; allowed: the 2 blocks"):
            engine.add_request("big", [5] * 9)
        engine.add_request("fits", [5] * 8, LONG)
        assert run(engine)["fits"].outputs[0].finish_reason == "length"
        assert no_block_lost(engine)


def test_duplicate_request_id(scripted):
    with LLMEngine(scripted()) as engine:
        engine.add_request("a", "abc?")
        with pytest.raises(ValueError, match="request_id is 'a'"):
            engine.add_request("a", "abc?")
        run(engine)
        engine.add_request("a", "abc?")


def test_without_a_tokenizer(scripted):
    with LLMEngine(scripted(skip_tokenizer_init=True)) as engine:
        for prompt, settings in (("text", {}), ([5], {"stop": ["x"]})):
            with pytest.raises(ValueError, match="no tokenizer"):
                engine.add_request("a", prompt, SamplingParams(**settings))
        engine.add_request("a", [68, 69, 5], SamplingParams(logprobs=1))
        (completion,) = run(engine)["a"].outputs
        assert (completion.text, completion.token_ids) == ("", [68, 69, EOS])
        assert completion.logprobs[0][68].decoded_token is None


def test_stop_string_ends_the_sequence_and_keeps_its_tokens(scripted):
    with LLMEngine(scripted()) as engine:
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
    args = scripted(num_gpu_blocks_override=14, block_size=4, max_num_batched_tokens=8)
    with LLMEngine(args) as engine:
        for i in range(3):
            engine.add_request(str(i), [10 + i] * 16, SamplingParams(prompt_logprobs=1, max_tokens=30))
        outs = run(engine)
        assert sum(o.metrics.num_preemptions for o in outs.values()) > 0
        for out in outs.values():
            assert [next(iter(d)) for d in out.prompt_logprobs[1:]] == out.prompt_token_ids[1:]
        assert no_block_lost(engine)


def test_non_finite_logits_end_one_request(scripted):
    with LLMEngine(scripted()) as engine:
        engine.add_request("bad", "abc?", LONG)
        engine.add_request("good", "abc?", LONG)
        engine.step()
        engine.runner.bad_request = "bad"
        outs = run(engine)
        assert outs["good"].outputs[0].text == "abc"
        bad = outs["bad"].outputs[0]
        assert (bad.finish_reason, bad.stop_reason) == ("abort", "non-finite logits")
        assert (bad.text, len(bad.token_ids)) == ("a", 1)
        assert no_block_lost(engine)


def test_abort(scripted):
    with LLMEngine(scripted()) as engine:
        engine.add_request("a", "abcdef?", LONG)
        engine.add_request("b", "abcdef?", LONG)
        engine.step()
        state = engine.abort_request("a")
        assert state.output().outputs[0].finish_reason == "abort"
        assert engine.abort_request("a") is None
        assert list(run(engine)) == ["b"]
        assert no_block_lost(engine)


def test_seeds_come_from_the_engine_and_the_order(scripted):
    def seeds(seed):
        with LLMEngine(scripted(seed=seed)) as engine:
            for i in range(3):
                engine.add_request(str(i), "abc?", SamplingParams(seed=7 if i == 1 else None))
            run(engine)
            return [engine.runner.seeds[str(i)] for i in range(3)]

    one = seeds(1)
    assert one == seeds(1)
    assert one[1] == 7
    assert len({one[0], one[2], *seeds(2)}) == 5


def test_close_is_final_and_may_be_repeated(llm):
    other = LLM(llm.llm_engine.args.model)
    llm.close()
    llm.close()
    assert llm.llm_engine.runner.num_closed == 1
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("abc?")
    assert "closed" in repr(llm)
    assert other.generate("abc?", LONG, use_tqdm=False)[0].outputs[0].text == "abc"
    other.close()


def test_repr(llm):
    for part in (
        "scripted",
        "float32",
        "backend none",
        "40 blocks of 16 tokens, 3 MiB",
        "buckets decode 1 8, mixed 64x8>",
        "2.0 GiB",
    ):
        assert part in repr(llm)
    (out,) = llm.generate("abc?", LONG, use_tqdm=False)
    completion = "CompletionOutput('abc', 4 tokens, finish_reason='stop')"
    assert repr(out) == f"RequestOutput('generate-0', 'abc?', outputs=[{completion}])"


def test_ctrl_c_ends_generate_between_steps_and_leaves_the_engine_usable(llm):
    runner = llm.llm_engine.runner
    finished_steps = []

    def interrupt(output):
        if runner.num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        finished_steps.append(runner.num_steps)

    runner.during_step = interrupt
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abcdefgh?"] * 3, LONG, use_tqdm=False)
    assert finished_steps == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is handler
    assert not llm.llm_engine.has_unfinished_requests()
    assert no_block_lost(llm.llm_engine)
    runner.during_step = lambda output: None
    assert llm.generate("abc?", LONG, use_tqdm=False)[0].outputs[0].text == "abc"


@pytest.mark.parametrize("last_step", [False, True])
def test_ctrl_c_whose_handler_returns_ends_generate(llm, monkeypatch, last_step):
    presses = []
    previous = signal.signal(signal.SIGINT, lambda *_: presses.append(1))
    try:
        step = 4 if last_step else 2

        def press(output):
            if llm.llm_engine.runner.num_steps == step:
                os.kill(os.getpid(), signal.SIGINT)

        llm.llm_engine.runner.during_step = press
        if last_step:
            assert llm.generate("abc?", LONG, use_tqdm=False)[0].outputs[0].text == "abc"
        else:
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["abc?"] * 2, LONG, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert presses == [1]
    assert no_block_lost(llm.llm_engine)


def test_ctrl_c_in_a_step_comes_after_the_step(scripted):
    with LLMEngine(scripted()) as engine:
        engine.add_request("a", "abc?", LONG)
        engine.runner.during_step = lambda output: os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.runner.during_step = lambda output: None
        assert run(engine)["a"].outputs[0].text == "abc"


def test_generate_beside_a_request_that_was_added_by_hand(llm):
    llm.llm_engine.add_request("by hand", "abc?", SamplingParams(max_tokens=1))
    outputs = llm.generate(["abc?"] * 2, SamplingParams(max_tokens=4), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]


def test_an_error_of_the_runner_ends_the_requests_of_generate(llm):
    def fail(output):
        raise RuntimeError("device lost")

    llm.llm_engine.runner.during_step = fail
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(["abc?"] * 3, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_engine_that_has_failed_says_so_until_it_is_closed(scripted):
    def fail(output):
        raise OSError("device lost")

    with LLMEngine(scripted()) as engine:
        engine.add_request("a", "abc?", LONG)
        engine.runner.during_step = fail
        with pytest.raises(OSError, match="device lost"):
            engine.step()
        engine.runner.during_step = lambda output: None
        for use in (
            engine.step,
            lambda: engine.add_request("b", "abc?"),
            lambda: engine.check_request("abc?"),
        ):
            with pytest.raises(
                RuntimeError, match=r"has failed: OSError\('device lost'\); make a new"
            ) as error:
                use()
            assert isinstance(error.value.__cause__, OSError)
        assert engine.runner.num_steps == 1
        assert "failed: OSError('device lost')" in repr(engine)
        assert engine.compile_plan() == "a table"
        assert engine.abort_request("a").finish_reason == "abort"
        assert no_block_lost(engine)
    assert "closed" in repr(engine)


def test_compile_plan(llm):
    assert llm.compile_plan() == llm.llm_engine.compile_plan() == "a table"
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.compile_plan()


def test_bad_generation_config_is_found_at_the_start(scripted, monkeypatch):
    monkeypatch.setattr(ScriptedRunner, "sampling_defaults", {"top_k": 7, "temperature": 0.5})
    with LLMEngine(scripted()) as engine:
        params = engine.check_request("abc?").params
        assert (params.top_k, params.temperature) == (7, 0.5)
    closed = []
    monkeypatch.setattr(ScriptedRunner, "close", lambda _: closed.append(True))
    for bad, message in (({"top_p": 7}, "top_p is 7"), ({"temperature": "hot"}, "temperature is 'hot'")):
        monkeypatch.setattr(ScriptedRunner, "sampling_defaults", bad)
        with pytest.raises(ValueError, match=f"generation_config.json.*{message}"):
            LLMEngine(scripted())
    assert len(closed) == 2


def test_a_user_who_changes_an_output_does_not_change_the_request(scripted):
    with LLMEngine(scripted()) as engine:
        prompt = [68, 69, 70, 5]
        engine.add_request("a", prompt, LONG)
        while engine.has_unfinished_requests():
            (output,) = engine.step()
            output.prompt_token_ids.extend([9] * 50)
            output.outputs[0].token_ids.clear()
        assert engine.runner.num_steps == 4
        assert prompt == [68, 69, 70, 5]
        assert no_block_lost(engine)


def test_tokenizer_of_its_own(scripted, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").symlink_to(folder)
    for name, expected in (("~/mine", str(tmp_path / "mine")), ("someone/else", "someone/else")):
        assert engine._tokenizer_name(scripted(tokenizer=name)) == expected
    with LLMEngine(scripted(tokenizer="pagelet", model="/nowhere")) as pagelet:
        assert pagelet.tokenizer.decode(pagelet.tokenizer.encode("def f(")) == "def f("
    with LLM(folder, tokenizer="~/mine") as llm:
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


@pytest.mark.parametrize("num_requests", [64])
def test_host_time_of_the_front_is_small(scripted, num_requests):
    args = scripted(max_num_seqs=64, max_num_batched_tokens=2048, num_gpu_blocks_override=4000)
    params = SamplingParams(max_tokens=100, stop=["@@@@"])
    with LLMEngine(dataclasses.replace(args, max_model_len=400)) as engine:
        for i in range(num_requests):
            engine.add_request(str(i), "the quick brown fox jumps over it " * 4, params)
        engine.runner.during_step = lambda output: None
        times = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.advance()
            times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 0.010  # about 1 ms on a quiet machine, with stub and scheduler


def test_async_streams_equal_the_whole(scripted):
    async def main():
        engine = AsyncLLMEngine(scripted())
        engine.engine.runner.during_step = lambda output: time.sleep(0.002)
        try:
            stream = await engine.submit("hello wörld?", SamplingParams(max_tokens=None, logprobs=0), "a")
            parts = [part async for part in stream]
            whole = [o async for o in engine.generate("hello wörld?", LONG, "b")]
        finally:
            engine.close()
        assert "".join(p.outputs[0].text for p in parts) == whole[-1].outputs[0].text == "hello wörld"
        tokens = [t for p in parts for t in p.outputs[0].token_ids]
        assert tokens == whole[-1].outputs[0].token_ids
        assert sum(len(p.outputs[0].logprobs) for p in parts) == len(tokens)
        assert [p.finished for p in parts] == [False] * (len(parts) - 1) + [True]
        texts = [o.outputs[0].text for o in whole]
        assert texts == sorted(texts, key=len)
        assert len(set(texts)) > 3  # an earlier output does not grow

    asyncio.run(main())


def test_async_slow_consumer_gets_joined_parts(scripted):
    async def main():
        engine = AsyncLLMEngine(scripted())
        stream = await engine.submit("abcdefghij?", LONG, "a")
        while engine.engine.has_unfinished_requests() or engine.engine.runner.num_steps < 11:
            await asyncio.sleep(0.01)
        parts = [part async for part in stream]
        engine.close()
        assert len(parts) < 11
        assert "".join(p.outputs[0].text for p in parts) == "abcdefghij"

    asyncio.run(main())


def test_async_leaving_early_and_cancelling_abort(scripted):
    async def main():
        engine = AsyncLLMEngine(scripted())
        gate = threading.Event()
        engine.engine.runner.during_step = lambda output: gate.wait(0.005)

        async def consume(request_id):
            async for _ in engine.generate("abcdefghij?" * 20, LONG, request_id):
                pass

        task = asyncio.create_task(consume("cancelled"))
        async for _ in (left := engine.generate("abcdefghij?" * 20, LONG, "left")):
            break
        await left.aclose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        start = time.monotonic()
        while engine.engine.has_unfinished_requests() and time.monotonic() < start + 5:
            await asyncio.sleep(0.01)
        assert engine.engine.runner.num_steps < 200
        assert no_block_lost(engine.engine)
        engine.close()

    asyncio.run(main())


def test_async_errors_reach_everyone(scripted):
    async def main():
        engine = AsyncLLMEngine(scripted())
        with pytest.raises(ValueError, match="prompt is ''"):
            await engine.submit("", None, "empty")
        gate = threading.Event()
        engine.engine.runner.during_step = lambda output: gate.wait()
        first = await engine.submit("abc?", None, "a")
        same_id = await engine.submit("abc?", None, "a")
        gate.set()
        with pytest.raises(ValueError, match="request_id is 'a'"):
            await anext(same_id)
        assert [p async for p in first][-1].finished

        gate.clear()

        def fail(output):
            gate.wait()
            raise RuntimeError("device lost")

        engine.engine.runner.during_step = fail
        streams = [await engine.submit("abc?", None, str(i)) for i in range(3)]
        gate.set()
        for stream in streams:
            with pytest.raises(RuntimeError, match="the engine has stopped: device lost"):
                await anext(stream)
        with pytest.raises(RuntimeError, match="device lost"):
            await engine.submit("abc?", None, "late")
        engine.close()

    asyncio.run(main())


def test_async_abort_and_close(scripted):
    async def main():
        engine = AsyncLLMEngine(scripted())
        engine.engine.runner.during_step = lambda output: time.sleep(0.005)
        stream = await engine.submit("abcdefghij?" * 20, LONG, "a")
        await anext(stream)
        engine.abort("a")
        parts = [p async for p in stream]
        assert parts[-1].outputs[0].finish_reason == "abort"
        stream = await engine.submit("abcdefghij?" * 20, LONG, "b")
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(RuntimeError, match="closed"):
            [p async for p in stream]
        with pytest.raises(RuntimeError, match="closed"):
            await engine.submit("abc?", None, "c")

    asyncio.run(main())


def test_idle_engine_sleeps(scripted):
    engine = AsyncLLMEngine(scripted())
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.1
    engine.close()


def test_package_is_lazy():
    assert set(jax_paged.__all__) <= set(dir(jax_paged))
    for name in jax_paged.__all__:
        assert getattr(jax_paged, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_here"):
        jax_paged.nothing_here  # noqa: B018
