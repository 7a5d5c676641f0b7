"""The pages at `/`, an overview, and at `/docs`: the OpenAPI description as self-contained HTML.

The usual viewers are loaded from a public network, which a cluster often cannot reach.
"""

import json
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { margin-bottom: 0 }
h2 { margin-top: 2.2rem; text-transform: capitalize; border-bottom: 1px solid #ddd }
code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { background: #f6f7f8; padding: .8rem; overflow: auto }
details { margin: .4rem 0; border: 1px solid #ddd; border-radius: 4px; padding: .35rem .7rem }
summary { cursor: pointer } summary span { color: #666; margin-left: .7rem }
.get, .post, .delete { display: inline-block; width: 4.2rem; font-weight: 700 }
.get { color: #0a6 }
.post { color: #06c }
.delete { color: #b40 }
table { border-collapse: collapse } td { padding: .15rem 1.2rem .15rem 0; vertical-align: top }
"""


_PLACES = (
    ("<a href=/docs>/docs</a>", "all paths, with their requests and responses"),
    ("<a href=/openapi.json>/openapi.json</a>", "the same for tools"),
    ("<a href=/v2>/v2</a>", "the server's metadata"),
    ("<a href=/v2/health/ready>/v2/health/ready</a>", "readiness"),
    ("<a href=/v2/models/stats>/v2/models/stats</a>", "its models and their statistics"),
    ("<code>/v2/models/NAME/infer</code>", "runs a model, with POST"),
)


def render_root(version: str) -> str:
    """The overview page. It reveals nothing about models."""
    rows = "\n".join(f"<tr><td>{place}<td>{what}" for place, what in _PLACES)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>\n"
        f"<title>headrace</title><style>{_STYLE}</style>\n"
        f"<h1>headrace <small>{escape(version)}</small></h1>\n"
        "<p>An inference server that speaks the KServe V2 (Open Inference) protocol: here over"
        " HTTP, over gRPC on port 8001 and with metrics on port 8002 unless it was started with"
        f" others.\n<table>\n{rows}\n</table>\n"
    )


def render_docs(document: dict[str, Any]) -> str:
    """The page for an OpenAPI document."""
    info = document["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>",
        f"<p>{escape(info.get('summary', ''))}. {escape(info.get('description', ''))}"
        " The same for tools:"
        " <a href=/openapi.json>/openapi.json</a></p>",
    ]
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            text = _operation(path, method, operation)
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append(text)
    for tag, texts in by_tag.items():
        parts += [f"<h2>{escape(tag)}</h2>", *texts]
    parts.append("<h2>schemas</h2>")
    for name, schema in document["components"]["schemas"].items():
        head = f"<details id='{escape(name)}'><summary>{escape(name)}</summary>"
        parts.append(f"{head}{_json(schema)}</details>")
    return "\n".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{escape(p['name'])}</code><td>in {escape(p['in'])}"
        f"<td>{escape(p.get('description', ''))}"
        for p in operation.get("parameters", ())
    ]
    rows += [
        f"<tr><td>{escape(status)}<td>{escape(answer['description'])}"
        f"<td>{''.join(map(_schema, answer.get('content', {}).values()))}"
        for status, answer in operation["responses"].items()
    ]
    body = operation.get("requestBody")
    return (
        f"<details><summary><code><span class={method}>{method.upper()}</span>"
        f" {escape(path)}</code>"
        f"<span>{escape(operation.get('summary', ''))}</span></summary>"
        f"<table>{''.join(rows)}</table>{_body(body['content']) if body else ''}</details>"
    )


def _body(contents: dict[str, Any]) -> str:
    return "".join(
        f"<div>A body of the type <code>{escape(kind)}</code>: {_schema(content)}</div>"
        for kind, content in contents.items()
    )


def _schema(content: dict[str, Any]) -> str:
    """The schema of an answer: a link if it has a name."""
    reference = content["schema"].get("$ref", "").rpartition("/")[2]
    if reference:
        return f"<a href='#{escape(reference)}'>{escape(reference)}</a> "
    return _json(content["schema"])


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2))}</pre>"
