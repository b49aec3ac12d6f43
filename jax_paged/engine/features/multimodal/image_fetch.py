"""Download of images by URL, limited to the hosts in `allowed_media_domains`."""

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
    """Redirect handler that follows redirects to allowed hosts only.

    An allowed host may redirect to any address, for example into the server's internal network.
    """

    def __init__(self, domains: Collection[str]) -> None:
        self._domains = domains

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Checks the new URL, then follows the redirect."""
        _check_url(newurl, self._domains)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(url: str, domains: Collection[str]) -> bytes:
    """Downloads the content of a URL.

    Each socket operation, and the transfer of the response body as a whole, may take up to TIMEOUT_S seconds.

    Args:
        url: An http: or https: URL.
        domains: Allowed host names, in lower case.

    Raises:
        ValueError: If the host is not allowed, the content can't be downloaded, or it is larger than
            MAX_BYTES.
    """
    _check_url(url, domains)
    # Proxies that the environment may define are not used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Redirects(domains))
    request = urllib.request.Request(url, headers={"User-Agent": "jax-paged"})
    parts, size, allowed = [], 0, f"at most {MAX_BYTES}"
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            stop = time.monotonic() + TIMEOUT_S
            while part := response.read1(_PART_BYTES):
                parts.append(part)
                size += len(part)
                check(size <= MAX_BYTES, "image_url.url", size, allowed, aspect="the number of bytes at")
                if time.monotonic() > stop:
                    raise TimeoutError(f"the download took more than {TIMEOUT_S:g} s")
    except (OSError, http.client.HTTPException) as error:
        raise ArgumentError("image_url.url", url, f"a URL that can be fetched ({error})") from error
    return b"".join(parts)


def _check_url(url: str, domains: Collection[str]) -> None:
    """Raises ValueError if a URL is not an http(s) URL of an allowed host."""
    try:
        parts = urlsplit(url)
        # `parts.port` raises ValueError for a port that is not a number. Without this check, http.client
        # would accept "a.org:b.org" as a host name.
        ok = parts.scheme in ("http", "https") and parts.hostname in domains and parts.username is None
        ok = ok and parts.port != 0
    except ValueError:  # not a valid URL
        ok = False
    allowed = f"a data:image/...;base64 URL or an http(s) URL with one of allowed_media_domains, {domains}"
    none = "a data:image/...;base64 URL because allowed_media_domains is empty"
    check(ok, "image_url.url", url, allowed if domains else none)
