"""Keys of requests: equal for requests that a version answers equally.

A key is a digest of the version's files and configuration, of the inputs, of the outputs asked for,
and of the parameters and headers that the model can read. The digest is one that nobody can find
two requests for: a client could otherwise give others a wrong answer.
"""

from collections.abc import Collection, Hashable, Sequence
from hashlib import blake2b
from typing import Any

from headrace.core.bytes_array import COPIED
from headrace.core.call import Call
from headrace.core.signature import Signature
from headrace.core.tensors import raw_bytes
from headrace.engine.chain import StageModel
from headrace.repository.model_files import Content, Digests, stamp_of

_SIZE = 32  # bytes of a digest
PREFIX = 8  # bytes at the beginning of all keys of a version
_MOST_LAYOUTS = 1024


class Keys:
    """Makes the keys of one version's requests; `of` may be called from any thread."""

    def __init__(self, salt: bytes, signature: Signature) -> None:
        self.prefix = salt[:PREFIX]
        # The salt in use, and digests of what repeats with it: replaced together.
        self._begun: tuple[bytes, dict[Hashable, Any]] = salt, {}
        self._names = [spec.name for spec in signature.inputs]
        self._read: Collection[str] | None = signature.parameters

    def renew(self) -> None:
        """Make other keys from now on, with the same prefix."""
        self._begun = blake2b(self._begun[0], digest_size=_SIZE).digest(), {}

    def of(self, call: Call, headers: Sequence[str]) -> bytes:
        """The key of a checked call, for a model that gets these headers."""
        inputs = call.inputs
        # Loops and `tobytes`, since each Python call of a request alone takes 1 to 2 us.
        arrays: list[Any] = []
        layout: tuple[object, ...] = (call.outputs,)
        for name in self._names:
            if name in inputs:
                array = inputs[name].array
                arrays.append(array)
                layout += (name, array.shape)
        salt, layouts = self._begun
        begun = layouts.get(layout)
        if begun is None:
            if len(layouts) >= _MOST_LAYOUTS:
                layouts.clear()
            begun = layouts[layout] = blake2b(salt, digest_size=_SIZE)
            begun.update(repr(layout).encode(errors="surrogatepass"))
        digest = begun.copy()
        for array in arrays:  # whose length the layout tells, or each element
            small = array.nbytes <= COPIED and not array.dtype.hasobject
            digest.update(array.tobytes() if small else raw_bytes(array))
        if call.parameters:
            read = self._read
            told = [(n, v) for n, v in call.parameters.items() if read is None or n in read]
            digest.update(repr(sorted(told)).encode(errors="surrogatepass"))
        if headers:
            digest.update(repr([call.header(name) for name in headers]).encode())
        found: bytes = digest.digest()
        return self.prefix + found


def salt_of(model: StageModel, content: Content, elsewhere: bool) -> bytes:
    """The part of all keys of a version: a digest of its name, files and configuration.

    For answers that are kept `elsewhere`, files are told by their content, so that the keys of
    other servers with the same model are equal. Reads the files then.
    """
    digests = Digests()
    files: list[tuple[str, object]] = []
    for name, stamp in sorted(content.files.items()):
        path = content.directory / name
        told: object = stamp
        # A file that has changed since it was looked at is not what was loaded.
        if elsewhere and not isinstance(stamp, str) and stamp_of(path) == stamp:
            told = digests.of(path) or stamp
        files.append((path.name if name == str(path) else name, told))
    text = repr((model.name, model.version, files, sorted(content.set_fields)))
    return blake2b(text.encode() + content.config, digest_size=_SIZE).digest()
