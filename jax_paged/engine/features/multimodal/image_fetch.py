"""Images at URLs, from hosts that whoever runs the engine has allowed, and from no other."""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from jax_paged.errors import ArgumentError, check

MAX_BYTES = 2**25
TIMEOUT_S = 10.0
_PART_BYTES = 2**16


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to allowed hosts only: one of them may send anywhere, such as into the server's network."""

    def __init__(self, domains: Collection[str]) -> None:
        self._domains = domains

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        _check_url(newurl, self._domains)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetched(url: str, domains: Collection[str]) -> bytes:
    """Returns what is at a URL, if all of it comes within TIMEOUT_S of the first part.

    Args:
        url: http: or https:.
        domains: Hosts, in lower case, that it may name.

    Raises:
        ValueError: If it names another, or nothing can be had there, or more than MAX_BYTES.
    """
    _check_url(url, domains)
    # Without the proxies that the environment may name.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Redirects(domains))
    request = urllib.request.Request(url, headers={"User-Agent": "jax-paged"})
    parts, size = [], 0
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            stop = time.monotonic() + TIMEOUT_S
            while part := response.read1(_PART_BYTES):
                parts.append(part)
                size += len(part)
                check(size <= MAX_BYTES, "image_url.url", size, f"at most {MAX_BYTES}", aspect="the bytes at")
                if time.monotonic() > stop:
                    raise TimeoutError(f"it was not there after {TIMEOUT_S:g} s")
    except (OSError, http.client.HTTPException) as error:
        raise ArgumentError("image_url.url", url, f"a URL that can be fetched ({error})") from error
    return b"".join(parts)


def _check_url(url: str, domains: Collection[str]) -> None:
    try:
        parts = urlsplit(url)
        # A port that is no number is refused here: http.client takes "a.org:b.org" for the name of a host.
        ok = parts.scheme in ("http", "https") and parts.hostname in domains and parts.username is None
        ok = ok and parts.port != 0
    except ValueError:  # no URL at all
        ok = False
    allowed = f"data:image/...;base64,... or an http(s) URL with one of allowed_media_domains, {domains}"
    none = "data:image/...;base64,... because allowed_media_domains is empty"
    check(ok, "image_url.url", url, allowed if domains else none)
