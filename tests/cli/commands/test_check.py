"""`headrace models check`: problems and their report."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.models import onnx_graphs
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.support.command import run, write_model
from tests.support.managed import write_managed, write_program
from tests.support.remote import write_remote
from tests.support.scrape import until


def test_check_of_a_good_repository(good: Path) -> None:
    ended = run("models", "check", str(good))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("ok    same (versions 1)\n")
    assert 'platform: "onnxruntime_onnx"' in ended.stdout
    assert ended.stdout.endswith("1 model, 0 with errors\n")


def test_check_of_a_bad_repository(bad: Path) -> None:
    ended = run("models", "check", str(bad))
    assert ended.returncode == 1
    assert "ERROR misconfigured\n      misconfigured/config.pbtxt:2" in ended.stdout
    assert "did you mean 'max_batch_size'?" in ended.stdout
    assert "ERROR no_model\n      model.onnx is not a valid ONNX model" in ended.stdout
    assert "ok    same (versions 1)\n" in ended.stdout
    assert ended.stdout.endswith("3 models, 2 with errors\n")


@pytest.mark.slow
def test_check_of_two_repositories_with_the_same_model(good: Path, bad: Path) -> None:
    ended = run("models", "check", str(good), str(bad))
    assert ended.returncode == 1
    assert "ERROR same\n      model appears in two or more repositories" in ended.stdout


def test_check_of_models_on_upstreams(tmp_path: Path) -> None:
    write_remote(tmp_path, "nobody", "127.0.0.1:1")
    write_remote(tmp_path, "nowhere", endpoint="grpc://gpu-1", endpoints="")
    ended = run("models", "check", "--quiet", str(tmp_path))
    assert ended.returncode == 1
    assert "no server answers for model 'nobody': grpc://127.0.0.1:1: Connection" in ended.stdout
    assert "['endpoint'] has no effect on this server; did you mean 'endpoints'?" in ended.stdout


@pytest.mark.slow
def test_check_without_a_triton(tmp_path: Path) -> None:
    write_managed(tmp_path)
    ended = run("models", "check", "--triton-server", "no-such-program", str(tmp_path))
    assert ended.returncode == 1
    text = "there is no program 'no-such-program' to run it; --triton-server names Triton's"
    assert text in ended.stdout


@pytest.mark.slow
def test_check_starts_tritons(tmp_path: Path) -> None:
    models, program = tmp_path / "models", write_program(tmp_path)
    write_managed(models)
    ended = run("models", "check", "--quiet", "--triton-server", str(program), str(models))
    assert (ended.returncode, ended.stdout) == (
        0, "ok    times (versions 1)\n1 model, 0 with errors\n",
    )  # fmt: skip
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_check_as_json(bad: Path) -> None:
    ended = run("models", "check", "--json", str(bad))
    assert (ended.returncode, ended.stderr) == (1, "")
    reports = {report["model"]: report for report in json.loads(ended.stdout)}
    assert {name: report["ok"] for name, report in reports.items()} == {
        "misconfigured": False, "no_model": False, "same": True,
    }  # fmt: skip
    assert reports["same"]["versions"] == [1]
    assert reports["same"]["config"]["max_batch_size"] == 64
    assert reports["same"]["config"]["input"][0]["data_type"] == "TYPE_FP32"
    assert "max_bach_size" in reports["misconfigured"]["error"]


@pytest.mark.slow
def test_check_of_an_empty_repository(tmp_path: Path) -> None:
    ended = run("models", "check", str(tmp_path))
    assert (ended.returncode, ended.stdout) == (1, "0 models, 0 with errors\n")
    assert "such as MODEL/VERSION/model.onnx" in ended.stderr
    assert "found nothing" in ended.stderr


def test_check_of_files_and_warnings(good: Path, tmp_path: Path) -> None:
    file = good / "same" / "1" / "model.onnx"
    config = tmp_path / "same" / "config.pbtxt"
    write_model(tmp_path / "same" / "1" / "model.onnx")
    config.write_text("model_operations { }\nversion_policy { specific { versions: [1, 3] } }")
    ended = run("models", "check", "--quiet", str(file), str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        "ok    same (versions 1)\n"
        "      warning: same/config.pbtxt:1: model_operations has no effect on this server\n"
        "      warning: same/config.pbtxt: version_policy names versions that are not there: 3\n"
        "ok    model (versions 1)\n"
        "2 models, 0 with errors\n"
    )


@pytest.mark.slow
def test_other_contents_of_a_repository_are_reported(good: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    ended = run("models", "check", str(tmp_path))
    assert ended.returncode == 1
    assert "found notes.txt" in ended.stderr
    write_model(tmp_path / "flat.onnx")
    ended = run("models", "check", str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"ok    {tmp_path.name} (versions 1)" in ended.stdout
    (tmp_path / "flat" / "01").mkdir(parents=True)
    ended = run("models", "check", str(tmp_path))
    assert "model 'flat' has no version directory" in ended.stdout
    assert "01: a version has no leading zero" in ended.stdout
    ended = run("serve", str(good), "--http-port=0")
    assert ended.returncode == 1
    assert "is a directory; serve it with --model-repository" in ended.stderr


def _take_interrupts() -> None:
    """A shell starts background processes with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupted_check_ends_silently(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    model = tmp_path / "endless.py"
    model.write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(600)\n")
    words = [sys.executable, "-m", "headrace", "models", "check", str(model)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_take_interrupts
    ) as process:
        until(lambda: begun.exists() or process.poll() is not None, "the model to be loaded")
        assert process.poll() is None, process.communicate()
        [worker] = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == (b"", b"")
        assert process.returncode == 130
    assert not worker.is_running()


def test_check_of_ensembles(tmp_path: Path) -> None:
    X, Y = (("x", "FP32", "2"),), (("y", "FP32", "2"),)
    onnx_graphs.write_model(tmp_path, "same", onnx_graphs.identity(), "max_batch_size: 8")
    once = ensemble(X, Y, step("same", {"INPUT0": "x"}, {"OUTPUT0": "y"}))
    write_ensemble(tmp_path, "a_nested", ensemble(X, Y, step("once", {"x": "x"}, {"y": "y"})))
    write_ensemble(tmp_path, "once", once)
    write_ensemble(tmp_path, "wide", once.replace("dims: [ 2 ]", "dims: [ 3 ]"))
    write_ensemble(tmp_path, "alone", once.replace('"same"', '"absent"'))
    ended = run("models", "check", "--quiet", str(tmp_path))
    assert ended.returncode == 1
    assert "ok    a_nested (versions 1)\n" in ended.stdout
    assert "ok    once (versions 1)\n" in ended.stdout
    assert "ERROR wide\n      wide/config.pbtxt:" in ended.stdout
    assert "the shape [-1,2], and output 'y' of the ensemble the shape [-1,3]" in ended.stdout
    assert "ensemble 'alone' depends on 'absent' which has no loaded version" in ended.stdout
    assert ended.stdout.endswith("5 models, 2 with errors\n")
