"""Examples of docs/environments.md are parsed as documented."""

import re
from pathlib import Path

from headrace.plugins.environments.requirements import ScriptBlock, read_script_block
from headrace.repository.config import parse_config

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_script_block_is_read() -> None:
    expected = ScriptBlock(("scikit-learn==1.6.*",), ">=3.12")
    assert read_script_block(block("python")) == expected


def test_the_parameter_is_read() -> None:
    config = parse_config(block("protobuf"), "page").config
    value = config.parameters["EXECUTION_ENV_PATH"].string_value
    assert value == "$$TRITON_MODEL_DIRECTORY/environment.tar.gz"
