"""Clients that send a request again and again, in a process that disturbs no others' clocks."""

import asyncio
import collections
import json
import sys
import time

from server_load.client import Client


async def main(port: int, path: str, num_clients: int, seconds: float, body: bytes) -> None:
    """Sends, and prints how many answers there were of each status."""
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
