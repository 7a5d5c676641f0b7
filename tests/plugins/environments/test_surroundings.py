"""What of the server's environment a build sees."""

from headrace.plugins.environments.interpreters import build_surroundings

GIVEN = {
    "PATH": "/bin", "LC_ALL": "C", "HTTPS_PROXY": "http://p", "PIP_INDEX_URL": "https://u:p@x/",
    "UV_DEFAULT_INDEX": "https://y/", "UV_SYSTEM_PYTHON": "1",
    "PIP_USER": "1", "PIP_TARGET": "/x", "AWS_SECRET": "s", "PYTHONPATH": "/x",
}  # fmt: skip


def test_settings_of_installers_are_passed_and_secrets_are_not() -> None:
    found = build_surroundings(GIVEN)
    assert found == {
        "PATH": "/bin", "LC_ALL": "C", "HTTPS_PROXY": "http://p",
        "PIP_INDEX_URL": "https://u:p@x/", "UV_DEFAULT_INDEX": "https://y/",
        "PIP_USER": "0", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def test_offline_nothing_tells_them_where_else_to_look() -> None:
    found = build_surroundings(GIVEN, offline=True)
    assert not {"PIP_INDEX_URL", "UV_DEFAULT_INDEX"} & found.keys()
    assert found["PIP_CONFIG_FILE"] == "/dev/null"
