"""Source texts of models that use all of Triton's Python API.

They obey a JSON document in their input COMMAND, one per request, and return their report in
their output TOLD.
"""

from tests.models.python_models import tensors

CONFIG = "max_batch_size: 8\n" + tensors("input", ("COMMAND", "STRING", "1")) + tensors(
    "output", ("TOLD", "STRING", "1")
)  # fmt: skip
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"

_HEAD = """
    import asyncio, json, threading, time
    import numpy as np
    import triton_python_backend_utils as pb_utils

    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


    def command_of(request):
        [text] = pb_utils.get_input_tensor_by_name(request, "COMMAND").as_numpy().ravel()
        return json.loads(text)


    def told(value, **parameters):
        array = np.array([[json.dumps(value).encode()]], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", array)], parameters=parameters)


    def refused(function, *arguments, **named):
        try:
            function(*arguments, **named)
        except (TypeError, pb_utils.TritonModelException) as error:
            return str(error)
        return "nothing"

"""

# An ordinary model: one answer to a request, now or later.
ORDINARY = (
    _HEAD
    + """
    class TritonPythonModel:
        def initialize(self, args):
            self.seen = 0
            self.kept = []

        def execute(self, requests):
            self.seen += 1
            return [self.answer(request) for request in requests]

        def answer(self, request):
            command = command_of(request)
            what = command["do"]
            if what == "give":
                return told(command.get("value"))
            sender = request.get_response_sender()
            if what == "send":
                sender.send(told("sent"), FINAL)
            elif what == "send without the flag":
                sender.send(told("sent"))
            elif what == "send, then the flag":
                sender.send(told("sent"))
                sender.send(flags=FINAL)
            elif what == "error":
                error = pb_utils.TritonError("later", pb_utils.TritonError.NOT_FOUND)
                sender.send(pb_utils.InferenceResponse(error=error), FINAL)
            elif what == "thread":
                threading.Thread(target=lambda: sender.send(told("from a thread"), FINAL)).start()
            elif what == "after the next":
                self.kept.append(sender)
            elif what == "release":
                for kept in self.kept:
                    kept.send(told("released"), FINAL)
                self.kept = []
                return told("done")
            elif what == "drop":
                pass
            elif what == "again":
                if not getattr(self, "again", False):
                    self.again = True
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                    return None
                self.again = False
                return told("the second time")
            elif what == "misuse":
                said = [
                    refused(sender.send, flags=2), refused(sender.send),
                    refused(sender.send, flags=FINAL), refused(sender.send, "text", FINAL),
                ]
                sender.send(told(said))
                assert "more than one" in refused(sender.send, told("too late"))
            elif what == "wait until cancelled":
                open(command["file"], "w").close()
                while not request.is_cancelled():
                    time.sleep(0.001)
                open(command["file"] + ".cancelled", "w").close()
                sender.send(told("nobody reads this"), FINAL)
            return None
"""
)

# A model with any number of answers.
MANY = (
    _HEAD
    + """
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                command = command_of(request)
                if command.get("thread"):
                    threading.Thread(target=self.answer, args=(request, command)).start()
                else:
                    self.answer(request, command)
            if command.get("return") == "a list":
                return [told(1)]

        def answer(self, request, command):
            what = command.get("do", "count")
            sender = request.get_response_sender()
            if what == "again":
                if not getattr(self, "again", False):
                    self.again = True
                    request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                    return
                self.again = False
            if what == "raise":
                raise ValueError("no answer")
            for number in range(command.get("count", 0)):
                sender.send(told(number, number=number))
            if what == "raise after":
                raise ValueError("no more answers")
            if what == "forget":
                return
            if what == "error":
                error = pb_utils.TritonError("broken off", pb_utils.TritonError.UNAVAILABLE)
                sender.send(pb_utils.InferenceResponse(error=error), FINAL)
                return
            if what == "wrong":
                wrong = pb_utils.Tensor("TOLD", np.zeros(3, np.float32))
                sender.send(pb_utils.InferenceResponse([wrong]))
            if what == "rows":
                rows = np.array([[b"a"], [b"b"], [b"c"]], object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", rows)]))
            if what == "large":
                rows = np.array([[b"x" * command["bytes"]]], object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", rows)]))
            if what in ("until cancelled", "error when cancelled"):
                number = 0
                while not sender.is_cancelled():
                    sender.send(told(number))
                    number += 1
                if what == "error when cancelled":
                    error = pb_utils.TritonError(
                        "request has been cancelled", pb_utils.TritonError.CANCELLED)
                    sender.send(pb_utils.InferenceResponse(error=error), FINAL)
                    return
                open(command["file"], "w").write(str(number))
            if what == "final with a response":
                sender.send(told("last"), FINAL)
            else:
                sender.send(flags=FINAL)
            assert "closed" in refused(sender.send, told(1))
"""
)

# Coroutines: batches run concurrently.
COROUTINE = (
    _HEAD
    + """
    class TritonPythonModel:
        def initialize(self, args):
            self.waiting = {}

        async def execute(self, requests):
            return await asyncio.gather(*[self.answer(request) for request in requests])

        async def answer(self, request):
            command = command_of(request)
            what = command["do"]
            if what == "meet":
                other = self.waiting.pop(command["where"], None)
                if other is None:
                    other = self.waiting[command["where"]] = asyncio.Event()
                    await other.wait()
                else:
                    other.set()
                return told("met")
            if what == "call":
                requests = [ask(number) for number in range(command["count"])]
                answers = await asyncio.gather(*[each.async_exec() for each in requests])
                sums = [pb_utils.get_output_tensor_by_name(a, "OUTPUT0") for a in answers]
                return told([int(tensor.as_numpy()[0, 0]) for tensor in sums])
            if what == "stream":
                text = json.dumps({"count": command["count"]}).encode()
                array = np.array([[text]], object)
                other = pb_utils.InferenceRequest(
                    model_name="many", inputs=[pb_utils.Tensor("COMMAND", array)],
                    requested_output_names=["TOLD"],
                )
                got = []
                async for response in await other.async_exec(decoupled=True):
                    got.append(len(response.output_tensors()))
                return told(got)
            if what == "raise":
                raise ValueError("no")
            return told("given")


    def ask(number):
        array = np.full((1, 16), number, np.int32)
        return pb_utils.InferenceRequest(
            model_name="add_sub", requested_output_names=["OUTPUT0"],
            inputs=[pb_utils.Tensor("INPUT0", array), pb_utils.Tensor("INPUT1", array)],
        )
"""
)

# Answers later, many times, as a coroutine.
MANY_COROUTINE = (
    _HEAD
    + """
    class TritonPythonModel:
        async def execute(self, requests):
            await asyncio.gather(*[self.answer(request) for request in requests])

        async def answer(self, request):
            command = command_of(request)
            sender = request.get_response_sender()
            for number in range(command["count"]):
                await sender.asend(told(number))
                await asyncio.sleep(0)
            await sender.asend(flags=FINAL)
"""
)

# It calls other models, and every other function of the API.
CALLER = (
    _HEAD
    + """
    class TritonPythonModel:
        def initialize(self, args):
            self.refused = refused(ask("add_sub").exec)
            self.families = calls, level, sizes = [
                pb_utils.MetricFamily(name=name, description=name.title(), kind=kind)
                for name, kind in (
                    ("calls", pb_utils.MetricFamily.COUNTER), ("level", pb_utils.GAUGE),
                    ("sizes", pb_utils.MetricFamily.HISTOGRAM))
            ]
            self.calls = calls.Metric(labels={"who": "caller"})
            self.level = level.Metric(labels={})
            buckets = [1.0, 2.5, 10.0, float("inf")]
            self.sizes = sizes.Metric(labels={"who": "caller"}, buckets=buckets)

        def execute(self, requests):
            return [told(getattr(self, command_of(r)["do"])(command_of(r))) for r in requests]

        def start(self, command):
            return self.refused

        def add(self, command):
            answer = ask("add_sub", command["value"]).exec()
            assert not answer.has_error(), answer.error().message()
            return {t.name(): int(t.as_numpy()[0, 0]) for t in answer.output_tensors()}

        def errors(self, command):
            wrong = pb_utils.InferenceRequest(
                model_name="add_sub", inputs=[], requested_output_names=[])
            answers = [
                ask("nobody").exec(), ask("add_sub", version=7).exec(), wrong.exec(),
                ask("many").exec(),
            ]
            return [[a.error().code(), a.error().message()] for a in answers if a.has_error()]

        def stream(self, command):
            request = pb_utils.InferenceRequest(
                model_name="many", requested_output_names=["TOLD"],
                inputs=[text({"count": command["count"]})],
            )
            return [
                [bytes(t.as_numpy()[0, 0]).decode() for t in response.output_tensors()]
                for response in request.exec(decoupled=True)
            ]

        def leave_stream(self, command):
            request = pb_utils.InferenceRequest(
                model_name="many", requested_output_names=["TOLD"],
                inputs=[text({"do": "until cancelled", "file": command["file"], "thread": True})],
            )
            responses = request.exec(decoupled=True)
            next(responses)
            responses.cancel()
            return "left"

        def cancel_stream(self, command):
            # As Triton's own test does: it continues to read cancelled responses.
            request = pb_utils.InferenceRequest(
                model_name="many", requested_output_names=["TOLD"],
                inputs=[text({**command["other"], "thread": True})],
            )
            responses = request.exec(decoupled=True)
            seen = []
            for response in responses:
                error = response.error()
                told = [bytes(t.as_numpy()[0, 0]).decode() for t in response.output_tensors()]
                seen.append([error.code(), error.message()] if error else (told or [None])[0])
                if len(seen) == 3:
                    responses.cancel()
            responses.cancel()  # nothing, after the end
            assert len(list(responses)) == len(seen)
            return seen

        def itself(self, command):
            request = pb_utils.InferenceRequest(
                model_name="caller", requested_output_names=["TOLD"],
                inputs=[text({"do": "add", "value": 4})],
            )
            answer = request.exec()
            assert not answer.has_error(), answer.error().message()
            return json.loads(answer.output_tensors()[0].as_numpy()[0, 0])

        def threads(self, command):
            found = []
            def call(number):
                answer = ask("add_sub", number).exec()
                found.append(int(answer.output_tensors()[0].as_numpy()[0, 0]))
            threads = [threading.Thread(target=call, args=(n,)) for n in range(command["count"])]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sorted(found)

        def large(self, command):
            array = np.arange(command["size"], dtype=np.float32).reshape(1, -1)
            request = pb_utils.InferenceRequest(
                model_name="identity", requested_output_names=["OUTPUT0"],
                inputs=[pb_utils.Tensor("INPUT0", array)],
            )
            [tensor] = request.exec().output_tensors()
            return bool((tensor.as_numpy() == array).all())

        def control(self, command):
            return {
                "ready": [pb_utils.is_model_ready("add_sub"), pb_utils.is_model_ready("nobody"),
                          pb_utils.is_model_ready("add_sub", "1")],
                "load": refused(pb_utils.load_model, model_name="add_sub"),
                "unload": refused(pb_utils.unload_model, "add_sub"),
            }

        def metrics(self, command):
            self.calls.increment(2)
            self.level.set(5)
            self.level.increment(-1.5)
            self.sizes.observe(0.5)
            self.sizes.observe(20)
            return [self.calls.value(), self.level.value()]

        def delete_a_family(self, command):
            family = pb_utils.MetricFamily(name="brief", description="Brief", kind=pb_utils.GAUGE)
            again = pb_utils.MetricFamily(name="brief", description="Brief", kind=pb_utils.GAUGE)
            metric, other = family.Metric(), again.Metric(labels={"other": "yes"})
            other.set(7)
            del family
            said = [refused(metric.set, 1), refused(metric.increment, 1), refused(metric.value)]
            kept = other.value()  # the family is still another object's
            del again
            return [*said, kept, refused(other.value)]

        def metric_misuse(self, command):
            histogram = pb_utils.MetricFamily("spread", "Spread", pb_utils.HISTOGRAM)
            histogram.Metric(labels={}, buckets=[])
            return [
                refused(self.calls.increment, -1), refused(self.calls.set, 1),
                refused(self.level.observe, 1), refused(self.sizes.value),
                refused(pb_utils.MetricFamily, name="nv_x", description="", kind="COUNTER"),
                refused(pb_utils.MetricFamily, name="x", description="", kind="SUMMARY"),
                refused(pb_utils.MetricFamily, name="calls", description="", kind=pb_utils.GAUGE),
                refused(histogram.Metric, labels={}), refused(histogram.Metric, buckets=(1.0,)),
                refused(histogram.Metric, buckets=[2.5, 0.1]),
                refused(histogram.Metric, buckets=[1, 1]),
                refused(histogram.Metric, buckets=[float("nan")]),
                refused(histogram.Metric, buckets=["1"]),
                refused(self.families[0].Metric, buckets=[]),
                refused(self.families[0].Metric, labels=["a"]),
                refused(histogram.Metric, labels={"le": "1"}, buckets=[1.0]),
            ]

        def misuse(self, command):
            return [
                refused(pb_utils.InferenceRequest, model_name="", inputs=[]),
                refused(pb_utils.InferenceRequest, model_name="x", inputs=[1]),
                refused(ask("add_sub").get_response_sender),
            ]


    def text(document):
        return pb_utils.Tensor("COMMAND", np.array([[json.dumps(document).encode()]], object))


    def ask(model, number=1, version=-1):
        array = np.full((1, 16), number, np.int32)
        return pb_utils.InferenceRequest(
            model_name=model, model_version=version, requested_output_names=["OUTPUT0", "OUTPUT1"],
            inputs=[pb_utils.Tensor("INPUT0", array), pb_utils.Tensor("INPUT1", array)],
        )
"""
)

# It is ready if a file exists that its configuration names.
FICKLE = (
    _HEAD
    + """
    import os, time


    class TritonPythonModel:
        def initialize(self, args):
            config = json.loads(args["model_config"])
            self.file = config["parameters"]["file"]["string_value"]

        def is_ready(self):
            if os.path.exists(self.file + ".late"):
                time.sleep(5.5)
                with open(self.file + ".answers", "a") as answers:
                    answers.write(".")
            if os.path.exists(self.file + ".odd"):
                return "perhaps"
            return os.path.exists(self.file)

        def execute(self, requests):
            return [told("here") for _ in requests]
"""
)

# Misbehaviour that the server has to survive.
ODD = (
    _HEAD
    + """
    import logging, multiprocessing, os


    def child_logs():
        logging.getLogger("child").error("from the child")


    def ask_another(model, document):
        array = np.array([[json.dumps(document).encode()]], object)
        return pb_utils.InferenceRequest(
            model_name=model, requested_output_names=["TOLD"],
            inputs=[pb_utils.Tensor("COMMAND", array)])


    def child_asks(value):
        answer = ask_another("ordinary", {"do": "give", "value": value}).exec()
        [tensor] = answer.output_tensors()
        stream = ask_another("many", {"count": 2, "thread": True}).exec(decoupled=True)
        error = ask_another("nobody", {}).exec().error()
        family = pb_utils.MetricFamily("children", "Children", pb_utils.COUNTER)
        family.Metric().increment(1)
        return [json.loads(tensor.as_numpy()[0, 0]), sum(1 for _ in stream), error.code(),
                pb_utils.is_model_ready("ordinary")]


    def child_of_a_child(value):
        import concurrent.futures
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            return [child_asks(value), pool.submit(child_asks, value).result()]


    def child_calls_off(path):
        stream = ask_another(
            "many", {"do": "until cancelled", "thread": True, "file": path}).exec(decoupled=True)
        next(stream)
        return os.getpid()  # and ends with the rest unread


    def squares(n):
        import triton_python_backend_utils as again
        return n * n if again.Tensor else 0


    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request, command_of(request)) for request in requests]

        def answer(self, request, command):
            return getattr(self, command["do"])(command)

        def misspelt(self, command):
            return pb_utils.InferenceResponse(
                [pb_utils.Tensor("TODL", np.array([[b"x"]], object))])

        def ask_itself(self, command):
            answer = self.ask("odd", {"do": "pid"}).exec()
            return told([answer.error().code(), answer.error().message()])

        def pid(self, command):
            return told(os.getpid())

        def run_a_loop(self, command):
            async def both():
                return await asyncio.gather(
                    *[self.ask("ordinary", {"do": "give", "value": n}).async_exec()
                      for n in range(3)])
            return told([len(answer.output_tensors()) for answer in asyncio.run(both())])

        def call_off(self, command):
            command = {"do": "error when cancelled", "thread": True}
            responses = self.ask("many", command).exec(decoupled=True)
            threading.Timer(0.05, responses.cancel).start()
            return told(sum(1 for _ in responses) > 0)

        def keep_up(self, command):
            responses = self.ask("many", {"count": command["count"], "thread": True}).exec(
                decoupled=True)
            time.sleep(command["seconds"])
            return told(sum(1 for _ in responses))

        def log_much(self, command):
            pb_utils.Logger.log_info("x" * 5_000_000)
            logging.getLogger("lib").error("y" * 5_000_000)
            return told(os.getpid())

        def say_much(self, command):
            error = pb_utils.TritonError("z" * 5_000_000)
            return pb_utils.InferenceResponse(error=error)

        def tell_much(self, command):
            return told(1, text="p" * 5_000_000)

        def fork(self, command):
            context = multiprocessing.get_context("fork")
            children = [context.Process(target=child_logs) for _ in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
            return told(os.getpid())

        def ask_in_children(self, command):
            import concurrent.futures
            context = multiprocessing.get_context("fork")
            with concurrent.futures.ProcessPoolExecutor(3, context) as pool:
                asked = [pool.submit(child_asks, value) for value in command["values"]]
                asked.append(pool.submit(child_of_a_child, 7))
                return told([each.result() for each in asked])

        def leave_in_a_child(self, command):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                return told(pool.apply(child_calls_off, [command["file"]]) != os.getpid())

        def ask_in_a_spawned_child(self, command):
            import concurrent.futures
            context = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
                return told(str(pool.submit(child_asks, 1).exception()))

        def spawn(self, command):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return told(pool.map(squares, [1, 2, 3]))

        def ask(self, model, document):
            return ask_another(model, document)
"""
)

# A coroutine that is cancelled, and one that continues after `execute` has returned.
ODD_COROUTINE = (
    _HEAD
    + """
    class TritonPythonModel:
        async def execute(self, requests):
            for request in requests:
                command = command_of(request)
                if command["do"] == "cancel":
                    task = asyncio.create_task(asyncio.sleep(60))
                    task.cancel()
                    await task
                elif command["do"] == "outlive":
                    self.task = asyncio.create_task(self.go_on(request, command["file"]))
                    while not request.is_cancelled():
                        await asyncio.sleep(0.005)
                else:
                    request.get_response_sender().send(told("here"), FINAL)

        async def go_on(self, request, file):
            sender = request.get_response_sender()
            await sender.asend(told("begun"))
            while not sender.is_cancelled():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            open(file, "w").write(str(sender.is_cancelled()))
            sender.send(flags=FINAL)
"""
)
