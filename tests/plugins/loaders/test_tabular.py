"""Tables as inputs of models from files: names of columns reach clients, which arrange by them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace import Client
from headrace.client import InputError, StatusError
from headrace.core.datatypes import Datatype
from tests.models.onnx_graphs import add_sub, identity, write_model
from tests.plugins.loaders.conftest import imported
from tests.support.remote import write_remote
from tests.support.server_process import ServerProcess, clean_server

NAMES = ["sepal length (cm)", "b", "c"]
NUMBERS = np.random.default_rng(1).normal(size=(60, 3))
TARGET = NUMBERS @ [100.0, 10.0, 1.0]
ROWS = 9


@pytest.fixture(scope="module")
def frame(pd: Any) -> Any:
    return pd.DataFrame(NUMBERS, columns=NAMES)


def put(root: Path, name: str, file: str = "") -> str:
    """The place of a model's file."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    return str(folder / file)


def saved_lightgbm(root: Path, data: Any, target: Any, name: str = "lightgbm") -> Any:
    library = imported("lightgbm")
    options = {"num_threads": 1, "verbose": -1, "min_data_in_leaf": 2}
    booster = library.train(options, library.Dataset(data, target), 4)
    booster.save_model(put(root, name, "model.txt"))
    return booster


def saved_xgboost(root: Path, frame: Any) -> Any:
    model = imported("xgboost").XGBRegressor(n_estimators=4, n_jobs=1).fit(frame, TARGET)
    model.save_model(put(root, "xgboost", "model.json"))
    return model


def saved_catboost(root: Path, frame: Any) -> Any:
    options = {"thread_count": 1, "iterations": 4, "verbose": 0, "allow_writing_files": False}
    model = imported("catboost").CatBoostRegressor(**options).fit(frame, TARGET)
    model.save_model(put(root, "catboost", "model.cbm"))
    return model


def saved_sklearn(root: Path, frame: Any) -> Any:
    imported("sklearn")
    from sklearn.linear_model import LinearRegression

    model = LinearRegression().fit(frame, TARGET)
    imported("skops.io").dump(model, put(root, "sklearn", "model.skops"))
    return model


def saved_mlflow(root: Path, frame: Any, model: Any) -> Any:
    mlflow = imported("mlflow.sklearn")
    signature = imported("mlflow.models").infer_signature(frame, TARGET)
    folder = put(root, "mlflow", "model")
    requirements = ["mlflow-skinny"]
    mlflow.save_model(model, folder, signature=signature, pip_requirements=requirements)
    (Path(folder) / "requirements.txt").write_text("")  # the server's own packages
    trust = 'parameters { key: "trust_model_code" value { string_value: "true" } }'
    (root / "mlflow" / "config.pbtxt").write_text(trust)
    return model


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory, frame: Any) -> dict[str, Any]:
    """The repository of the models, and the prediction of each for the first rows."""
    root = tmp_path_factory.mktemp("columns")
    linear = saved_sklearn(root, frame)
    models = {
        "lightgbm": saved_lightgbm(root, frame, TARGET), "xgboost": saved_xgboost(root, frame),
        "catboost": saved_catboost(root, frame), "sklearn": linear,
        "mlflow": saved_mlflow(root, frame, linear),
    }  # fmt: skip
    found = {name: np.ravel(model.predict(frame[:ROWS])) for name, model in models.items()}
    return {"root": root} | found


@pytest.fixture(scope="module")
def server(predicted: dict[str, Any]) -> Iterator[ServerProcess]:
    with clean_server(predicted["root"], options=("--default-max-batch-size=4",)) as process:
        yield process


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow gives advice by warnings
@pytest.mark.parametrize("name", ["lightgbm", "xgboost", "catboost", "sklearn", "mlflow"])
def test_columns_in_any_order(
    server: ServerProcess, predicted: dict[str, Any], frame: Any, name: str
) -> None:
    with Client(server.url) as client, Client(f"grpc://{server.grpc}") as grpc:
        shuffled = frame[:ROWS][NAMES[::-1]]
        for model in (client.model(name), grpc.model(name)):
            found = model.infer(shuffled)
            np.testing.assert_allclose(found["predict"].ravel(), predicted[name], rtol=1e-5)
            np.testing.assert_array_equal(model(shuffled)["predict"], found["predict"])
        found = client.infer(name, shuffled)
        np.testing.assert_allclose(found["predict"].ravel(), predicted[name], rtol=1e-5)
        for wrong, column in (
            (shuffled.drop(columns="b"), "b"),
            (shuffled.assign(id=1), "id"),
        ):
            with pytest.raises((InputError, StatusError), match=f"'{column}'| {column} FP64"):
                client.infer(name, wrong)


@pytest.mark.slow
def test_names_reach_clients(tmp_path: Path, frame: Any, pd: Any) -> None:
    """In metadata and configuration, unless the library has made them up."""
    saved_lightgbm(tmp_path, frame, TARGET)
    saved_lightgbm(tmp_path, NUMBERS, TARGET, "numbered")
    with clean_server(tmp_path) as server, Client(server.url) as client:
        names = '{"input-0": ["sepal_length_(cm)", "b", "c"]}'
        assert client.model_metadata("lightgbm")["properties"]["columns"] == names
        assert client.model_config("lightgbm")["parameters"]["columns"]["string_value"] == names
        assert "columns" not in client.model_metadata("numbered")["properties"]
        given = frame[:ROWS]
        matrix = client.infer("lightgbm", {"input-0": given.to_numpy(np.float32)}).array
        shuffled = {"input-0": given[NAMES[::-1]]}
        np.testing.assert_array_equal(client.infer("lightgbm", shuffled).array, matrix)
        np.testing.assert_array_equal(client.model("lightgbm").infer(shuffled).array, matrix)
        client.model("numbered").infer(pd.DataFrame(NUMBERS[:ROWS]))
        for number, address in enumerate((server.url, server.grpc)):
            root = tmp_path.with_name(f"{tmp_path.name}-proxy-{number}")
            write_remote(root, "lightgbm", address)
            with clean_server(root) as near, Client(near.url) as proxied:
                assert proxied.model_metadata("lightgbm")["properties"]["columns"] == names
                np.testing.assert_array_equal(proxied.infer("lightgbm", shuffled).array, matrix)


@pytest.mark.slow
def test_a_model_trained_anew(tmp_path: Path, frame: Any) -> None:
    """The client's memory of the order would be wrong silently."""
    saved_lightgbm(tmp_path, frame, TARGET)
    options = ("--model-control-mode=explicit", "--load-model=*")
    with clean_server(tmp_path, options=options) as server, Client(server.url) as client:
        model = client.model("lightgbm")
        model.infer(frame[:ROWS])
        (tmp_path / "lightgbm" / "1" / "model.txt").unlink()
        (tmp_path / "lightgbm" / "1").rmdir()
        booster = saved_lightgbm(tmp_path, frame[NAMES[::-1]], TARGET)
        client.load("lightgbm")
        expected = booster.predict(frame[:ROWS][NAMES[::-1]])
        np.testing.assert_allclose(model.infer(frame[:ROWS]).array.ravel(), expected, rtol=1e-5)


def test_configured_names(tmp_path: Path, pd: Any) -> None:
    """An ONNX file has no names of columns; its configuration can."""
    config = (
        'parameters { key: "columns" value { string_value: "{\\"INPUT0\\": [\\"a\\",\\"b\\"]}" } }'
    )
    write_model(tmp_path, "named", identity(), config)
    write_model(tmp_path, "columns", add_sub(Datatype.FP32, 1))
    with headrace.serve(tmp_path) as server:
        table = pd.DataFrame({"b": [2.0, 4.0], "a": [1.0, 3.0]})
        assert server.client.model("named")(table).array.tolist() == [[1, 2], [3, 4]]
        assert "has no effect" not in server.log
        pair = pd.DataFrame({"INPUT1": [1.0], "INPUT0": [5.0]})
        assert server.client.infer("columns", pair)["OUTPUT1"].tolist() == [[4]]
        with pytest.raises(InputError, match="has no input 'x'"):
            server.client.infer("columns", pair.assign(x=1))
        with pytest.raises(InputError, match="needs the input INPUT1"):
            server.client.infer("columns", pair[["INPUT0"]])


@pytest.mark.slow
def test_names_that_contradict_the_file(tmp_path: Path, frame: Any) -> None:
    saved_lightgbm(tmp_path, frame, TARGET)
    text = '{\\"input-0\\": [\\"b\\", \\"a\\", \\"c\\"]}'
    config = f'parameters {{ key: "columns" value {{ string_value: "{text}" }} }}'
    (tmp_path / "lightgbm" / "config.pbtxt").write_text(config)
    with pytest.raises(headrace.ServeError, match=r"with the columns sepal_length_\(cm\), b, c"):
        headrace.serve(tmp_path)
