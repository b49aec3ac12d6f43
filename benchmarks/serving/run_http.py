"""A server of the OpenAI API and its clients, as a process that answers scenarios."""

import http.client
import itertools
import json
import socket
import subprocess
import threading
import time

from serving import runner
from serving.runner import Answer, Settings
from serving.workloads import Request

NAME = "benchmark"
STARTUP_S = 900


class Server:
    """A server process, and one client thread with its own connection for every request.

    settings.arguments: "command", which starts the server, but for its port.
    """

    def __init__(self, settings: Settings) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [*settings.arguments["command"], "--port", str(self._port)]
        self._process = subprocess.Popen(command)  # ends with this process's group
        self._runs = itertools.count()
        deadline = time.monotonic() + STARTUP_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server came up: {command}")
            time.sleep(0.5)

    def __call__(self, requests: list[Request], prefix_caching: bool) -> list[Answer]:
        """Streams all requests at once, each from its arrival on."""
        salt = str(next(self._runs))
        answers = [Answer("", 0, []) for _ in requests]
        start = time.perf_counter()

        def ask(i: int) -> None:
            time.sleep(max(0.0, requests[i].arrival_s - (time.perf_counter() - start)))
            self._stream(requests[i], salt, answers[i], start)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def _stream(self, request: Request, salt: str, answer: Answer, start: float) -> None:
        body = {
            "model": NAME,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {response.read()[:500]!r}")
        pieces = []
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"]:
                answer.times.append(time.perf_counter() - start)
                pieces.append(event["choices"][0]["text"])
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
        connection.close()
        answer.output = "".join(pieces)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


if __name__ == "__main__":
    runner.main(Server, "")
