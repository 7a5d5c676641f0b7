"""What clients may make of the log's settings."""

import pytest

from headrace.core.errors import InvalidRequest, ServerError, Unsupported
from headrace.observability.logs import LogControl, LogSettings


def test_the_settings_by_their_names() -> None:
    control = LogControl(LogSettings(2, False, True, False, "ISO8601", "/var/log/x"))
    assert control.document() == {
        "log_file": "/var/log/x", "log_info": False, "log_warning": True, "log_error": False,
        "log_verbose_level": 2, "log_format": "ISO8601",
    }  # fmt: skip


def test_a_change_comes_into_force() -> None:
    applied: list[LogSettings] = []
    control = LogControl(LogSettings(file="f"), applied.append)
    control.change({"log_info": False, "log_verbose_level": 3, "log_format": "json"})
    assert applied == [LogSettings(3, False, True, True, "json", "f")]
    assert control.settings == applied[0]


def test_nothing_is_changed_by_nulls() -> None:
    applied: list[LogSettings] = []
    control = LogControl(LogSettings(), applied.append)
    control.change({"log_info": None, "log_file": None})
    control.change({})
    assert (applied, control.settings) == ([], LogSettings())


@pytest.mark.parametrize(("name", "value", "error", "text"), [
    ("log_file", "x", Unsupported, "log file location can not be updated through network"),
    ("log_file", "", Unsupported, "log file location can not be updated through network"),
    ("log_info", 1, InvalidRequest, "expect boolean for 'log_info'"),
    ("log_error", "true", InvalidRequest, "expect boolean for 'log_error'"),
    ("log_verbose_level", True, InvalidRequest, "expect int32 for 'log_verbose_level'"),
    ("log_verbose_level", 1.0, InvalidRequest, "expect int32 for 'log_verbose_level'"),
    ("log_verbose_level", -1, InvalidRequest, "must be from 0 to 4294967295, got -1"),
    ("log_verbose_level", 2**32, InvalidRequest, "got 4294967296"),
    ("log_format", 1, InvalidRequest, "expect string for 'log_format'"),
    ("log_format", "xml", InvalidRequest, "invalid argument for log_format, got: xml"),
    ("log_level", "INFO", InvalidRequest, "unknown log setting 'log_level', expected one of"),
])  # fmt: skip
def test_what_is_wrong_changes_nothing(
    name: str, value: object, error: type[ServerError], text: str
) -> None:
    control = LogControl(LogSettings())
    with pytest.raises(error, match=text):
        control.change({"log_warning": False, name: value})
    assert control.settings == LogSettings()
