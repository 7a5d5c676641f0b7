"""Doors for clients together: here, the renewal of their TLS."""

from headrace.doors.clients import renew_tls
from tests.placement.threads import no_threads


async def test_without_a_thread_tls_stays_as_it_is() -> None:
    with no_threads():
        assert await renew_tls([]) == (False, "cannot read TLS files: can't start new thread")
    assert await renew_tls([]) == (False, "")
