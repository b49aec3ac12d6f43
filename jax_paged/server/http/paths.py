"""Scopes of requests: those without a network, and the path after the prefix of a proxy or of a mount."""

from typing import Any

from starlette.types import Scope


def local_scope(
    method: str, path: str, headers: list[tuple[bytes, bytes]], query: bytes = b"", **state: Any
) -> Scope:
    """Returns the scope of an HTTP request that this process gives to an application itself."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
        "state": state,
    }


def set_root_path(scope: Scope, root_path: str) -> None:
    """Makes the path of a scope begin with its root path, so that the router finds the route behind it.

    An application that mounts this one, or a server with a root path of its own, has set the scope's root
    path. The request's path may have that prefix, the prefix of the mount alone (if a proxy has removed its
    own), or neither.

    Args:
        scope: Of an HTTP request; its "path" and "root_path" are replaced.
        root_path: Prefix under which a proxy serves the application; ignored if the scope has a root path.
    """
    root = scope.get("root_path", "").rstrip("/") or root_path
    mount = root.removeprefix(scope.get("app_root_path", "").rstrip("/"))
    path = scope["path"]
    for prefix in (root, mount):
        if prefix and (path == prefix or path.startswith(f"{prefix}/")):
            path = path[len(prefix) :] or "/"
            break
    scope["root_path"], scope["path"] = root, root + path


def route_path(scope: Scope) -> str:
    """Returns the path within the application, after `set_root_path`: "/v1/models" wherever it is mounted."""
    return scope["path"].removeprefix(scope.get("root_path", ""))
