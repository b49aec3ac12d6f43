"""Streams that are written by calls: a client that stops reading gets all of it later, joined."""

import asyncio
import json
import threading
import time

from jax_paged.engine.async_engine.request_stream import RequestStream
from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.http_protocol import BODY_WRITER

BODY = {"prompt": "def f(", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


class Writer:
    """A client that stops reading after some parts, until it is told to go on."""

    def __init__(self, num_parts):
        self.on_resume = None
        self.parts = []
        self._num_parts = num_parts

    @property
    def is_paused(self):
        return len(self.parts) == self._num_parts

    def write(self, part):
        assert not self.is_paused
        self.parts.append(part)

    def resume(self):
        self._num_parts = None
        self.on_resume()


async def stream(app, writer, first_sent=None, may_resume=lambda: True, **changes):
    """Returns what is sent and written, joined.

    Args:
        app: The ASGI app.
        writer: The Writer of the response.
        first_sent: threading.Event that is set when the first part is sent.
        may_resume: A paused writer resumes half a second after this has become true.
        changes: Fields of the body.
    """
    sent = []
    body = json.dumps({**BODY, **changes, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    def resume():
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, writer.resume) if may_resume() else loop.call_later(0.1, resume)

    async def send(message):
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            if first_sent is not None:
                first_sent.set()
            if len(sent) == 1 and writer.is_paused:
                asyncio.get_running_loop().call_soon(resume)

    headers = [(b"host", b"h"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": headers,
        "query_string": b"",
    }
    await app({**scope, "extensions": {BODY_WRITER: writer}}, receive, send)
    return b"".join([sent[0], *writer.parts, *sent[1:]])


def test_a_client_that_stops_reading_gets_the_rest_at_once(served, steps):
    app = OpenAIServer(served.server.engine, "m").app()
    expected = served.complete(**BODY)["choices"][0]["text"]
    for num_parts in (None, 0):  # it never stops, or before the second part
        writer, first_sent = Writer(num_parts), threading.Event()
        steps.delay_s, steps.num_samples = 0.05 if num_parts is None else 0.0, 0
        steps.before = lambda sent=first_sent: steps.num_samples == 0 or sent.wait(30)
        answer = stream(app, writer, first_sent, lambda: not served.engine.has_unfinished_requests())
        events = asyncio.run(answer).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        choices = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
        assert "".join(choice["text"] for choice in choices) == expected
        assert [choice["finish_reason"] for choice in choices][-1] == "length"
        assert len(writer.parts) == 1 if num_parts == 0 else writer.parts


def test_a_client_that_reads_again_is_told_that_the_engine_has_failed(scripted_server, scripted_steps):
    def fail():
        if scripted_steps.num_samples == 3:
            raise RuntimeError("planted")

    scripted_steps.before, scripted_steps.delay_s = fail, 0.02  # longer than parts are held back
    app = OpenAIServer(scripted_server.server.engine, "m").app()
    told = asyncio.run(asyncio.wait_for(stream(app, Writer(0), prompt="abcdef?"), 10)).decode()
    # A part and the error came while it did not read: it gets both.
    *parts, error = [json.loads(event[6:]) for event in told.split("\n\n")[:-1]]
    assert "".join(part["choices"][0]["text"] for part in parts) == "abc"
    assert "planted" in error["error"]["message"]


def test_the_end_does_not_overtake_a_last_part_that_came_early(served, steps, monkeypatch):
    body = {**BODY, "max_tokens": 2}
    expected = served.complete(**body)["choices"][0]["text"]
    take, taken, steps.num_samples = RequestStream.take, threading.Event(), 0
    steps.before = lambda: steps.num_samples == 0 or taken.wait(30)

    def take_while_the_rest_comes(stream):
        if not (part := take(stream)).finished:  # the event loop stands still until the engine has the rest
            taken.set()
            served.wait_until(lambda: not served.engine.has_unfinished_requests(), "the request has ended")
            time.sleep(0.3)
        return part

    monkeypatch.setattr(RequestStream, "take", take_while_the_rest_comes)
    chunks = served.stream("/completions", **body)
    assert len(chunks) == 2
    assert taken.is_set()
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert served.complete(**body)["choices"][0]["text"] == expected, "the connection goes on"
