"""The page at /: one HTML file of the package, and the state that it shows."""

import base64
import hashlib
import re
from importlib import resources

from fastapi.responses import Response

from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.server.observability.metrics import Metrics
from jax_paged.server.observability.state import State
from jax_paged.server.protocol.responses import json_response


class StatusPageRoutes:
    """Serves the page, which holds nothing secret, and its state.

    Args:
        engine: Only read.
        metrics: Has the latencies of the last requests.
        model_name: The model's name for clients.
    """

    def __init__(self, engine: ServingEngine, metrics: Metrics, model_name: str) -> None:
        self._state = State(engine, metrics, model_name)
        text = resources.files("jax_paged.server.routes").joinpath("page.html").read_text(encoding="utf-8")
        self._body = text.encode()
        self._headers = {
            "Content-Security-Policy": content_security_policy(text),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    async def page(self) -> Response:
        """GET /: the page."""
        return Response(self._body, media_type="text/html; charset=utf-8", headers=self._headers)

    async def state(self) -> Response:
        """GET /ui/state: what the engine does now; the page asks once a second."""
        response = json_response(self._state.snapshot())
        response.headers["Cache-Control"] = "no-store"
        return response


def content_security_policy(page: str) -> str:
    """Returns what a page may do: run its own script and style, and talk to its own server.

    Args:
        page: HTML, with one script and one style.
    """
    hashes = []
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes.append(base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode())
    script, style = hashes
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
