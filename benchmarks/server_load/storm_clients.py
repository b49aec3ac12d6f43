"""Clients that repeat a request, in a separate process so that they do not delay the client that measures."""

import asyncio
import collections
import json
import sys
import time

from server_load.client import Client


async def main(port: int, path: str, num_clients: int, seconds: float, body: bytes) -> None:
    """Sends requests for `seconds` seconds, waits for the last responses, and prints the result as JSON.

    The result is a pair: the number of requests by status (0 without a response; see Answer), and the time
    until the last response (seconds).

    Args:
        port: Port of the server.
        path: Path of the route.
        num_clients: Number of clients, each of which sends one request at a time.
        seconds: Time in which requests are sent.
        body: Body of the POST request.
    """
    client = Client(port)
    statuses = collections.Counter[int]()
    start = time.monotonic()

    async def repeat() -> None:
        while time.monotonic() < start + seconds:
            statuses[(await client.ask(path, body)).status] += 1

    await asyncio.gather(*(repeat() for _ in range(num_clients)))
    print(json.dumps((statuses, time.monotonic() - start)))


if __name__ == "__main__":
    _, port, path, num_clients, seconds = sys.argv
    asyncio.run(main(int(port), path, int(num_clients), float(seconds), sys.stdin.buffer.read()))
