"""The status page at / and the state that it shows."""

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
    """Handlers of the status page and its state. The page itself contains nothing secret.

    Args:
        engine: The engine. It is only read.
        metrics: Metrics of the server, for the latencies of recent requests.
        model_name: Name of the model in the API.
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
        """GET /: Returns the status page."""
        return Response(self._body, media_type="text/html; charset=utf-8", headers=self._headers)

    async def state(self) -> Response:
        """GET /ui/state: Returns the current state of the engine. The page requests it once per second."""
        response = json_response(self._state.snapshot())
        response.headers["Cache-Control"] = "no-store"
        return response


def content_security_policy(page: str) -> str:
    """Returns a Content-Security-Policy that allows only the page's own script, style and server.

    Args:
        page: HTML with exactly one script and one style element.
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
