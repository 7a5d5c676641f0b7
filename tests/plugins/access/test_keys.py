"""API keys and their hashes."""

import re

from headrace.plugins.access.keys import digest, new_key, read_hash


def test_keys_have_a_public_prefix_and_256_random_bits() -> None:
    made = [new_key() for _ in range(100)]
    assert len({one.key for one in made}) == 100
    for one in made:
        assert re.fullmatch(r"hrk_[0-9a-f]{8}_[\w-]{43}", one.key)
        assert one.key.startswith(f"{one.prefix}_")
        assert read_hash(one.hash) == digest(one.key.encode())


def test_hashes_are_those_of_sha256sum() -> None:
    assert digest(b"abc").hex().startswith("ba7816bf8f01cfea")
    assert read_hash(f"sha256:{digest(b'abc').hex()}") == digest(b"abc")
    for text in ("", "sha256:", "sha256:00", "md5:" + "0" * 64, "sha256:" + "0" * 65, "0" * 64):
        assert read_hash(text) is None
