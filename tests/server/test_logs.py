"""What the server logs: a line per request, statistics while it is busy, start-up; as text and as JSON."""

import asyncio
import contextlib
import io
import json
import logging
import re
import subprocess
import sys

import pytest

from jax_paged import AsyncLLMEngine
from jax_paged.engine.errors import EngineDeadError
from jax_paged.server.observability.logs import configure, log_statistics, printable


@pytest.fixture
def kept_loggers():
    loggers = [logging.getLogger(name) for name in ("jax_paged", "uvicorn")]
    kept = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def lines(kept_loggers):
    """Returns a function that returns what was logged so far, as objects."""
    stream = io.StringIO()
    configure("debug", "json", stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def access(lines, served, num=1):
    """Returns the lines of the requests that were answered, when there are so many."""

    def found():
        return [line for line in lines() if line["logger"] == "jax_paged.server.observability.access"]

    served.wait_until(lambda: len(found()) >= num, f"{num} requests are logged")
    return found()


def test_a_request_is_one_line_that_says_what_it_cost(served, lines):
    usage = served.complete(max_tokens=5, ignore_eos=True, prompt=["def f(", "def g("])["usage"]
    (line,) = access(lines, served)
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert (line["requests"], line["finish_reason"], line["level"]) == (2, "length", "info")
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["output_tokens"] == usage["completion_tokens"] == 10
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["total_s"]
    assert line["request_id"] in line["message"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


def test_a_stream_is_logged_when_it_has_ended(served, lines):
    chunks = served.stream("/chat/completions", messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
    (line,) = access(lines, served)
    assert (line["status"], line["finish_reason"]) == (200, chunks[-1]["choices"][0]["finish_reason"])
    assert line["output_tokens"] > 0


def test_a_client_that_leaves_is_logged_as_aborted_with_what_was_computed(served, lines, steps):
    steps.delay_s = 0.02
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with served.client.stream("POST", "/completions", json=body) as answer:
        next(answer.iter_lines())
    (line,) = access(lines, served)
    assert (line["status"], line["finish_reason"]) == (200, "abort")
    assert 0 < line["output_tokens"] < 400
    served.wait_until_idle()


def test_a_refused_request_is_logged_and_cannot_forge_lines(served, lines):
    served.client.get("/a%0AINFO%20forged%1B[31m")
    (line,) = access(lines, served)
    assert line["status"] == 404
    assert line["path"] == "/v1/a?INFO forged?[31m"
    assert "finish_reason" not in line


def test_polled_routes_are_logged_at_debug(served, lines):
    served.client.get("../metrics")
    (line,) = access(lines, served)
    assert (line["path"], line["level"]) == ("/metrics", "debug")


def test_an_engine_that_fails_ends_the_line_too(scripted_server, scripted_steps, lines):
    def fail():
        raise RuntimeError("a step fails")

    scripted_steps.before = fail
    assert scripted_server.client.post("/completions", json={"prompt": "abc?"}).status_code == 503
    (line,) = access(lines, scripted_server)
    assert (line["status"], line["requests"], line["finish_reason"]) == (503, 1, "error")
    assert (line["prompt_tokens"], line["output_tokens"]) == (4, 0)
    assert scripted_server.metrics()['request_success_total{finished_reason="error"}'] == 1
    (failed,) = [line for line in lines() if "traceback" in line]
    assert "a step fails" in failed["traceback"]


def test_a_stream_that_the_engines_end_cuts_off_is_an_error_with_what_was_sent(
    scripted_server, scripted_steps, lines
):
    scripted_steps.delay_s = 0.02

    def stop():
        scripted_server.server.engine.fail(EngineDeadError("it ends"))

    prompts = ["abcdefghijklmnopqrstuvwxyz?", "abcdefghijklmnopqrstuvwxyz?"]
    *chunks, error = scripted_server.stream("/completions", prompt=prompts, on_first_event=stop)
    assert error["error"]["message"] == "it ends"
    num_sent = sum(len(chunk["choices"][0]["text"]) for chunk in chunks)
    (line,) = access(lines, scripted_server)
    assert (line["status"], line["requests"], line["finish_reason"]) == (200, 2, "error")
    assert line["prompt_tokens"] == 2 * len(prompts[0])
    assert num_sent <= line["output_tokens"] < 2 * 26  # a prompt's last tokens may have come after the error
    assert line["output_tokens"] > 0
    now = scripted_server.metrics()
    assert now['request_success_total{finished_reason="error"}'] == 2
    assert now["request_prompt_tokens_sum"] == line["prompt_tokens"]
    assert now["request_generation_tokens_sum"] == line["output_tokens"]
    assert now["e2e_request_latency_seconds_count"] == 2


def test_text_is_one_line_per_record_but_for_tracebacks(kept_loggers):
    stream = io.StringIO()
    configure("info", "text", stream)
    logger = logging.getLogger("jax_paged.test")
    logger.debug("not written")
    logger.info("a\x1b[31m\u2028", extra={"fields": {"x": 1}})
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed")
    first, second, *trace = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO a\?\[31m\?", first)
    assert second.endswith("ERROR failed")
    assert trace[0].startswith("Traceback")
    assert trace[-1] == "ValueError: why"


def test_texts_of_clients_become_one_short_line():
    assert printable("a\r\n\tb\u2028\x00é" + "x" * 300) == "a???b??é" + "x" * 192


def test_statistics_are_logged_only_while_something_happens(scripted, lines):
    engine = AsyncLLMEngine(*scripted())

    def statistics():
        return [line for line in lines() if line["logger"] == "jax_paged.server.observability.logs"]

    async def main():
        logging_task = asyncio.create_task(log_statistics(engine, lambda: 0, 0.05))
        await asyncio.sleep(0.12)
        idle = len(statistics())
        stream = await engine.submit("abcdefghijkl?", None, "a", final_only=True)
        async for _ in stream:
            pass
        await asyncio.sleep(0.2)
        logging_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await logging_task
        return idle

    assert asyncio.run(main()) == 0
    engine.close()
    written = statistics()
    assert 1 <= len(written) <= 2
    assert written[-1]["generated_tokens_total"] == 13
    assert sum(line["generated_tokens_per_s"] for line in written) > 0
    assert "tokens/s" in written[0]["message"]


def test_importing_and_using_the_package_sets_no_logger_up():
    code = (
        "import logging, jax_paged.server.launch.server\n"
        "names = [name for name in logging.root.manager.loggerDict if name.startswith('jax_paged')]\n"
        "assert names, 'there are loggers'\n"
        "loggers = [logging.getLogger(name) for name in names]\n"
        "assert not any(logger.handlers or logger.level for logger in loggers)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
