"""Methods and paths of the HTTP routes; those of `CONTROL` need models that clients may control."""

CONTROL = {
    ("post", "/v2/repository/models/{name}/load"), ("post", "/v2/repository/models/{name}/unload"),
    ("delete", "/v2/models/{name}/traffic"), ("post", "/v2/models/{name}/traffic"),
    ("post", "/v2/models/{name}/traffic/promote"), ("post", "/v2/models/{name}/traffic/rollback"),
}  # fmt: skip
ROUTES = CONTROL | {
    ("get", "/v2"), ("get", "/v2/health/live"), ("get", "/v2/health/ready"),
    ("get", "/v2/models/stats"), ("get", "/v2/models/{name}"), ("get", "/v2/models/{name}/config"),
    ("get", "/v2/models/{name}/ready"), ("get", "/v2/models/{name}/stats"),
    ("get", "/v2/models/{name}/traffic"), ("get", "/v2/models/{name}/versions/{version}"),
    ("get", "/v2/models/{name}/versions/{version}/config"),
    ("get", "/v2/models/{name}/versions/{version}/ready"),
    ("get", "/v2/models/{name}/versions/{version}/stats"), ("get", "/v2/logging"),
    ("post", "/v2/logging/tail"), ("get", "/v2/status"),
    ("get", "/v2/models/{name}/trace/setting"), ("get", "/v2/trace/setting"),
    ("post", "/v2/models/{name}/trace/setting"), ("post", "/v2/trace/setting"),
    ("post", "/v2/logging"), ("post", "/v2/models/{name}/generate"),
    ("post", "/v2/models/{name}/generate_stream"), ("post", "/v2/models/{name}/infer"),
    ("post", "/v2/models/{name}/versions/{version}/generate"),
    ("post", "/v2/models/{name}/versions/{version}/generate_stream"),
    ("post", "/v2/models/{name}/versions/{version}/infer"), ("post", "/v2/repository/index"),
    ("post", "/v2/repository/models/{name}/load"), ("post", "/v2/repository/models/{name}/unload"),
    ("get", "/v2/systemsharedmemory/status"),
    ("get", "/v2/systemsharedmemory/region/{region}/status"),
    ("post", "/v2/systemsharedmemory/region/{region}/register"),
    ("post", "/v2/systemsharedmemory/region/{region}/unregister"),
    ("post", "/v2/systemsharedmemory/unregister"), ("get", "/v2/cudasharedmemory/status"),
    ("get", "/v2/cudasharedmemory/region/{region}/status"),
    ("post", "/v2/cudasharedmemory/region/{region}/register"),
    ("post", "/v2/cudasharedmemory/region/{region}/unregister"),
    ("post", "/v2/cudasharedmemory/unregister"),
}  # fmt: skip
