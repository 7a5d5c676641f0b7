# A small image of Python, the pinned runtime packages and headrace.
#
#   docker build -t headrace:0.1.0 .
#   docker run --rm --read-only -p 8000-8002:8000-8002 -v "$PWD/model_repository:/models:ro" headrace:0.1.0 \
#     serve --model-repository /models --exit-on-error=false
#
# Without --exit-on-error=false a model that cannot be loaded ends the server. The example models in
# reviews/, iris/ and text_embedding/ cannot: the server builds environments for them, and a read-only
# root has no place for these. docs/environments.md shows how to provide one, or how to build them into
# an image in advance.

FROM python:3.13-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# Packages before sources: a change of the code alone reuses this layer.
COPY requirements/serve.txt requirements/build.txt requirements/
RUN python -m venv /opt/build && python -m venv --without-pip /opt/headrace \
    && /opt/build/bin/pip install --require-hashes -r requirements/build.txt \
    && pip --python /opt/headrace/bin/python install --require-hashes -r requirements/serve.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY model_repository/ model_repository/
COPY server/ server/
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --no-index --wheel-dir dist . \
    && pip --python /opt/headrace/bin/python install --no-deps --no-index dist/*.whl \
    && install -d -m 1777 /opt/root/cache

FROM python:3.13-slim
COPY --from=build /opt/headrace /opt/headrace
# A volume at /cache has the permissions of this folder, so that any user can build environments there.
COPY --from=build /opt/root/ /
# A container has its own network, so the server listens on all of its addresses.
ENV PATH="/opt/headrace/bin:$PATH" \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HEADRACE_HTTP_ADDRESS=0.0.0.0 \
    HEADRACE_GRPC_ADDRESS=0.0.0.0 \
    HEADRACE_METRICS_ADDRESS=0.0.0.0
WORKDIR /models
USER 65532:65532
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('HEADRACE_HTTP_PORT', '8000') + '/v2/health/live', timeout=2)"]
ENTRYPOINT ["headrace"]
CMD ["serve", "--model-repository", "/models"]
