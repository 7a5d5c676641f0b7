"""Signed manifests, and a server that requires them."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from headrace.core.errors import LoadFailed
from headrace.plugins.stores.signatures import required, signed
from headrace.repository.model_files import MANIFEST, manifest_of
from tests.models.onnx_graphs import identity, write_model
from tests.support.command import run
from tests.support.server_process import clean_server


def keys(folder: Path, name: str) -> tuple[Path, str]:
    """The file of a new private key, and the public one in PEM."""
    key = Ed25519PrivateKey.generate()
    path = folder / f"{name}.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return path, public.decode()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models", "m", identity(), "# m\n")


def sign(directory: Path, key: Path) -> None:
    (directory / MANIFEST).write_bytes(signed(manifest_of(directory), key))


def accepted(folder: Path, *public: str) -> Callable[[Path], None]:
    (folder / "accepted.pem").write_text("# the team\n" + "".join(public))
    return required(str(folder / "accepted.pem"))


def test_any_accepted_key_suffices(model: Path, tmp_path: Path) -> None:
    (first, its_public), (second, other_public) = keys(tmp_path, "a"), keys(tmp_path, "b")
    _, nobodys = keys(tmp_path, "c")
    sign(model, first)
    accepted(tmp_path, other_public, its_public)(model)
    with pytest.raises(LoadFailed, match=r"it is signed by none of the keys of .*accepted"):
        accepted(tmp_path, other_public, nobodys)(model)
    sign(model, second)
    for public in (its_public, other_public):
        accepted(tmp_path, public)(model)
    before = (model / MANIFEST).read_bytes()
    sign(model, first)
    assert (model / MANIFEST).read_bytes() == before
    (model / MANIFEST).write_text(json.dumps(json.loads(before)))
    accepted(tmp_path, its_public)(model)


def test_everything_is_signed(model: Path, tmp_path: Path) -> None:
    key, public = keys(tmp_path, "a")
    check = accepted(tmp_path, public)
    with pytest.raises(LoadFailed, match=f"it is not signed: there is no {MANIFEST}"):
        check(model)
    sign(model, key)
    (model / "1" / "__pycache__").mkdir()
    (model / "1" / "__pycache__" / "model.pyc").write_bytes(b"")
    check(model)
    (model / "1" / ".more.py").write_text("")
    with pytest.raises(LoadFailed, match=r"1/\.more\.py is not signed"):
        check(model)
    (model / "1" / ".more.py").unlink()
    document = json.loads((model / MANIFEST).read_text())
    document["files"]["config.pbtxt"] = "sha256:" + "0" * 64
    (model / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(LoadFailed, match="its signature is of other files"):
        check(model)
    document["signatures"] = {name: "no base64" for name in document["signatures"]}
    (model / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(LoadFailed, match="it is signed by none of the keys"):
        check(model)


def test_other_keys_are_refused(model: Path, tmp_path: Path) -> None:
    curve = generate_private_key(SECP256R1())
    (tmp_path / "ec.pem").write_bytes(
        curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    public = curve.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(LoadFailed, match="expected keys of Ed25519"):
        accepted(tmp_path, public.decode())
    with pytest.raises(LoadFailed, match="expected public keys in PEM, found none"):
        accepted(tmp_path)
    with pytest.raises(LoadFailed, match=r"expected public keys in PEM$"):
        accepted(tmp_path, "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n")
    with pytest.raises(LoadFailed, match="none: No such file"):
        required(str(tmp_path / "none"))
    with pytest.raises(LoadFailed, match="expected a key of Ed25519"):
        signed(b'{"files": {}}', tmp_path / "ec.pem")
    with pytest.raises(LoadFailed, match="expected a private key in PEM"):
        signed(b'{"files": {}}', tmp_path / "accepted.pem")
    with pytest.raises(LoadFailed, match="nothing: No such file"):
        signed(b'{"files": {}}', tmp_path / "nothing")


def test_a_server_serves_signed_models_alone(model: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "unsigned", identity())
    key, public = keys(tmp_path, "a")
    (tmp_path / "accepted.pem").write_text(public)
    ran = run("models", "sign", str(model), f"--key={key}")
    assert (ran.returncode, ran.stdout) == (0, f"signed {model}\n"), ran.stderr
    pushed = run("models", "push", str(tmp_path / "models"), str(tmp_path / "pushed"))
    assert pushed.returncode == 0, pushed.stderr
    wanted = f"--require-signature={tmp_path / 'accepted.pem'}"
    verified = run("models", "verify", str(tmp_path / "pushed"), wanted)
    assert verified.stdout.splitlines()[0] == "m: as its manifest has it"
    assert "unsigned: headrace-manifest.json: it is signed by none of the keys" in verified.stdout
    options = (wanted, "--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false")
    with clean_server(tmp_path / "pushed", options=options) as server:
        index = httpx.post(f"{server.url}/v2/repository/index", trust_env=False).json()
        assert [(e["name"], e.get("state")) for e in index] == [
            ("m", "READY"), ("unsigned", "UNAVAILABLE"),
        ]  # fmt: skip
        assert "it is signed by none of the keys" in index[1]["reason"]
        url = f"{server.url}/v2/repository/models/m/load"
        config = {"parameters": {"config": '{"max_batch_size": 4}'}}
        refused = httpx.post(url, json=config, trust_env=False)
        assert refused.status_code == 400
        assert "configurations of their own are not signed" in refused.text
