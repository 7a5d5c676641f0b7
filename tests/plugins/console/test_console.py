"""The console in a browser: what users see and do, by mouse and keyboard."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.core.datatypes import Datatype
from headrace.plugins.access.keys import new_key
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import identity, write_model
from tests.models.python_models import tensors, write_python_model
from tests.support.access_file import known_client
from tests.support.browser import Browser, browser
from tests.support.http_client import HttpClient
from tests.support.object_store import ObjectStore, held_download
from tests.support.scrape import until
from tests.support.server_process import ServerProcess, clean_server, kept_port, onnx_examples

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>"
_RUN = ".play button[type=submit]"
_FAILING = """
class TritonPythonModel:
    def execute(self, requests):
        return [None] * len(requests)
"""
_LENGTH = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(r, "X").as_numpy() for r in requests]
        lengths = [np.array([len(text[0])], np.int32) for text in texts]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", n)]) for n in lengths]
"""
_NO_NUMBERS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        found = pb_utils.Tensor("Y", np.array([np.nan, -np.inf, 0.5], np.float32))
        return [pb_utils.InferenceResponse([found]) for _ in requests]
"""
_OF_TEXT = tensors("input", ("X", "STRING", "1")) + tensors("output", ("Y", "INT32", "1"))
_DECLARED = tensors("input", ("X", "FP32", "1")) + tensors("output", ("Y", "FP32", "1"))
GRAPH = ensemble(
    (("x", "INT64", "2"),), (("y", "INT64", "2"),),
    step("whole", {"INPUT0": "x"}, {"OUTPUT0": "between"}),
    step("whole", {"INPUT0": "between"}, {"OUTPUT0": "y"}),
)  # fmt: skip


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose models may be controlled, with broken and oddly named ones."""
    root = tmp_path_factory.mktemp("models")
    onnx_examples(root, "storyteller", "text_language")
    write_model(root, HOSTILE, identity())
    write_model(root, "whole", identity(Datatype.INT64))
    write_model(root, "broken", b"no model")
    write_python_model(root, "worked", _FAILING, _DECLARED)
    write_python_model(root, "length", _LENGTH, _OF_TEXT)
    write_ensemble(root, "twice", GRAPH)
    options = ("--model-control-mode=explicit", "--load-model=*", "--exit-on-error=false")
    with clean_server(root, options=options) as process:
        yield process


@pytest.fixture
def page(window: Browser, server: ServerProcess) -> Iterator[Browser]:
    """The console of the server, whose scripts must log no error."""
    window.open("about:blank")
    window.open(f"{server.url}/console#/")
    window.await_text("digits", ".grid")
    window.messages()
    yield window
    assert not [text for text in window.messages() if "status of 4" not in text]


def show_model(page: Browser, name: str, version: str = "") -> None:
    """Go to a model's page, and wait for the form."""
    page.run("location.hash = '#/models/' + encodeURIComponent(arguments[0]) + arguments[1]",
             name, f"/{version}" if version else "")  # fmt: skip
    page.await_text("Run", ".play")


def test_models_with_their_states_and_reasons(page: Browser) -> None:
    text = page.text(".grid")
    assert HOSTILE in text
    assert "unavailable" in text
    assert "not a valid ONNX model" in text
    assert "broken version 1" in page.text(".degraded")
    assert page.run("return document.querySelectorAll('main img').length") == 0


def test_traffic_is_live(page: Browser, server: ServerProcess) -> None:
    def busy() -> bool:
        with HttpClient(server.url, binary=False) as client:
            for _ in range(20):
                client.infer("digits", {"image": np.zeros((1, 8, 8), np.float32)})
        return bool(
            page.run("return [...document.querySelectorAll('tr[data-key=\"digits/2\"] svg path')]"
                     ".some((path) => path.getAttribute('d').includes('L'))")
        )  # fmt: skip

    until(busy, "a line of requests")
    assert "µs" in page.text("tr[data-key='digits/2'] .c-p50") or "ms" in page.text(".c-p50")


def test_the_keyboard_alone(page: Browser) -> None:
    page.press("/")
    page.press(*"simple_s")
    page.await_text("1 of", ".bar")
    page.press("Escape", "Down", "Down", "Enter")
    page.await_text("simple_string", "h1")
    page.press("Escape")
    page.await_text("1 of", ".bar")  # as it was left, and the model has the focus
    assert page.run("return document.activeElement.textContent") == "simple_string"
    page.press("/")
    page.press(*"i")  # in place of what was there
    page.await_text("digits", ".grid")
    page.press("Escape", "Down", "j", "j", "k", "Enter")
    until(lambda: page.text("h1") != "", "a model")
    page.press("2")
    page.await_text("--max-admitted-requests")
    page.press("3")
    page.await_text("loaded digits version 2", ".log")
    page.press("?")
    page.await_text("this help", "dialog")
    page.press("Escape")
    until(lambda: not page.text("dialog"), "the dialog closed")
    page.press("1")
    page.await_text("digits", ".grid")
    assert page.run("return document.activeElement.tagName") != "BODY"  # but where one reads on


def test_sorting_and_filtering(page: Browser) -> None:
    page.run("document.querySelector('th.c-memory button').click()")
    assert page.run("return document.querySelector('th.c-memory').ariaSort") == "descending"
    page.fill(".bar select", "not ready")
    page.await_text("broken", ".grid")
    assert "digits" not in page.text(".grid")


def test_numbers_and_programs_that_do_the_same(
    page: Browser, server: ServerProcess, tmp_path: Path
) -> None:
    show_model(page, "digits", "2")
    page.fill(".play textarea", "1 2 3")
    page.click(_RUN)
    page.await_text("expected 64 values for the shape [1, 8, 8], got 3", ".answer")
    three = "0 0 9 16 10 1 0 0 0 0 8 3 16 4 0 0 0 0 0 5 14 2 0 0 0 0 0 2 16 15 7 0 0 0 0 0 0 3 15 2"
    page.fill(".play textarea", f"{three} 0 4 6 0 0 13 7 0 0 6 13 1 5 16 3 0 0 0 10 16 15 5 0 0")
    page.click(_RUN)
    page.await_text("label", ".answer")
    assert page.text(".output pre").strip() == "3"

    def program(number: int) -> str:
        page.click(f"[role=tab]:nth-child({number})")
        return page.text(".program")

    curl, python, grpc = (program(number) for number in (1, 2, 3))
    if shutil.which("curl"):
        answered = json.loads(_output(["sh", "-c", curl]))
        assert answered["outputs"][1]["data"] == [3]
    for source in (python, grpc):
        assert "'label': array([[3]])" in _output([sys.executable, "-c", source])


def _output(command: list[str]) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_an_image_from_a_file(page: Browser, tmp_path: Path) -> None:
    show_model(page, "digits", "2")
    pixels = np.zeros((8, 8), np.uint8)
    pixels[1:7, 4] = 255  # a one
    Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).save(tmp_path / "one.png")
    page.fill(".play select", "image")
    page.fill("[aria-label='value of white']", "16")
    page.type("[type=file]", str(tmp_path / "one.png"))
    page.await_text('"data":[0,0,', ".program")
    page.await_text(",16,", ".program")
    page.click(_RUN)
    page.await_text("label", ".answer")
    assert page.text(".output pre").strip() == "1"


def test_text_and_json(page: Browser) -> None:
    show_model(page, "text_language")
    page.fill(".play textarea", "Wann fährt der nächste Zug nach Hamburg?")
    page.click(_RUN)
    page.await_text("language", ".answer")
    page.await_text("de", ".answer")
    page.fill(".play select", "JSON")
    page.fill(".play textarea", '["Quelle heure est-il, s\'il vous plaît ?"]')
    page.click(_RUN)
    page.await_text("fr", ".answer")
    page.click("[role=tab]:nth-child(3)")
    assert "fr" in _output([sys.executable, "-c", page.text(".program")])


def test_a_file_as_it_is(page: Browser, tmp_path: Path) -> None:
    show_model(page, "length")
    page.fill(".play select", "file")
    page.await_text("choose a file", ".program")
    (tmp_path / "bytes.bin").write_bytes(bytes(range(256)))
    page.type("[type=file]", str(tmp_path / "bytes.bin"))
    page.await_text("in binary", ".program")
    page.click(_RUN)
    page.await_text("256", ".output")
    for number in (2, 3):
        page.click(f"[role=tab]:nth-child({number})")
        command = [sys.executable, "-c", page.text(".program")]
        assert "256" in subprocess.check_output(command, cwd=tmp_path, text=True, timeout=120)


def test_integers_keep_their_digits(page: Browser) -> None:
    show_model(page, "whole")
    page.fill(".play [type=number]", "1")
    page.fill(".area input:nth-child(1)", "9007199254740993")
    page.fill(".area input:nth-child(2)", "1.5")
    page.click(_RUN)
    page.await_text("expected an integer, got '1.5'", ".answer")
    page.fill(".area input:nth-child(2)", "-9223372036854775808")
    page.click(_RUN)
    page.await_text("9007199254740993", ".output")
    assert "-9223372036854775808" in page.text(".output")


def test_a_name_that_looks_like_html(page: Browser) -> None:
    show_model(page, HOSTILE)
    assert page.text("h1") == HOSTILE
    assert page.run("return document.querySelectorAll('main img').length") == 0


def test_an_address_with_a_bare_per_cent_sign(window: Browser, server: ServerProcess) -> None:
    window.open("about:blank")
    window.messages()
    window.open(f"{server.url}/console#/models/50%")
    window.await_text("not loaded", ".model")
    assert window.text("h1") == "50%"
    window.run("location.hash = '#/%'")
    window.await_text("digits", ".grid")
    assert not window.messages()


def test_a_stream(page: Browser) -> None:
    show_model(page, "storyteller")
    page.fill("fieldset:nth-of-type(1) textarea", "The miller")
    page.click(_RUN)
    page.await_text("responses in", ".play")
    page.await_text("text_output", ".events")
    for number in (2, 3):
        page.click(f"[role=tab]:nth-child({number})")
        assert "text_output" in _output([sys.executable, "-c", page.text(".program")])


def test_a_model_that_fails(page: Browser) -> None:
    show_model(page, "worked")
    page.click(_RUN)
    page.await_text("status 500", ".play")
    assert page.text(".answer .wrong")
    page.messages()


def texts(page: Browser, selector: str) -> list[str]:
    """The texts of elements, also of those in a picture."""
    found = page.run("return [...document.querySelectorAll(arguments[0])]"
                     ".map((each) => each.textContent)", selector)  # fmt: skip
    assert isinstance(found, list)
    return found


def test_outputs_that_are_no_numbers(window: Browser, tmp_path: Path) -> None:
    declared = tensors("input", ("X", "FP32", "1")) + tensors("output", ("Y", "FP32", "3"))
    write_python_model(tmp_path, "odd", _NO_NUMBERS, declared)
    with clean_server(tmp_path) as server:
        window.open("about:blank")
        window.open(f"{server.url}/console#/models/odd")
        window.await_text("Run", ".play")
        window.click(_RUN)
        window.await_text("answered after", ".play")
        assert "NaN, -Infinity, 0.5" in window.text(".output")


def test_the_graph_of_an_ensemble_with_the_state_of_its_steps(
    page: Browser, server: ServerProcess
) -> None:
    show_model(page, "twice")
    page.await_text("ready, ", ".graph")
    assert texts(page, ".graph rect + text") == ["x", "whole", "whole", "y"]
    assert texts(page, ".graph .edge") == ["between"]
    across = page.run("return [...document.querySelectorAll('.graph rect')]"
                      ".map((box) => box.x.baseVal.value)")  # fmt: skip
    assert across == sorted(set(across))

    def busy() -> bool:
        with HttpClient(server.url, binary=False) as client:
            client.infer("twice", {"x": np.ones((1, 2), np.int64)})
        return bool(re.search(r"[1-9]\S*/s", texts(page, ".graph .muted")[0]))

    until(busy, "the rate of a step")
    page.run("document.querySelector('.graph a').dispatchEvent(new MouseEvent('click',"
             " { bubbles: true, cancelable: true }))")  # fmt: skip
    page.await_text("whole", "h1")
    page.await_text("Run", ".play")
    assert page.run("return document.querySelectorAll('.graph').length") == 0


def test_unloading_loading_and_promoting(page: Browser) -> None:
    show_model(page, "simple")
    page.click("[data-action=unload]")
    page.await_text("Unload simple?", "dialog")
    page.click("dialog [type=button]")
    assert page.text(".title .state") == "ready"
    page.click("[data-action=unload]")
    page.click("dialog .danger")
    page.await_text("unload: done")
    page.await_text("unavailable", ".title .state")
    page.click("[data-action=load]")
    page.click("dialog .primary")
    page.await_text("load: done")
    until(lambda: page.text(".title .state") == "ready", "the model")
    show_model(page, "digits", "1")
    page.click("[data-action=promote]")
    page.click("dialog .primary")
    page.await_text("promote: done")
    page.await_text("100 %", ".columns")


def test_light_and_dark_and_narrow(page: Browser) -> None:
    def background() -> str:
        return str(page.run("return getComputedStyle(document.body).backgroundColor"))

    try:
        page.prefer("light")
        light = background()
        page.prefer("dark")
        assert background() != light
        page.resize(500, 800)
        assert page.run("return document.documentElement.scrollWidth - innerWidth") <= 0
    finally:
        page.resize(1400, 900)
        page.prefer("light")


def test_a_graph_of_steps_that_a_client_may_not_see(window: Browser, tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    write_model(models, "whole", identity(Datatype.INT64))
    write_ensemble(models, "twice", GRAPH)
    everything, part = new_key(), new_key()
    (tmp_path / "access.toml").write_text(
        known_client("ops", everything)
        + known_client("partner", part, ["observe", "read"], ["twice"])
    )
    with clean_server(models, options=(f"--access={tmp_path}/access.toml",)) as server:
        window.open("about:blank")
        window.open(f"{server.url}/console#/models/twice")
        window.await_text("Key for this session", "dialog")
        _give(window, part.key)
        window.await_text("INT64", ".columns")
        assert window.run("return document.querySelectorAll('.graph').length") == 0
        window.click("#key")
        _give(window, everything.key)
        window.await_text("ready, ", ".graph")


def test_keys_and_rights(window: Browser, tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    onnx_examples(models)
    everything, reader = new_key(), new_key()
    (tmp_path / "access.toml").write_text(
        known_client("ops", everything) + known_client("watcher", reader, ["observe", "read"])
    )
    options = (
        f"--access={tmp_path}/access.toml", "--model-control-mode=explicit", "--load-model=*",
        "--frontends=1",
    )  # fmt: skip
    with clean_server(models, options=options) as server:
        window.open(f"{server.url}/console#/")
        window.await_text("Key for this session", "dialog")
        window.type("dialog [name=key]", "wrong")
        window.press("Enter")
        window.await_text("the API key is unknown", "dialog")  # the next one
        _give(window, reader.key)
        window.await_text("watcher", "header")
        window.run("location.hash = '#/models/digits/2'")
        window.await_text("image", ".columns")
        assert window.text(".buttons") == ""
        assert window.text(".play") == ""
        window.run("location.hash = '#/log'")
        window.await_text("'admin'", ".log")
        window.click("#key")
        _give(window, everything.key)
        window.await_text("ops", "header")
        window.await_text("loaded digits version 2", ".log")
        show_model(window, "digits", "2")
        assert everything.key in window.text(".program")
        assert "Unload" in window.text(".title")
        window.click(_RUN)
        window.await_text("label", ".answer")
        window.click("[role=tab]:nth-child(3)")
        assert "label" in _output([sys.executable, "-c", window.text(".program")])
        assert window.run("return localStorage.length + document.cookie.length") == 0


def _give(window: Browser, key: str) -> None:
    window.fill("dialog [name=key]", key)
    window.click("dialog .primary")


def test_a_restricted_operation(window: Browser, tmp_path: Path) -> None:
    write_model(tmp_path, "same", identity())
    with clean_server(tmp_path, options=("--http-restricted-api=statistics:secret=7",)) as server:
        window.open("about:blank")
        window.open(f"{server.url}/console#/")
        window.await_text("expecting header 'secret'", "dialog")
        # No request can have such a header: nothing would be read any more.
        for wrong in ("secret", "my secret: 7", "secret: 7\u20ac"):
            window.fill("dialog [name=header]", wrong)
            window.click("dialog .primary")
            assert (
                window.run("return document.querySelector('dialog :invalid[name]').name")
                == "header"
            )
        window.fill("dialog [name=header]", "secret: 7")
        window.click("dialog .primary")
        window.await_text("same", ".grid")


def test_a_server_that_goes_away_and_comes_back(window: Browser, tmp_path: Path) -> None:
    write_model(tmp_path, "same", identity())
    with kept_port() as options:
        with ServerProcess(tmp_path, options=options) as server:
            window.open(f"{server.url}/console")
            window.await_text("same", ".grid")
        window.await_text("does not answer", "#notice")
        with ServerProcess(tmp_path, options=options):
            until(lambda: not window.text("#notice"), "an answer")
            window.await_text("ready", "#readiness")


def test_a_download(window: Browser, tmp_path: Path) -> None:
    with ObjectStore() as site, held_download(site, tmp_path) as held:
        window.open(f"{held.server.url}/console")
        window.await_text(f"8.00 MiB of 16.0 MiB\n{held.address}", ".downloads")
        assert held.let_go() == 200
        until(lambda: not window.text(".downloads:not([hidden])"), "the end of the download")


def test_hundreds_of_models(window: Browser, tmp_path: Path) -> None:
    model = identity()
    for number in range(300):
        write_model(tmp_path, f"model_{number:03}", model)
    with clean_server(tmp_path) as server:
        window.open(f"{server.url}/console")
        window.await_text("300 versions", ".bar")
        assert window.run("return document.querySelectorAll('tr[data-key]').length") < 60
        window.run("document.querySelector('.scroll').scrollTop = 1e6")
        window.await_text("model_299", ".grid")
        window.run("document.querySelector('.scroll').focus()")
        window.press("Down")
        window.await_text("model_000", ".grid")
