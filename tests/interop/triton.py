"""tritonclient's four clients behind one synchronous interface, so that each test is written once.

Requests and responses are unchanged: a method is called by its own name with its own arguments,
and awaitable results are awaited.
"""

import asyncio
import importlib
import inspect
from types import ModuleType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

FAMILIES = ("http", "http.aio", "grpc", "grpc.aio")


class Client:
    """One of tritonclient's clients, connected to `address`."""

    def __init__(self, family: str, address: str, **options: Any) -> None:
        self.family = family
        self.over_http = family.startswith("http")
        # Inputs and outputs are the same classes for a client and its asynchronous twin.
        self.types: ModuleType = importlib.import_module(f"tritonclient.{family.partition('.')[0]}")
        self._runner = asyncio.Runner()
        self._inner = self._runner.run(self._connect(f"tritonclient.{family}", address, options))

    @property
    def kind(self) -> type:
        kind: type = type(self._inner)
        return kind

    @staticmethod
    async def _connect(module: str, address: str, options: dict[str, Any]) -> Any:
        # Within a running loop: asynchronous clients belong to the loop they are created in.
        return importlib.import_module(module).InferenceServerClient(address, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.call("close")
        self._runner.close()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._runner.run(self._call(method, arguments, options))

    def together(self, method: str, calls: list[tuple[Any, ...]]) -> list[Any]:
        """Call a method several times concurrently; only for an asynchronous client."""
        return self._runner.run(self._together(method, calls))

    def stream(self, requests: list[dict[str, Any]], **options: Any) -> list[tuple[Any, Any]]:
        """Results of `grpc.aio`'s stream_infer for some requests."""
        return self._runner.run(self._stream(requests, options))

    def input(self, name: str, array: NDArray[Any], binary: bool = True) -> Any:
        """An input with data; `binary` matters over HTTP alone."""
        from tritonclient.utils import np_to_triton_dtype

        tensor = self.types.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        if self.over_http:
            tensor.set_data_from_numpy(array, binary_data=binary)
        else:
            tensor.set_data_from_numpy(array)
        return tensor

    def output(self, name: str, binary: bool = True, class_count: int = 0) -> Any:
        """A requested output; `binary` matters over HTTP alone."""
        if self.over_http:
            return self.types.InferRequestedOutput(name, binary, class_count)
        return self.types.InferRequestedOutput(name, class_count)

    def sum_and_difference(self, rows: int = 1, first: int = 0, binary: bool = True) -> list[Any]:
        """Inputs of the model `simple`: counting up from `first`, and ones."""
        counted = np.arange(first, first + rows * 16, dtype=np.int32).reshape(rows, 16)
        ones = np.ones((rows, 16), np.int32)
        return [self.input("INPUT0", counted, binary), self.input("INPUT1", ones, binary)]

    def work(self, value: int, cost: int) -> list[Any]:
        """Inputs of the model `busy`."""
        return [
            self.input("VALUE", np.array([[value]], np.int64)),
            self.input("COST", np.array([[cost]], np.int64)),
        ]

    def document(self, answer: Any) -> dict[str, Any]:
        """The head of an infer result as a dictionary, for any client."""
        response = answer.get_response() if self.over_http else answer.get_response(as_json=True)
        assert isinstance(response, dict)
        return response

    async def _call(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        result = getattr(self._inner, method)(*arguments, **options)
        return await result if inspect.isawaitable(result) else result

    async def _together(self, method: str, calls: list[tuple[Any, ...]]) -> list[Any]:
        procedure = getattr(self._inner, method)
        return await asyncio.gather(*(procedure(*arguments) for arguments in calls))

    async def _stream(
        self, requests: list[dict[str, Any]], options: dict[str, Any]
    ) -> list[tuple[Any, Any]]:
        async def give() -> Any:
            for request in requests:
                yield request

        return [pair async for pair in self._inner.stream_infer(give(), **options)]
