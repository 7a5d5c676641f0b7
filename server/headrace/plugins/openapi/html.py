"""The pages at `/`, an overview with the models, and at `/docs`, Swagger UI for `/openapi.json`.

Everything that they need comes from this server: a cluster often cannot reach a public network.
"""

from collections.abc import Sequence
from html import escape
from urllib.parse import quote

from headrace.core.plugins import OWN
from headrace.core.signature import Signature, TensorSpec
from headrace.core.tensors import brackets
from headrace.plugins.openapi.document import DescribedVersion

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { margin-bottom: 0 }
h2 { margin-top: 2.2rem; border-bottom: 1px solid #ddd }
code { font: 13px/1.45 ui-monospace, monospace }
table { border-collapse: collapse } td, th { padding: .15rem 1.2rem .15rem 0; vertical-align: top }
th { text-align: left }
"""
_PLACES = (
    ("<a href=docs>/docs</a>", "all paths, with their requests and responses, to be tried"),
    *(
        [("<a href=console>/console</a>", "models, traffic, limits and log, live")]
        if "console" in OWN["headrace.pages"]
        else []
    ),
    ("<a href=openapi.json>/openapi.json</a>", "the same for tools"),
    ("<a href=v2>/v2</a>", "the server's metadata"),
    ("<a href=v2/health/ready>/v2/health/ready</a>", "readiness"),
    ("<a href=v2/models/stats>/v2/models/stats</a>", "statistics of its models"),
    ("<code>/v2/models/NAME/infer</code>", "runs a model, with POST"),
)
# No other site is asked for anything, and none may frame the page. Swagger UI sets inline styles.
SAFETY = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'"
}
DOCS = """<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content='width=device-width, initial-scale=1'>
<title>headrace</title><link rel=icon href=data:,><link rel=stylesheet href=docs/swagger-ui.css>
<body><noscript>Without scripts, <a href=openapi.json>/openapi.json</a> says the same.</noscript>
<div id=ui></div><script src=docs/swagger-ui-bundle.js></script><script src=docs/start.js></script>
"""


def render_root(version: str, models: Sequence[str]) -> str:
    """The overview page; `models` are rows of its table."""
    rows = "\n".join(f"<tr><td>{place}<td>{what}" for place, what in _PLACES)
    head = "<tr><th>model<th>version<th>inputs<th>outputs"
    table = "\n".join(["<h2>Models</h2>", "<table>", head, *models, "</table>", ""])
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>\n"
        f"<title>headrace</title><link rel=icon href=data:,><style>{_STYLE}</style>\n"
        f"<h1>headrace <small>{escape(version)}</small></h1>\n"
        "<p>An inference server that speaks the KServe V2 (Open Inference) protocol: here over"
        " HTTP, over gRPC on port 8001 and with metrics on port 8002 unless it was started with"
        f" others.\n<table>\n{rows}\n</table>\n{table if models else ''}"
    )


def missing_row(name: str, reason: str) -> str:
    """The row of a model that is not served."""
    return f"<tr><td>{escape(name)}<td><td colspan=2>not served: {escape(reason)}"


def model_row(found: DescribedVersion) -> str:
    """The row of a loaded version."""
    link = f"docs#/models/{quote(f'run_{found.model}', safe='')}"
    signature = found.signature
    cells = (_tensors(signature, signature.inputs), _tensors(signature, signature.outputs))
    name = f"<a href='{link}'>{escape(found.model)}</a>"
    return f"<tr><td>{name}<td>{found.version}<td>{cells[0]}<td>{cells[1]}"


def _tensors(signature: Signature, specs: Sequence[TensorSpec]) -> str:
    return "<br>".join(
        f"<code>{escape(spec.name)} {spec.datatype} {brackets(signature.wire_shape(spec))}</code>"
        for spec in specs
    )
