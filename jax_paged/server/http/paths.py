"""ASGI scopes of requests: scopes for in-process calls, and paths relative to a root path."""

from typing import Any

from starlette.types import Scope


def local_scope(
    method: str, path: str, headers: list[tuple[bytes, bytes]], query: bytes = b"", **state: Any
) -> Scope:
    """Returns the ASGI scope of an HTTP request that is made within this process.

    Args:
        method: HTTP method.
        path: Path without the query.
        headers: Names in lower case, and values.
        query: Query string.
        state: Entries of the scope's "state".
    """
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
    """Sets the root path of a scope and makes its path start with it, as Starlette's router expects.

    The scope already has a root path if another application mounts this one, or if uvicorn has one
    configured. A proxy may forward the path of the request with or without its own prefix. For example, if a
    proxy serves an application under /llm that mounts this one at /api, the root path is /llm/api, and the
    path of a request is /llm/api/v1/models, /api/v1/models or /v1/models.

    Args:
        scope: Scope of an HTTP request. Its "path" and "root_path" are replaced.
        root_path: Path under which a proxy serves the application. Ignored if the scope has a root path.
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
    """Returns the path without the root path, such as "/v1/models"; call `set_root_path` first."""
    return scope["path"].removeprefix(scope.get("root_path", ""))
