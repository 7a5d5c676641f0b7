"""Contexts of TLS from files: errors, names of hosts, revocation, and renewal as a whole."""

import os
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from headrace.doors.tls import DoorTls, TlsContents, TlsFiles, dns_names, first_expiry
from tests.support.tls_files import FOLDER, Authority

Handshake = tuple[ssl.SSLObject, ssl.SSLObject]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("first root")


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> TlsFiles:
    """Files of a door with one certificate."""
    return put(tmp_path, authority, ["localhost"])


def put(folder: Path, authority: Authority, *hosts: list[str], **more: object) -> TlsFiles:
    """Write a root, and a certificate for each list of names."""
    (folder / "root.pem").write_bytes(authority.root)
    for number, names in enumerate(hosts):
        certificate, key = authority.sign(f"server {number}", names)
        (folder / f"{number}.pem").write_bytes(certificate)
        (folder / f"{number}.key").write_bytes(key)
    certificates = [f"{folder}/{number}.pem" for number in range(len(hosts))]
    keys = [f"{folder}/{number}.key" for number in range(len(hosts))]
    return TlsFiles("http", certificates, keys, **more)  # type: ignore[arg-type]


def trusting(root: bytes) -> ssl.SSLContext:
    """A client's context."""
    return ssl.create_default_context(cadata=root.decode())


def shake(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> Handshake:
    """Both ends of a connection in memory; raises `SSLError`."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(back, there, server_hostname=host),
        server.wrap_bio(there, back, server_side=True),
    )
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    with suppress(ssl.SSLWantReadError):
        ends[0].read()  # what TLS 1.3 says of a refused certificate
    return ends


def subject(end: ssl.SSLObject) -> object:
    """The common name of the other end's certificate."""
    found: Any = end.getpeercert()
    return dict(pair for [pair] in found["subject"])["commonName"]


def test_versions_and_protocols(files: TlsFiles, authority: Authority) -> None:
    client = trusting(authority.root)
    client.set_alpn_protocols(["h2", "http/1.1"])
    for door, expected in (("http", "http/1.1"), ("grpc", "h2"), ("metrics", "http/1.1")):
        end, _ = shake(DoorTls(replace(files, door=door)).current(), client)
        assert (end.version(), end.selected_alpn_protocol()) == ("TLSv1.3", expected)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    end, _ = shake(DoorTls(files).current(), client)
    assert end.version() == "TLSv1.2"
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        shake(DoorTls(replace(files, oldest="1.3")).current(), client)


def test_ciphers(files: TlsFiles, authority: Authority) -> None:
    client = trusting(authority.root)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    tls = DoorTls(replace(files, ciphers="ECDHE+CHACHA20"))
    end, _ = shake(tls.current(), client)
    cipher = end.cipher()
    assert cipher is not None
    assert "CHACHA20" in cipher[0]
    client.set_ciphers("AES128-SHA")  # without forward secrecy
    with pytest.raises(ssl.SSLError):
        shake(DoorTls(files).current(), client)


def test_the_certificate_of_a_host(tmp_path: Path, authority: Authority) -> None:
    files = put(tmp_path, authority, ["a.example", "localhost"], ["B.example", "*.c.example"])
    server, client = DoorTls(files).current(), trusting(authority.root)
    for host, expected in (
        ("a.example", "server 0"), ("b.example", "server 1"), ("x.c.example", "server 1"),
        ("localhost", "server 0"),
    ):  # fmt: skip
        assert subject(shake(server, client, host)[0]) == expected
    with pytest.raises(ssl.SSLCertVerificationError):  # the first one, which is not for this name
        shake(server, client, "c.example")


def test_client_certificates(tmp_path: Path, authority: Authority) -> None:
    root = f"{tmp_path}/root.pem"
    files = put(tmp_path, authority, ["localhost"], root=root)
    known, nobody = trusting(authority.root), trusting(authority.root)
    certificate, key = authority.sign("client")
    (tmp_path / "client.pem").write_bytes(certificate + key)
    known.load_cert_chain(f"{tmp_path}/client.pem")
    for mutual in (False, True):
        server = DoorTls(replace(files, mutual=mutual)).current()
        assert subject(shake(server, known)[1]) == "client"
    assert shake(DoorTls(files).current(), nobody)[1].getpeercert() is None
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        shake(DoorTls(replace(files, mutual=True)).current(), nobody)


def test_revoked_certificates(tmp_path: Path, authority: Authority) -> None:
    root, crl = f"{tmp_path}/root.pem", tmp_path / "crl.pem"
    files = put(tmp_path, authority, ["localhost"], root=root, mutual=True, revoked=str(crl))
    clients = {}
    for name in ("kept", "lost"):
        (tmp_path / f"{name}.pem").write_bytes(b"".join(authority.sign(name)))
        clients[name] = trusting(authority.root)
        clients[name].load_cert_chain(tmp_path / f"{name}.pem")
    crl.write_bytes(authority.revoked())
    tls = DoorTls(files)
    for client in clients.values():
        shake(tls.current(), client)
    crl.write_bytes(authority.revoked("lost"))
    assert tls.renew()
    assert subject(shake(tls.current(), clients["kept"])[1]) == "kept"
    with pytest.raises(ssl.SSLError, match=r"(?i)revoked"):
        shake(tls.current(), clients["lost"])


def test_roots_are_replaced(tmp_path: Path, authority: Authority) -> None:
    files = put(tmp_path, authority, ["localhost"], root=f"{tmp_path}/root.pem", mutual=True)
    (tmp_path / "client.pem").write_bytes(b"".join(authority.sign("client")))
    client = trusting(authority.root)
    client.load_cert_chain(tmp_path / "client.pem")
    tls = DoorTls(files)
    shake(tls.current(), client)
    (tmp_path / "root.pem").write_bytes(Authority("second root").root)
    assert tls.renew()
    with pytest.raises(ssl.SSLError):
        shake(tls.current(), client)


def test_files_that_do_not_fit_change_nothing(tmp_path: Path, authority: Authority) -> None:
    files = put(tmp_path, authority, ["localhost"])
    tls, client = DoorTls(files), trusting(authority.root)
    before = tls.current()
    assert not tls.renew()
    assert tls.current() is before
    certificate, key = authority.sign("next", ["localhost"])
    (tmp_path / "0.pem").write_bytes(certificate)
    for _ in range(2):
        with pytest.raises(OSError, match=r"0\.pem and its key cannot be used: key values mism"):
            tls.renew()
    (tmp_path / "0.key").unlink()
    with pytest.raises(OSError, match=r"--http-server-key: there is no file .*0\.key"):
        tls.renew()
    assert tls.current() is before
    (tmp_path / "0.key").write_bytes(key)
    assert tls.renew()
    assert subject(shake(tls.current(), client)[0]) == "next"


def test_files_that_are_being_written_are_left_alone(tmp_path: Path, authority: Authority) -> None:
    tls = DoorTls(put(tmp_path, authority, ["localhost"]))
    certificate, key = authority.sign("next", ["localhost"])
    (tmp_path / "0.pem").write_bytes(certificate)
    assert not tls.renew(settled=True)
    (tmp_path / "0.key").write_bytes(key)
    assert [tls.renew(settled=True) for _ in range(3)] == [False, True, False]


class Counted(TlsFiles):
    """Files that count how often they are read."""

    reads = 0

    def read(self) -> TlsContents:
        type(self).reads += 1
        return super().read()


def test_unchanged_files_are_not_read_again(tmp_path: Path, authority: Authority) -> None:
    files = put(tmp_path, authority, ["localhost"])
    tls = DoorTls(Counted(files.door, files.certificates, files.keys))
    assert not any(tls.renew(settled=True) for _ in range(5))
    assert Counted.reads == 3  # at first, and in the two looks that found the same
    tls.renew()
    assert Counted.reads == 4
    # Another file in its place, as large as before, and of the same time.
    name, other = tmp_path / "0.pem", tmp_path / "other"
    before = name.stat()
    other.write_bytes(b"x" * before.st_size)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(name)
    assert not tls.renew(settled=True)
    for _ in range(2):  # what is wrong is told in each look
        with pytest.raises(OSError, match="cannot be used"):
            tls.renew(settled=True)


def change(**fields: object) -> Callable[[TlsFiles], TlsFiles]:
    return lambda files: replace(files, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("alter", "text"), [
    (change(certificates=[]), "--http-use-ssl needs --http-server-cert"),
    (change(keys=[]), "--http-use-ssl needs --http-server-key"),
    (change(keys=["a", "b"]), "has 1 files, and --http-server-key 2: expected a key for each"),
    (change(mutual=True), "mutual TLS and revocation lists need --http-root-cert"),
    (change(revoked="x"), "mutual TLS and revocation lists need --http-root-cert"),
    (change(door="grpc", keys=["/nothing"]), "--grpc-server-key: there is no file /nothing"),
    (change(keys=["/"]), "--http-server-key: / cannot be read: Is a directory"),
    (change(root=f"{FOLDER}/server.key"), r"root-cert .*server.key cannot be used: no certificate"),
    (change(root=f"{FOLDER}/root.pem", revoked=f"{FOLDER}/root.pem"), "no revocation lists"),
    (change(keys=[f"{FOLDER}/client.pem"]), "cannot be used: no certificate and key in the form"),
    (change(ciphers="NONE-SUCH"), "--tls-ciphers NONE-SUCH: OpenSSL has no such cipher"),
])  # fmt: skip
def test_errors_name_the_setting(
    files: TlsFiles, alter: Callable[[TlsFiles], TlsFiles], text: str
) -> None:
    with pytest.raises(OSError, match=text):
        DoorTls(alter(files))


def test_a_further_certificate_without_a_name(tmp_path: Path, authority: Authority) -> None:
    with pytest.raises(OSError, match=r"1\.pem has no DNS name"):
        DoorTls(put(tmp_path, authority, ["localhost"], []))


def test_names_of_certificates(authority: Authority) -> None:
    assert dns_names((FOLDER / "server.pem").read_bytes()) == ["localhost"]
    names = [f"host-{number}.example" for number in range(40)]  # whose length takes three bytes
    certificate, key = authority.sign("many", names)
    assert dns_names(key + certificate) == names
    assert dns_names(authority.sign("none")[0]) == []
    for cut in (b"", certificate[:200], b"-----BEGIN CERTIFICATE-----\nMIIB\n"):
        with pytest.raises(OSError, match="cannot be read"):
            dns_names(cut)


def test_when_certificates_expire(tmp_path: Path, authority: Authority) -> None:
    lasting = (FOLDER / "server.pem").read_bytes()
    until = x509.load_pem_x509_certificate(lasting).not_valid_after_utc.timestamp()
    assert first_expiry(lasting) == until
    soon = authority.sign("soon")[0]
    expected = x509.load_pem_x509_certificate(soon).not_valid_after_utc.timestamp()
    assert first_expiry(lasting + soon) == first_expiry(soon + lasting) == min(expected, until)
    files = put(tmp_path, authority, ["localhost"])
    door = DoorTls(files)
    [(file, before)] = door.expiries.items()
    assert file == files.certificates[0]
    Path(file).write_bytes(lasting)
    Path(files.keys[0]).write_bytes((FOLDER / "server.key").read_bytes())
    assert door.renew()
    assert door.expiries == {file: until} != {file: before}
    with pytest.raises(OSError, match="cannot be read"):
        first_expiry(b"nothing")


@given(data=st.data())
def test_names_of_damaged_certificates(data: st.DataObject) -> None:
    der = bytearray(_WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(der) - 1))
        der[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(der)))
    with suppress(OSError):
        assert all(isinstance(name, str) for name in dns_names(_pem(bytes(der[:cut]))))
    with suppress(OSError):
        assert isinstance(first_expiry(_pem(bytes(der[:cut]))), float)


_WHOLE = ssl.PEM_cert_to_DER_cert((FOLDER / "server.pem").read_text())


def _pem(der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).encode()
