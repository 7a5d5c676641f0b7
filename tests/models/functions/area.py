"""Single values: called for each row."""

from headrace import model


@model
def area(width: float, height: float = 1.0, unit: str = "m") -> tuple[float, str]:
    if width < 0:
        raise ValueError(f"width {width} is negative")
    return width * height, unit + "²"
