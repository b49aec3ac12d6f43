"""Clients that repeat a request, in a separate process so that they do not delay the client that measures."""

import asyncio
import collections
import json
import sys
import time

from server_load.client import Client


async def main(port: int, path: str, num_clients: int, seconds: float, body: bytes) -> None:
    """Sends requests for `seconds` seconds and prints the number of responses by status as JSON.

    Args:
        port: Port of the server.
        path: Path of the route.
        num_clients: Number of clients, each of which sends one request at a time.
        seconds: Duration.
        body: Body of the POST request.
    """
    server = Client(port)
    statuses = collections.Counter[int]()
    end = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            statuses[(await server.ask(path, body)).status] += 1

    await asyncio.gather(*(client() for _ in range(num_clients)))
    print(json.dumps(statuses))


if __name__ == "__main__":
    _, port, path, num_clients, seconds = sys.argv
    asyncio.run(main(int(port), path, int(num_clients), float(seconds), sys.stdin.buffer.read()))
