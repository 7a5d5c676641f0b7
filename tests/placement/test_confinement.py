"""Users of models, and what a server says about isolation."""

import os
import pwd
from pathlib import Path

import pytest

from headrace.core.model_spec import IsolationOptions
from headrace.placement.confinement import WorkerUser, isolation_report, sandbox_problem
from tests.support.isolation import needs_landlock, needs_root


def test_a_user_by_numbers() -> None:
    assert WorkerUser.of("64123:64124") == WorkerUser("64123:64124", 64123, 64124, (64124,))


@needs_root
def test_a_user_by_name_has_all_its_groups() -> None:
    known = next(user for user in pwd.getpwall() if user.pw_uid and user.pw_gid)
    found = WorkerUser.of(known.pw_name)
    assert (found.uid, found.gid) == (known.pw_uid, known.pw_gid)
    assert set(found.groups) == set(os.getgrouplist(known.pw_name, known.pw_gid))
    assert found.problem() == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nobody-like-this", r"expected a user of this system, or UID:GID, got 'nobody-like-this'"),
        ("64123", "expected a user of this system"),
        ("64123:", "expected a user of this system"),
        ("-1:5", "expected a user of this system"),
        ("0:5", r"'0:5' is root, or of its group"),
        ("5:0", r"'5:0' is root, or of its group"),
        ("root", r"'root' is root"),
        ("4294967295:5", "numbers are at most 4294967294"),
        ("", "expected a user"),
    ],
)
def test_users_that_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WorkerUser.of(text)


@pytest.mark.skipif(os.geteuid() == 0, reason="root is refused as root")
def test_the_servers_own_user_is_refused() -> None:
    with pytest.raises(ValueError, match="is the server's own user"):
        WorkerUser.of(f"{os.geteuid()}:64123")


@pytest.mark.skipif(os.geteuid() == 0, reason="root lacks nothing")
def test_a_server_that_may_not_change_users() -> None:
    with pytest.raises(ValueError, match=r"it lacks CAP_CHOWN, .*; run it as root"):
        isolation_report(IsolationOptions(("64123:64123",)))


def test_nothing_is_reported_without_isolation() -> None:
    assert isolation_report(IsolationOptions()) == ([], [])


@needs_root
@needs_landlock
def test_a_report_names_users_and_landlock() -> None:
    told, _ = isolation_report(IsolationOptions(("64123:64123",), "required"))
    assert told[0] == "user 64123:64123 (64123)"
    assert told[1].startswith("Landlock ")


@pytest.mark.skipif(not sandbox_problem(), reason="this kernel has Landlock")
def test_a_kernel_without_landlock() -> None:
    told, missing = isolation_report(IsolationOptions(sandbox="preferred"))
    assert told == []
    assert "expected version 3 or newer" in missing[0]
    with pytest.raises(ValueError, match="--worker-sandbox=required: the kernel has"):
        isolation_report(IsolationOptions(sandbox="required"))


@pytest.mark.parametrize("path", ["relative", "/nowhere-at-all"])
def test_paths_that_do_not_exist(path: str, tmp_path: Path) -> None:
    isolation_report(IsolationOptions(readable=(str(tmp_path),)))
    with pytest.raises(ValueError, match=f"there is no path '{path}'"):
        isolation_report(IsolationOptions(writable=(path,)))
