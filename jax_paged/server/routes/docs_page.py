"""The page at /docs: the OpenAPI document as HTML, without scripts and external resources."""

import html
from typing import Any

from fastapi.responses import HTMLResponse

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 14px ui-monospace, monospace; }
summary { cursor: pointer; padding: 0.3rem 0; }
details { border-top: 1px solid #8886; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
th, td { text-align: left; vertical-align: top; padding: 0.15rem 1.5rem 0.15rem 0; }
"""


def docs_page(document: dict[str, Any]) -> HTMLResponse:
    """Returns an HTML page that shows an OpenAPI document.

    Args:
        document: The document, with its schemas in "components".
    """
    info, routes = document["info"], []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            routes.append(_route(f"{method.upper()} {path}", operation, document["components"]["schemas"]))
    title = f"{html.escape(info['title'])} {html.escape(info['version'])}"
    return HTMLResponse(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{html.escape(info['description'])} "
        'Machine-readable version: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(routes)}</body></html>"
    )


def _route(title: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = []
    for content in operation.get("requestBody", {}).get("content", {}).values():
        parts.append(f"<h3>Request</h3>{_fields(content['schema'], schemas)}")
    for status, answer in operation["responses"].items():
        parts.append(f"<h3>{status}</h3><p>{html.escape(answer['description'])}</p>")
        for kind, content in answer.get("content", {}).items():
            fields = _fields(content["schema"], schemas) if status == "200" else ""
            parts.append(f"<p><code>{html.escape(kind)}</code></p>{fields}")
    text = operation.get("description", "").partition(": ")[2]
    return (
        f"<details><summary><code>{html.escape(title)}</code> {html.escape(text)}</summary>"
        f"{''.join(parts)}</details>"
    )


def _fields(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Returns HTML tables of the fields of an object and of the objects in it."""
    found: dict[str, dict[str, Any]] = {}
    _collect(schema, schemas, found)
    tables = []
    for name, inner in found.items():
        required = inner.get("required", ())
        rows = "".join(
            f"<tr><td><code>{html.escape(field)}</code></td><td>{html.escape(_type(value))}</td>"
            f"<td>{'required' if field in required else ''}</td>"
            f"<td>{html.escape(value.get('description', ''))}</td></tr>"
            for field, value in inner.get("properties", {}).items()
        )
        head = "<tr><th>field</th><th>type</th><th></th><th></th></tr>"
        tables.append(f"<table><caption>{html.escape(name)}</caption>{head}{rows}</table>")
    return "".join(tables)


def _collect(schema: Any, schemas: dict[str, Any], found: dict[str, dict[str, Any]]) -> None:
    """Adds all named schemas that a schema refers to, also indirectly, to `found`, in order of appearance."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == "$ref":
            name = value.rpartition("/")[2]
            if name not in found:
                found[name] = schemas[name]
                _collect(schemas[name], schemas, found)
        elif isinstance(value, dict | list):
            _collect(value, schemas, found)


def _type(schema: dict[str, Any]) -> str:
    """Returns a short description of a field's type."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return " or ".join(repr(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return schema.get("type", "anything")
