"""The path of the protocol that is nearest to one that is not there, for the text of a 404.

Those who come from other servers ask for `/v1/models/m:predict`, `/models/m/infer` or `/health`.
"""

import difflib
import re
from urllib.parse import quote

_ALIKE = 0.65  # from which on a path is taken for another one that was written wrongly
_LONGEST = 100  # characters of a path that is compared with others
_OF_MODEL = re.compile(
    r"(?:/v\d)?/models?/(?P<name>[^/:]+)(?:/versions?/(?P<version>\d+))?(?:[/:](?P<end>[\w/]+))?",
    re.IGNORECASE,
)
_ENDS = ("ready", "config", "stats", "infer", "generate", "generate_stream", "trace/setting")
_OTHERS = (
    "/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats", "/v2/repository/index",
    "/v2/trace/setting", "/v2/logging", "/v2/models/NAME/infer", "/v2/models/NAME/generate",
)  # fmt: skip
# Words of other servers.
_INFER = frozenset({"infer", "predict", "predictions", "invocations", "inference", "run"})
_METRICS = "metrics have a port of their own, 8002 unless --metrics-port says another"


def hint(path: str) -> str:
    """What a path was probably meant to be, as the end of a sentence; "" if nothing is like it."""
    if len(path) > _LONGEST:
        return ""
    clean = "/" + "/".join(part for part in path.split("/") if part)
    if clean.endswith("/metrics"):
        return f"; {_METRICS}"
    if clean[1:].lower() in _INFER:
        clean = "/v2/models/NAME/infer"
    near = _of_model(clean) or _nearest(clean, _OTHERS) or _nearest(f"/v2{clean}", _OTHERS)
    return f"; did you mean {near}?" if near and near != path else ""


def _of_model(path: str) -> str:
    found = _OF_MODEL.fullmatch(path)
    if found is None:
        return ""
    end = (found["end"] or "").lower()
    if end:
        end = "/infer" if end in _INFER else _nearest(f"/{end}", [f"/{one}" for one in _ENDS])
        if not end:
            return ""
    version = f"/versions/{found['version']}" if found["version"] else ""
    return f"/v2/models/{quote(found['name'], safe='')}{version}{end}"


def _nearest(path: str, known: tuple[str, ...] | list[str]) -> str:
    return next(iter(difflib.get_close_matches(path, known, 1, _ALIKE)), "")
