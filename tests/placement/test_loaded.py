"""Models loaded into this process: the choice of their place, and what they take."""

from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from headrace.core.model_spec import TensorInfo
from headrace.core.tensors import Array
from headrace.placement.choice import AutoChoice, InstanceKind
from headrace.placement.loaded import LoadedModel, ModelTraits, Servable
from headrace.protocol.pb.model_config_pb2 import ModelConfig
from headrace.scheduling.batch import Batch, BatchBuffer
from tests.scheduling.fakes import Bench, entered, request, signature

INLINE, THREAD = InstanceKind.INLINE, InstanceKind.THREAD


class Doubling(LoadedModel):
    """y = 2x: a backend's model that has no more than it must."""

    def __init__(self, traits: ModelTraits | None = None) -> None:
        if traits is not None:
            self.traits = traits

    def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Sequence[Array]:
        return [2 * inputs["x"]]


@pytest.mark.parametrize(
    ("wanted", "device", "loops", "kind"),
    [
        ("inline", None, False, INLINE), ("inline", None, True, INLINE),
        ("thread", None, False, THREAD), ("auto", 0, False, THREAD), ("auto", None, True, THREAD),
    ],
)  # fmt: skip
def test_kind_that_needs_no_choice(
    wanted: str, device: int | None, loops: bool, kind: InstanceKind
) -> None:
    assert Doubling(ModelTraits(loops=loops)).kind(wanted, signature(), device) is kind


def test_kind_by_the_measured_cost() -> None:
    assert isinstance(Doubling().kind("auto", signature(), None), AutoChoice)
    unable = LoadedModel().kind("auto", signature(), None)  # it cannot be measured
    assert isinstance(unable, AutoChoice)
    assert unable.kind is THREAD


def test_a_file_needs_no_more_than_its_function() -> None:
    model, config = Doubling(), ModelConfig(name="m")
    assert isinstance(model, Servable)
    assert model.completed(config) == config
    assert model.reported(config) == ((), ())
    model.inputs = [TensorInfo("x", None, ())]
    assert model.reported(config) == (model.inputs, ())
    model.begin(config, signature(), False)
    assert not model.terminate()
    model.rest()
    model.close()


def test_batches_are_gathered_in_the_buffer() -> None:
    asked: list[int] = []

    def place(nbytes: int) -> Array:
        asked.append(nbytes)
        return np.empty(nbytes, np.uint8)

    width = 1 << 18  # larger than what the buffer takes from the heap
    calls = [
        entered(request("r", number, width=width), 1, width, 0, Bench().batcher)
        for number in (1, 2)
    ]
    run = Doubling().batch_function(BatchBuffer(place))
    outcome = run(Batch(signature(), calls))
    assert outcome.error is None
    (doubled,) = outcome.arrays
    assert np.asarray(doubled)[:, 0].tolist() == [2, 4]
    assert asked


def test_memory_is_estimated_by_the_files() -> None:
    model = Doubling(ModelTraits(file_bytes=100 << 20))
    assert 100 << 20 < model.memory(None) < 200 << 20
    assert model.memory(growth=1) >= 100 << 20
    assert Doubling().memory(None) == 0
    assert Doubling().memory(growth=7) == 7


def test_traits_are_a_value() -> None:
    assert ModelTraits(loops=True) == ModelTraits(loops=True) != ModelTraits()
    assert Doubling().traits == ModelTraits()
    with pytest.raises(FrozenInstanceError):
        Doubling().traits.loops = True  # type: ignore[misc]
