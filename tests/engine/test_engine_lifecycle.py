"""An engine from start to close: aborts, Ctrl-C, failures, what it costs; a scripted executor."""

import dataclasses
import os
import signal
import time
from importlib import import_module

import pytest
from helpers.scripted_engine import LONG, ScriptedExecutor, no_block_lost, run

import jax_paged
from jax_paged import _MODULES, LLMEngine, SamplingParams
from jax_paged.core.stop_conditions import POOL_TOO_SMALL
from jax_paged.lab.recording import replay


def test_abort(scripted):
    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "abcdef?", LONG)
        engine.add_request("b", "abcdef?", LONG)
        engine.step()
        state = engine.abort_request("a")
        assert state.output().outputs[0].finish_reason == "abort"
        metrics = state.output().metrics
        assert metrics.arrival_time <= metrics.finished_time <= time.monotonic()
        assert engine.abort_request("a") is None
        assert list(run(engine)) == ["b"]
        assert no_block_lost(engine)


def test_non_finite_logits_end_one_request(scripted):
    with LLMEngine(*scripted()) as engine:
        engine.add_request("bad", "abc?", LONG)
        engine.add_request("good", "abc?", LONG)
        engine.step()
        engine.executor.bad_request = "bad"
        outs = run(engine)
        assert outs["good"].outputs[0].text == "abc"
        bad = outs["bad"].outputs[0]
        assert (bad.finish_reason, bad.stop_reason) == ("abort", "non-finite logits")
        assert (bad.text, len(bad.token_ids)) == ("a", 1)
        assert no_block_lost(engine)


def test_seeds_come_from_the_engine_and_the_order(scripted):
    def seeds(seed):
        with LLMEngine(*scripted(seed=seed)) as engine:
            for i in range(3):
                engine.add_request(str(i), "abc?", SamplingParams(seed=7 if i == 1 else None))
            run(engine)
            return [engine.executor.seeds[str(i)] for i in range(3)]

    one = seeds(1)
    assert one == seeds(1)
    assert one[1] == 7
    assert len({one[0], one[2], *seeds(2)}) == 5


def test_close_is_final_and_may_be_repeated(llm, make_llm):
    other = make_llm()
    llm.close()
    llm.close()
    assert llm.llm_engine.executor.num_closed == 1
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
    executor = llm.llm_engine.executor
    finished_steps = []

    def interrupt(output):
        if executor.num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        finished_steps.append(executor.num_steps)

    executor.during_step = interrupt
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abcdefgh?"] * 3, LONG, use_tqdm=False)
    assert finished_steps == [1, 2, 3]
    assert signal.getsignal(signal.SIGINT) is handler
    assert not llm.llm_engine.has_unfinished_requests()
    assert no_block_lost(llm.llm_engine)
    executor.during_step = lambda output: None
    assert llm.generate("abc?", LONG, use_tqdm=False)[0].outputs[0].text == "abc"


@pytest.mark.parametrize("last_step", [False, True])
def test_ctrl_c_whose_handler_returns_ends_generate(llm, monkeypatch, last_step):
    presses = []
    previous = signal.signal(signal.SIGINT, lambda *_: presses.append(1))
    try:
        step = 4 if last_step else 2

        def press(output):
            if llm.llm_engine.executor.num_steps == step:
                os.kill(os.getpid(), signal.SIGINT)

        llm.llm_engine.executor.during_step = press
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
    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "abc?", LONG)
        engine.executor.during_step = lambda output: os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.executor.during_step = lambda output: None
        assert run(engine)["a"].outputs[0].text == "abc"


def test_generate_beside_a_request_that_was_added_by_hand(llm):
    llm.llm_engine.add_request("by hand", "abc?", SamplingParams(max_tokens=1))
    outputs = llm.generate(["abc?"] * 2, SamplingParams(max_tokens=4), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]


def test_an_error_of_the_executor_ends_the_requests_of_generate(llm):
    def fail(output):
        raise RuntimeError("device lost")

    llm.llm_engine.executor.during_step = fail
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(["abc?"] * 3, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_engine_that_has_failed_says_so_until_it_is_closed(scripted):
    def fail(output):
        raise OSError("device lost")

    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "abc?", LONG)
        engine.executor.during_step = fail
        with pytest.raises(OSError, match="device lost"):
            engine.step()
        engine.executor.during_step = lambda output: None
        for use in (
            engine.step,
            lambda: engine.add_request("b", "abc?"),
            lambda: engine.check_request("abc?"),
        ):
            with pytest.raises(
                RuntimeError, match=r"has failed: OSError\('device lost'\); create a new"
            ) as error:
                use()
            assert isinstance(error.value.__cause__, OSError)
        assert engine.executor.num_steps == 1
        assert "failed: OSError('device lost')" in repr(engine)
        assert engine.compile_plan() == "a table"
        assert engine.abort_request("a").output().outputs[0].finish_reason == "abort"
        # The step that failed may still write to its blocks: they are held back for good.
        engine.scheduler.block_manager.check_integrity()
        pool = engine.scheduler.block_manager.pool
        assert pool.num_free + pool.num_held == pool.num_usable
    assert "closed" in repr(engine)


def _schedule(engine, patch, fail):
    patch.setattr(engine.scheduler, "schedule", fail)


def _take_in(engine, patch, fail):
    patch.setattr(engine.scheduler, "update", fail)


def _decode(engine, patch, fail):
    patch.setattr(engine.tokenizer, "decode", fail)


def _end_at_stop_string(engine, patch, fail):
    patch.setattr(engine.scheduler, "finish", fail)


@pytest.mark.parametrize("part", [_schedule, _take_in, _decode, _end_at_stop_string])
@pytest.mark.parametrize("error", [AssertionError, SystemExit])
def test_an_error_anywhere_in_a_step_ends_the_engine(scripted, monkeypatch, part, error):
    """It would go on with sequences that have a token more than their requests know of, or worse."""

    def fail(*args, **kwargs):
        raise error("half-way")

    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "abc?", SamplingParams(stop="a"))
        with monkeypatch.context() as patch:
            part(engine, patch, fail)
            with pytest.raises(error, match="half-way"):
                engine.step()
        with pytest.raises(RuntimeError, match=r"has failed: .*half-way"):
            engine.step()
        with pytest.raises(RuntimeError, match=r"has failed: .*half-way"):
            engine.add_request("b", "abc?")
        assert "failed" in repr(engine)


def test_a_request_that_never_ran_ends_in_error(llm):
    """Prefixes that are pinned leave it no room."""
    engine = llm.llm_engine
    texts = [letter * 112 for letter in "abcde"]
    names = [llm.pin_prefix(text) for text in texts]
    params = SamplingParams(max_tokens=4)
    none, some = llm.generate(["x" * 64 + "?", "y?"], params, use_tqdm=False)
    (completion,) = none.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("error", POOL_TOO_SMALL)
    assert (completion.text, completion.token_ids, none.finished) == ("", [], True)
    assert some.outputs[0].text == "y"
    for name in names:
        llm.unpin_prefix(name)
    assert no_block_lost(engine)


def test_a_recording_starts_with_empty_seats(scripted):
    """The executor names sequences by ids, and those of the new scheduler start over."""
    lines = []
    with LLMEngine(*scripted()) as engine:
        engine.add_request("before", "abc?", LONG)
        assert run(engine)["before"].outputs[0].text == "abc"
        engine.record(lines.append)
        engine.add_request("after", "abc?", LONG)
        assert run(engine)["after"].outputs[0].text == "abc"
    assert replay(lines).num_steps > 0


def test_compile_plan(llm):
    assert llm.compile_plan() == llm.llm_engine.compile_plan() == "a table"
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.compile_plan()


def test_bad_generation_config_is_found_at_the_start(scripted):
    args, _ = scripted()
    with LLMEngine(args, ScriptedExecutor(args, {"top_k": 7, "temperature": 0.5})) as engine:
        params = engine.check_request("abc?").params
        assert (params.top_k, params.temperature) == (7, 0.5)
    for bad, message in (
        ({"top_p": 7}, "`top_p` must be .*got 7"),
        ({"temperature": "hot"}, "`temperature` must be .*got 'hot'"),
    ):
        executor = ScriptedExecutor(args, bad)
        with pytest.raises(ValueError, match=f"generation_config.json.*{message}"):
            LLMEngine(args, executor)
        assert executor.num_closed == 1


@pytest.mark.parametrize("bad", [{"max_num_seqs": 0}, {"num_blocks": 0}])
def test_an_engine_that_cannot_be_made_closes_its_executor(scripted, bad):
    args, executor = scripted()
    executor.config = dataclasses.replace(executor.config, **bad)
    with pytest.raises(ValueError, match=next(iter(bad))):
        LLMEngine(args, executor)
    assert executor.num_closed == 1


def test_an_engine_without_its_tokenizer_closes_its_executor(scripted):
    args, executor = scripted()
    with pytest.raises(ValueError, match="nowhere"):
        LLMEngine(dataclasses.replace(args, tokenizer="/nowhere/at/all"), executor)
    assert executor.num_closed == 1


def test_requests_can_be_aborted_after_any_failure(scripted, monkeypatch):
    """Also if what has failed is what an abort would do again."""

    def fail(*args, **kwargs):
        raise OSError("half-way")

    for owner, name in (("tokenizer", "decode"), ("scheduler", "abort")):
        with LLMEngine(*scripted()) as engine:
            engine.add_request("a", "abc🙂?", SamplingParams(stop=["b!"], max_tokens=None))
            engine.add_request("b", "abc?", LONG)
            engine.step()
            engine.step()
            monkeypatch.setattr(getattr(engine, owner), name, fail)
            engine.executor.during_step = fail
            with pytest.raises(OSError, match="half-way"):
                engine.step()
            output = engine.abort_request("a").output()
            assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
            assert output.outputs[0].text == "a"
            engine.abort_request(["a", "b"])
            assert not engine._core.requests


def test_an_abort_that_fails_ends_the_engine(scripted, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("half-way")

    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "abc?", LONG)
        engine.step()
        monkeypatch.setattr(engine.tokenizer, "decode", fail)
        with pytest.raises(OSError, match="half-way"):
            engine.abort_request("a")
        assert engine.abort_request("a") is None
        with pytest.raises(RuntimeError, match=r"has failed: .*half-way"):
            engine.add_request("b", "abc?")


@pytest.mark.parametrize("num_requests", [64])
def test_host_time_of_the_front_is_small(scripted, num_requests):
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 4000}
    params = SamplingParams(max_tokens=100, stop=["@@@@"])
    with LLMEngine(*scripted(max_model_len=400, **settings)) as engine:
        for i in range(num_requests):
            engine.add_request(str(i), "the quick brown fox jumps over it " * 4, params)
        engine.executor.during_step = lambda output: None
        times = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.advance()
            times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 0.010  # about 1 ms on a quiet machine, with stub and scheduler


def test_package_is_lazy():
    assert set(jax_paged.__all__) <= set(dir(jax_paged))
    for name in jax_paged.__all__:
        assert getattr(jax_paged, name) is getattr(import_module(f"jax_paged.{_MODULES[name]}"), name)
    with pytest.raises(AttributeError, match="nothing_here"):
        jax_paged.nothing_here  # noqa: B018
