"""Ensembles over every door: what their steps do with requests, and what clients see of it."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.core.datatypes import Datatype
from headrace.core.errors import InvalidRequest, ServerError, Unavailable
from headrace.core.tensors import Array
from headrace.protocol.pb import grpc_service_pb2 as pb
from tests.contract import graphs
from tests.contract.conftest import CARRIERS, CLIENTS, FIRST_CARRIER
from tests.models.ensembles import ensemble, step, write_ensemble
from tests.models.onnx_graphs import add_sub, identity, write_model
from tests.models.python_models import execution, tensors, write_python_model
from tests.models.streaming_models import TELLER, TELLER_CONFIG
from tests.support.client import Client, Input, Parameter, strings
from tests.support.grpc_client import GrpcClient, infer_message
from tests.support.grpc_stream import Stream
from tests.support.held import Gates, write_held_model
from tests.support.http_socket import ask, events
from tests.support.scrape import Scraper, until
from tests.support.server_process import ServerProcess, clean_server
from tests.support.traces import read_traces
from tests.support.uncollected import PROGRAM, UNCOLLECTED, garbage

X, Y = (("x", "FP32", "1"),), (("y", "FP32", "1"),)
ONE, TWO = {"INPUT0": "x"}, {"INPUT0": "m"}
CHAIN = ensemble(
    X, Y, step("plus_1", ONE, {"OUTPUT0": "m"}), step("plus_10", TWO, {"OUTPUT0": "y"})
)
DIAMOND = ensemble(
    X,
    (("sum", "FP32", "1"), ("difference", "FP32", "1")),
    step("plus_1", ONE, {"OUTPUT0": "a"}),
    step("plus_10", ONE, {"OUTPUT0": "b"}),
    step("add_sub", {"INPUT0": "a", "INPUT1": "b"},
         {"OUTPUT0": "sum", "OUTPUT1": "difference"}),
)  # fmt: skip
NESTED = ensemble(
    X, Y, step("chain", {"x": "x"}, {"y": "m"}), step("chain", {"x": "m"}, {"y": "y"})
)
BRANCHES = ensemble(
    X,
    (("near", "FP32", "1"), ("far", "FP32", "1")),
    step("plus_1", ONE, {"OUTPUT0": "near"}),
    step("counted", ONE, {"OUTPUT0": "far"}),
)
# Rows are a dimension like any other here, and a batch of one in its models.
UNBATCHED = ensemble(
    (("x", "FP32", "1"),), (("y", "FP32", "1"),),
    step("plus_1", ONE, {"OUTPUT0": "m"}), step("chain", {"x": "m"}, {"y": "y"}), rows=0,
)  # fmt: skip
BOTH = ensemble(
    (("x", "FP32", "-1, 1"),), (("y", "FP32", "-1"),),
    step("plus_1", ONE, {"OUTPUT0": "m"}), step("flat", TWO, {"OUTPUT0": "y"}), rows=0,
)  # fmt: skip
OPTIONAL = ensemble(
    (("x", "FP32", "-1"),), (("y", "FP32", "-1"),),
    step("biased", {"INPUT0": "x", "BIAS": "bias"}, {"OUTPUT0": "y"}), rows=0,
) + 'input { name: "bias" data_type: TYPE_FP32 dims: [ 1 ] optional: true }\n'  # fmt: skip
RESHAPED = (
    'platform: "ensemble"\nmax_batch_size: 8\n'
    'input { name: "x" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: [ 4 ] } }\n'
    'output { name: "y" data_type: TYPE_FP32 dims: [ 4, 1 ] reshape { shape: [ 4 ] } }\n'
    f"ensemble_scheduling {{ {step('four', ONE, {'OUTPUT0': 'y'})} }}\n"
)
SCALARS = ensemble(X, Y, step("scalars", ONE, {"OUTPUT0": "y"}))
SHAKY = ensemble(X, Y, step("plus_1", ONE, {"OUTPUT0": "m"}), step("shaky", TWO, {"OUTPUT0": "y"}))
TOLD = ensemble(X, (("told", "STRING", "1"),), step("asked", ONE, {"OUTPUT0": "told"}))
SILENT = ensemble(X, Y, step("silent", ONE, {"OUTPUT0": "y"}))
BROKEN = ensemble(
    X, Y, step("silent", ONE, {"OUTPUT0": "m"}), step("plus_1", TWO, {"OUTPUT0": "y"})
)
HELD = ensemble(
    (("v", "INT64", "1"),), (("w", "INT64", "1"),),
    step("held", {"VALUE": "v"}, {"OUTPUT0": "m"}), step("held", {"VALUE": "m"}, {"OUTPUT0": "w"}),
)  # fmt: skip
SHORT = ensemble(
    (("v", "INT64", "1"),), (("w", "INT64", "1"),),
    step("short", {"VALUE": "v"}, {"OUTPUT0": "w"}), rows=1,
)  # fmt: skip
TALES = ensemble(
    (("text", "STRING", "1"), ("count", "INT32", "1"), ("extra", "INT64", "1")),
    (("out", "STRING", "1"), ("total", "INT64", "1")),
    step("teller", {"TEXT": "text", "COUNT": "count"}, {"OUT": "out", "INDEX": "index"}),
    step("longer", {"INPUT0": "index"}, {"OUTPUT0": "long"}),
    step("held", {"VALUE": "extra"}, {"OUTPUT0": "late"}),
    step("sum64", {"INPUT0": "long", "INPUT1": "late"}, {"OUTPUT0": "total"}),
)  # fmt: skip
NARROW = TALES.replace("ensemble_scheduling {", "ensemble_scheduling { max_inflight_requests: 1")

PYTHON = """
    import triton_python_backend_utils as pb_utils


    class TritonPythonModel:
        calls = 0

        def execute(self, requests):
            responses = []
            for request in requests:
                value = pb_utils.get_input_tensor_by_name(request, "INPUT0")
                {}
            return responses
"""
IN_PROCESS = (
    f"max_batch_size: 8\n{execution('thread')}"
    + tensors("input", ("INPUT0", "FP32", "1"))
    + tensors("output", ("OUTPUT0", "FP32", "1"))
)


def python(*lines: str) -> str:
    """A Python model with these lines for each request, whose input is `value`."""
    return PYTHON.replace("{}", ("\n" + " " * 16).join(lines))


GIVE = 'responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", {})]))'


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, gates: Gates) -> Path:
    root = tmp_path_factory.mktemp("ensembles")
    for number in (1, 10):
        write_model(root, f"plus_{number}", graphs.add_constant(number), "max_batch_size: 8")
    write_model(root, "add_sub", add_sub(Datatype.FP32, 1), "max_batch_size: 8")
    write_model(root, "sum64", add_sub(Datatype.INT64, 1), "max_batch_size: 8")
    write_python_model(
        root, "longer", python(GIVE.format("value.as_numpy().astype('int64')")),
        IN_PROCESS.replace("FP32", "INT32", 1).replace("FP32", "INT64"),
    )  # fmt: skip
    write_model(root, "four", identity(Datatype.FP32, ["rows", 4]), "max_batch_size: 8")
    write_model(root, "scalars", identity(Datatype.FP32, ["rows"]), "max_batch_size: 8")
    write_model(root, "flat", identity(Datatype.FP32, ["rows", 1]), (
        "max_batch_size: 0\n"
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, 1 ] }\n'
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] reshape { shape: [ -1, 1 ] } }'
    ))  # fmt: skip
    write_model(root, "biased", graphs.optional_bias(), (
        'max_batch_size: 0\ninput [ { name: "INPUT0" }, { name: "BIAS" optional: true } ]'
    ))  # fmt: skip
    write_python_model(root, "counted", python(GIVE.format("value.as_numpy()")), IN_PROCESS)
    write_python_model(root, "shaky", python(
        "if value.as_numpy()[0, 0] < 0:",
        '    error = pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)',
        "    responses.append(pb_utils.InferenceResponse(error=error))",
        "else:", f"    {GIVE.format('value.as_numpy()')}",
    ), IN_PROCESS)  # fmt: skip
    write_python_model(root, "asked", python(
        "import json, numpy",
        "told = [request.request_id(), json.loads(request.parameters() or '{}')]",
        GIVE.format("numpy.array([[json.dumps(told).encode()]], object)"),
    ), IN_PROCESS.replace('name: "OUTPUT0" data_type: TYPE_FP32',
                          'name: "OUTPUT0" data_type: TYPE_STRING'))  # fmt: skip
    silent = python("responses.append(pb_utils.InferenceResponse([]))")
    write_python_model(root, "silent", silent, IN_PROCESS)
    write_held_model(root, "held", gates.folder, rows=8)
    limit = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    write_held_model(root, "short", gates.folder, limit, rows=1)
    write_python_model(root, "teller", TELLER, TELLER_CONFIG)
    for name, config in (
        ("chain", CHAIN), ("diamond", DIAMOND), ("nested", NESTED), ("branches", BRANCHES),
        ("unbatched", UNBATCHED), ("both", BOTH), ("optional", OPTIONAL), ("reshaped", RESHAPED),
        ("as_scalars", SCALARS), ("shaky_chain", SHAKY), ("told", TOLD), ("nothing", SILENT),
        ("broken", BROKEN),
        ("held_chain", HELD), ("short_chain", SHORT), ("tales", TALES), ("narrow", NARROW),
    ):  # fmt: skip
        write_ensemble(root, name, config)
    return root


@pytest.fixture(scope="module", params=FIRST_CARRIER)
def server(request: pytest.FixtureRequest, models: Path) -> Iterator[ServerProcess]:
    options = ("--allow-in-process-python", *CARRIERS[request.param])
    with clean_server(models, options=options) as process:
        yield process


@pytest.fixture(scope="module")
def scraper(server: ServerProcess) -> Iterator[Scraper]:
    with Scraper(server.metrics) as scraper:
        yield scraper


def rows(*values: float) -> Array:
    return np.array(values, np.float32).reshape(-1, 1)


def test_steps_in_a_row(client: Client) -> None:
    answer = client.infer("chain", {"x": rows(1, 2)}, id="seven")
    assert (answer.model_name, answer.model_version, answer.id) == ("chain", "1", "seven")
    assert answer["y"].tolist() == [[12], [13]]


def test_branches_that_meet(client: Client) -> None:
    answer = client.infer("diamond", {"x": rows(5)})
    assert answer["sum"].tolist() == [[21]]
    assert answer["difference"].tolist() == [[-9]]
    assert list(client.infer("diamond", {"x": rows(5)}, outputs=["difference"]).outputs) == [
        "difference"
    ]


def test_an_ensemble_of_ensembles(client: Client) -> None:
    assert client.infer("nested", {"x": rows(1)})["y"].tolist() == [[23]]


def test_steps_for_outputs_that_are_not_asked_for_do_not_run(client: Client) -> None:
    def counted() -> int:
        [found] = client.statistics("counted")
        return found.inference_count

    before = counted()
    assert client.infer("branches", {"x": rows(1)}, outputs=["near"])["near"].tolist() == [[2]]
    assert counted() == before
    assert client.infer("branches", {"x": rows(1)})["far"].tolist() == [[1]]
    assert counted() == before + 1


def test_an_ensemble_that_does_not_batch_of_models_that_do(client: Client) -> None:
    answer = client.infer("unbatched", {"x": np.array([1], np.float32)})
    assert answer["y"].tolist() == [13]


def test_rows_that_are_a_dimension_of_the_next_model(client: Client) -> None:
    assert client.infer("both", {"x": rows(1, 2, 3)})["y"].tolist() == [2, 3, 4]


def test_an_optional_input(client: Client) -> None:
    x, bias = np.array([1, 2], np.float32), np.array([10], np.float32)
    assert client.infer("optional", {"x": x})["y"].tolist() == [101, 102]
    assert client.infer("optional", {"x": x, "bias": bias})["y"].tolist() == [11, 12]


def test_reshaped_tensors(client: Client) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    assert client.infer("reshaped", {"x": x})["y"].tolist() == x.reshape(2, 4, 1).tolist()
    assert client.infer("as_scalars", {"x": rows(1, 2)})["y"].tolist() == [[1], [2]]


def test_id_and_parameters_reach_the_steps(client: Client) -> None:
    given: dict[str, Parameter] = {"tone": "warm", "depth": 3}
    answer = client.infer("told", {"x": rows(1)}, id="a-1", parameters=given)
    assert json.loads(answer["told"].item()) == ["a-1", given]


def test_a_failing_step(client: Client) -> None:
    before = failures(client)
    with pytest.raises(InvalidRequest, match=r"^in ensemble 'shaky_chain', negative$"):
        client.infer("shaky_chain", {"x": rows(-5)})
    assert failures(client) == before + 1
    assert client.infer("shaky_chain", {"x": rows(5)})["y"].tolist() == [[6]]


def failures(client: Client) -> int:
    [found] = client.statistics("shaky_chain")
    return found.inference_stats.fail.count


def test_an_output_that_never_comes(client: Client) -> None:
    assert client.infer("nothing", {"x": rows(1)}).outputs == {}  # as in Triton
    text = "in ensemble 'broken', .*but missing required input\\(s\\) \\['INPUT0'\\]"
    with pytest.raises(InvalidRequest, match=text):
        client.infer("broken", {"x": rows(1)})


def test_statistics_are_those_of_the_steps_together(client: Client) -> None:
    def read() -> tuple[int, int, int, int]:
        [found] = client.statistics("chain")
        times = found.inference_stats
        assert times.success.count == times.compute_infer.count
        return (
            found.inference_count, found.execution_count, times.queue.ns, times.compute_infer.ns
        )  # fmt: skip

    def of_steps() -> int:
        found = [client.statistics(name)[0] for name in ("plus_1", "plus_10")]
        return sum(one.inference_stats.compute_infer.ns for one in found)

    before, spent = read(), of_steps()
    client.infer("chain", {"x": rows(1, 2, 3)})
    after = read()
    assert after[0] == before[0] + 3
    assert after[1] == before[1] + 1
    assert after[2] == before[2] == 0
    assert after[3] - before[3] == of_steps() - spent


def test_steps_batch_across_requests(
    server: ServerProcess, scraper: Scraper, pool: ThreadPoolExecutor, number: int, gates: Gates
) -> None:
    with GrpcClient(server.grpc) as client:

        def executions() -> int:
            [found] = client.statistics("held")
            return found.execution_count

        before = executions()
        first = pool.submit(client.infer, "held", {"VALUE": np.array([[number]])})
        scraper.until_running("held")
        values = [np.array([[value]]) for value in range(4)]
        sent = [pool.submit(client.infer, "held_chain", {"v": value}) for value in values]
        scraper.until_queued("held", 4)
        gates.open(number)
        for value, answer in zip(values, sent, strict=True):
            assert answer.result()["w"].tolist() == value.tolist()
        first.result()
        # That of the closed gate, and one of all four requests for each of the two steps.
        assert executions() - before == 3


def test_a_full_queue_of_a_step(
    server: ServerProcess, client: Client, scraper: Scraper, pool: ThreadPoolExecutor,
    number: int, gates: Gates,
) -> None:  # fmt: skip
    closed = {"VALUE": np.array([[number]])}
    running = pool.submit(client.infer, "short", closed)
    scraper.until_running("short")
    waiting = pool.submit(client.infer, "short", closed)
    scraper.until_queued("short", 1)
    text = r"^in ensemble 'short_chain', \[request id: 7\] Exceeds maximum queue size"

    def failed() -> float:
        labels = {"model": "short_chain", "reason": "OTHER"}
        return scraper.now().value("nv_inference_request_failure", **labels)

    before = failed()
    with pytest.raises(Unavailable, match=text):
        client.infer("short_chain", {"v": np.array([[1]])}, id="7")
    assert failed() == before + 1
    gates.open(number)
    running.result()
    waiting.result()


def test_one_time_out_for_all_steps(
    client: Client, scraper: Scraper, pool: ThreadPoolExecutor, number: int, gates: Gates
) -> None:
    running = pool.submit(client.infer, "held", {"VALUE": np.array([[number]])})
    scraper.until_running("held")
    with pytest.raises(Unavailable, match=r"^in ensemble 'held_chain', Request timeout expired"):
        client.infer("held_chain", {"v": np.array([[1]])}, parameters={"timeout": 20_000})
    gates.open(number)
    running.result()


def test_a_cancelled_request_cancels_its_steps(
    server: ServerProcess, scraper: Scraper, pool: ThreadPoolExecutor, number: int, gates: Gates
) -> None:
    def cancelled(model: str) -> float:
        return scraper.now().value("nv_inference_request_failure", model=model, reason="CANCELED")

    with GrpcClient(server.grpc) as client:
        running = pool.submit(client.infer, "held", {"VALUE": np.array([[number]])})
        scraper.until_running("held")
        before = cancelled("held"), cancelled("held_chain")
        infer = client.procedure("ModelInfer", pb.ModelInferResponse)
        call = infer.future(infer_message("held_chain", [Input("v", np.array([[1]]))]))
        scraper.until_queued("held", 1)
        call.cancel()
        scraper.until_queued("held", 0)
        until(
            lambda: (cancelled("held"), cancelled("held_chain")) == (before[0] + 1, before[1] + 1),
            "the request and its step to be cancelled",
        )
        gates.open(number)
        running.result()


def tale(text: str, count: int, extra: int, model: str = "tales") -> pb.ModelInferRequest:
    inputs = [
        Input("text", strings([text.encode()], [1, 1])),
        Input("count", np.array([[count]], np.int32)),
        Input("extra", np.array([[extra]])),
    ]
    return infer_message(
        model, inputs, id=text, parameters={"triton_enable_empty_final_response": True}
    )


def read_tale(stream: Stream) -> list[tuple[str, int]]:
    """The responses of one request; its end is a message of its own, or that of the last one."""
    found = []
    while True:
        message = stream.receive()
        assert not message.error_message
        response = message.infer_response
        if response.outputs:
            assert [output.name for output in response.outputs] == ["out", "total"]
            text, total = response.raw_output_contents
            found.append((text[4:].decode(), int(np.frombuffer(total, np.int64)[0])))
        if response.parameters["triton_final_response"].bool_param:
            return found


@pytest.mark.parametrize("model", ["tales", "narrow"])
def test_each_response_of_a_decoupled_step_goes_on_by_itself(
    server: ServerProcess, number: int, gates: Gates, model: str
) -> None:
    with GrpcClient(server.grpc) as client, Stream(client) as stream:
        assert client.model_config(model).model_transaction_policy.decoupled
        stream.send(tale("a", 4, number, model))
        gates.open(number)  # its responses wait for a step that is not behind the decoupled one
        assert read_tale(stream) == [(f"a{n}", number + n) for n in range(4)]
        stream.send(tale("none", 0, 1, model))
        assert read_tale(stream) == []
        stream.half_close()
        assert stream.rest() == []


def test_a_decoupled_ensemble_has_no_single_answer(client: Client) -> None:
    given = {
        "text": strings([b"a"], [1, 1]), "count": np.array([[1]], np.int32),
        "extra": np.array([[1]]),
    }  # fmt: skip
    with pytest.raises(ServerError, match="doesn't support models with decoupled"):
        client.infer("tales", given)


def test_a_generated_stream(server: ServerProcess) -> None:
    body = json.dumps({"text": "b", "count": 3, "extra": 10}).encode()
    answer = ask(server.http, "POST", "/v2/models/tales/generate_stream", body)
    found = [(event["out"], event["total"]) for event in events(answer)]
    assert found == [("b0", 10), ("b1", 11), ("b2", 12)]


def test_metrics_of_steps(server: ServerProcess, client: Client, scraper: Scraper) -> None:
    def read(name: str, number: str) -> float:
        return scraper.now().value(f"headrace_step_{name}", model="shaky_chain", step=number)

    before = read("requests_total", "0:plus_1"), read("failures_total", "1:shaky")
    with pytest.raises(InvalidRequest):
        client.infer("shaky_chain", {"x": rows(-5)})
    assert read("requests_total", "0:plus_1") == before[0] + 1
    assert read("failures_total", "1:shaky") == before[1] + 1
    assert read("duration_us_total", "1:shaky") > 0


def test_metadata_and_configuration(client: Client) -> None:
    found = client.model_metadata("diamond")
    assert found.platform == "ensemble"
    assert [(one.name, list(one.shape)) for one in found.outputs] == [
        ("sum", [-1, 1]), ("difference", [-1, 1])
    ]  # fmt: skip
    config = client.model_config("diamond")
    assert [one.model_name for one in config.ensemble_scheduling.step] == [
        "plus_1", "plus_10", "add_sub"
    ]  # fmt: skip
    assert not config.instance_group


def test_traces_by_step(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces"
    options = (
        "--allow-in-process-python", f"--trace-config=triton,file={file}",
        "--trace-config=level=TIMESTAMPS", "--trace-config=rate=1",
    )  # fmt: skip
    with clean_server(models, options=options) as process:
        with GrpcClient(process.grpc) as client:
            client.infer("nested", {"x": rows(1)})
        assert process.stop() == 0
    heads = [trace.head for trace in read_traces(file)]
    by_number = {head["id"]: head for head in heads}
    found = sorted(
        (head["model_name"], by_number[head["parent_id"]]["model_name"] if "parent_id" in head
         else "") for head in heads
    )  # fmt: skip
    assert found == [
        ("chain", "nested"), ("chain", "nested"), ("nested", ""), ("plus_1", "chain"),
        ("plus_1", "chain"), ("plus_10", "chain"), ("plus_10", "chain"),
    ]  # fmt: skip


def test_requests_under_way_are_finished_at_the_end(
    models: Path, gates: Gates, number: int, pool: ThreadPoolExecutor
) -> None:
    with (
        ServerProcess(models, options=("--allow-in-process-python",)) as process,
        GrpcClient(process.grpc) as client,
        Scraper(process.metrics) as scraper,
    ):
        sent = pool.submit(client.infer, "held_chain", {"v": np.array([[number]])})
        scraper.until_running("held")
        stopped = pool.submit(process.stop)
        process.await_logged("shutting down")
        gates.open(number)
        assert sent.result()["w"].tolist() == [[number]]
        assert stopped.result() == 0
        assert "bug " not in process.log


def test_requests_leave_no_cycles(
    models: Path, tmp_path: Path, gates: Gates, number: int, pool: ThreadPoolExecutor
) -> None:
    path = tmp_path / "socket"
    with (
        ServerProcess(
            models, options=("--allow-in-process-python",), environment={UNCOLLECTED: str(path)},
            program=PROGRAM,
        ) as process,
        GrpcClient(process.grpc) as client,
        Scraper(process.metrics) as scraper,
        Stream(client) as stream,
    ):  # fmt: skip

        def work() -> None:
            client.infer("diamond", {"x": rows(1)})
            client.infer("nested", {"x": rows(1)}, parameters={"timeout": 60_000_000})
            with pytest.raises(InvalidRequest):
                client.infer("shaky_chain", {"x": rows(-5)})
            with pytest.raises(InvalidRequest):
                client.infer("broken", {"x": rows(-5)})
            stream.send(tale("a", 3, 0))
            assert len(read_tale(stream)) == 3

        work()  # what is imported and made once
        garbage(path)
        work()
        gates.close(number)
        running = pool.submit(client.infer, "held", {"VALUE": np.array([[number]])})
        scraper.until_running("held")
        infer = client.procedure("ModelInfer", pb.ModelInferResponse)
        call = infer.future(infer_message("held_chain", [Input("v", np.array([[1]]))]))
        scraper.until_queued("held", 1)
        call.cancel()
        scraper.until_queued("held", 0)
        gates.open(number)
        running.result()
        scraper.until_idle()
        left = garbage(path)
        assert not [name for name in left if "nsemble" in name or "Step" in name or "Call" in name]
        assert process.stop() == 0


def test_steps_answered_by_a_cache(tmp_path: Path) -> None:
    cached = "max_batch_size: 8\nresponse_cache { enable: true }"
    for number in (1, 10):
        write_model(tmp_path, f"plus_{number}", graphs.add_constant(number), cached)
    write_ensemble(tmp_path, "chain", CHAIN)
    options = ("--cache-config=local,size=1048576",)
    with clean_server(tmp_path, options=options) as process:
        for number, make in enumerate(CLIENTS.values(), 1):
            with make(process) as client:
                for _ in range(3):  # from the second time on all steps are answered at once
                    answer = client.infer("chain", {"x": rows(number, -number)}, id="c")
                    assert answer["y"].tolist() == [[11 + number], [11 - number]]
                [step_model] = client.statistics("plus_10")
                assert step_model.inference_stats.cache_hit.count == 2 * number
                [found] = client.statistics("chain")
                counts = (found.execution_count, found.inference_stats.success.count)
                assert counts == (3 * number, 3 * number)
