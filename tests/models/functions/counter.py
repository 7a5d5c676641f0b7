"""A class with a state."""

from typing import Literal

import numpy as np

from headrace import Float32, model


class Width: ...


@model
class Counter:
    def load(self) -> None:
        self.weights = np.arange(3, dtype=np.float32)

    def predict(self, x: Float32[Width, Literal[3]]) -> Float32[Width]:
        result: Float32[Width] = x @ self.weights
        return result

    def close(self) -> None:
        print("the counter is closed")
