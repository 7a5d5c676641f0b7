"""A server with an access file: clients over both protocols, and changes of the file meanwhile."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.client import StatusError
from headrace.client.blocking import Client
from headrace.plugins.access.keys import new_key
from tests.support.access_file import known_client
from tests.support.command import FREE_PORTS, run
from tests.support.issuer import TokenIssuer, served
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server, onnx_examples

WEB, OPS = new_key(), new_key()
TEXT = (
    known_client("web", WEB, ["infer", "read"], ["simple"], role="scorer")
    + known_client("ops", OPS, ["observe"])
    + f'[[peers]]\nuser = {os.getuid()}\nname = "neighbour"\nroles = ["scorer"]\n'
)
ROW = np.arange(16, dtype=np.int32).reshape(1, 16)
UNAUTHENTICATED = 16
FRONT_ENDS = ["", pytest.param("--frontends=1", marks=pytest.mark.slow)]


@pytest.fixture(params=FRONT_ENDS, ids=["plain", "front-end"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with `TEXT` as its access file, and Unix sockets beside it."""
    (models := tmp_path / "models").mkdir()
    (tmp_path / "access.toml").write_text(TEXT)
    options = [
        f"--access={tmp_path}/access.toml", f"--http-unix-socket={tmp_path}/http.sock",
        f"--grpc-unix-socket={tmp_path}/grpc.sock", *filter(None, [request.param]),
    ]  # fmt: skip
    with clean_server(onnx_examples(models), options=options) as process:
        yield process
        assert WEB.key not in process.log + process.output


def ask(url: str, credential: str = "", model: str = "simple") -> int:
    """The status of a model's answer, which is checked, or of the error."""
    with Client(url, token=credential) as client:
        try:
            answer = client.infer(model, {"INPUT0": ROW, "INPUT1": ROW})
        except StatusError as error:
            return 401 if error.grpc_status == UNAUTHENTICATED else error.status
        np.testing.assert_array_equal(answer["OUTPUT0"], 2 * ROW)
        return 200


def urls(server: ServerProcess) -> tuple[str, str]:
    return server.url, f"grpc://{server.grpc}"


def test_clients_are_known_over_both_protocols(server: ServerProcess, tmp_path: Path) -> None:
    for url in urls(server):
        assert ask(url, WEB.key) == 200
        assert ask(url) == 401
        assert ask(url, WEB.key + "x") == 401
        assert ask(url, WEB.hash) == 401
        assert ask(url, WEB.key, "digits") == 404  # a model of none of its roles is not there
    for url in (f"unix:{tmp_path}/http.sock", f"grpc+unix:{tmp_path}/grpc.sock"):
        assert ask(url) == 200  # by the user of this process
        assert ask(url, "wrong") == 401


def test_answers_are_timed_by_the_class_of_the_client(
    server: ServerProcess, tmp_path: Path
) -> None:
    for url in (*urls(server), f"unix:{tmp_path}/http.sock"):
        ask(url, WEB.key)
        ask(url)

    def counted(family: str) -> dict[tuple[str, str], float]:
        return {
            (own["headrace_identity"], own[status]): value
            for own, value in scraper.now().samples(f"{family}_duration_seconds_count")
            for status in ("http_response_status_code", "rpc_response_status_code")
            if own["headrace_operation"] == "infer" and status in own
        }

    http = {("key", "200"): 2, ("anonymous", "401"): 1, ("peer", "200"): 1}
    rpc = {("key", "OK"): 1, ("anonymous", "UNAUTHENTICATED"): 1}
    with Scraper(server.metrics, OPS.key) as scraper:
        until(lambda: counted("http_server_request") == http, f"{http}")
        until(lambda: counted("rpc_server_call") == rpc, f"{rpc}")


@pytest.mark.slow
def test_changes_of_the_file_are_followed(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    with (
        Client(server.url, token=WEB.key) as http,
        Client(f"grpc://{server.grpc}", token=WEB.key) as grpc,
    ):
        for client in (http, grpc):  # connections that stay open
            client.infer("simple", {"INPUT0": ROW, "INPUT1": ROW})
        ran = run("access", "key", "new", "--role=scorer", f"--file={file}")
        key = ran.stdout.splitlines()[-1]
        for url in urls(server):
            until(lambda url=url: ask(url, key) == 200, "the new key")  # type: ignore[misc]
            assert ask(url, WEB.key) == 200
        file.write_text(TEXT + "[rolls]\n")
        server.await_logged(f"access stays as it was: {file}:{TEXT.count(chr(10)) + 1}: unknown")
        assert ask(server.url, key) == 200
        file.write_text(TEXT.replace(WEB.hash, new_key().hash))
        for url in urls(server):
            until(lambda url=url: ask(url, WEB.key) == 401, "the end of a key")  # type: ignore[misc]
        for client in (http, grpc):
            with pytest.raises(StatusError, match="the API key is unknown"):
                client.infer("simple", {"INPUT0": ROW, "INPUT1": ROW})
    assert key not in server.log + server.output


@pytest.mark.slow
def test_tokens_of_an_issuer(server: ServerProcess, tmp_path: Path) -> None:
    issuer = TokenIssuer()
    with served(issuer) as issuing:
        table = f'''
            [issuers.corp]
            issuer = "{issuing}"
            audience = "headrace"
            refresh_secs = 1
            roles_claim = "groups"
            claim_roles = {{ ml = "scorer" }}
        '''
        (tmp_path / "access.toml").write_text(TEXT + table)
        token, other = issuer.token(groups=["ml"]).decode(), issuer.token().decode()
        for url in urls(server):
            until(lambda url=url: ask(url, token) == 200, "the issuer's keys")  # type: ignore[misc]
            assert ask(url, other) in (403, 404)  # known, and without a role
            assert ask(url, token[:-2]) == 401
        issuer.rotate("two")
        renewed = issuer.token(groups=["ml"]).decode()
        for url in urls(server):
            until(lambda url=url: ask(url, renewed) == 200, "the new key")  # type: ignore[misc]
            assert ask(url, token) == 401
    assert not any(one in server.log for one in (token, other, renewed))


def test_a_broken_file_at_start(tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    (tmp_path / "access.toml").write_text('[roles.x]\nmay = "infer"\nmodel = "m"\n')
    ran = run(
        "serve", f"--model-repository={models}", f"--access={tmp_path}/access.toml", *FREE_PORTS
    )
    assert ran.returncode == 1
    assert f"{tmp_path}/access.toml:3: unknown member 'model'" in ran.stderr
    assert "Traceback" not in ran.stderr
