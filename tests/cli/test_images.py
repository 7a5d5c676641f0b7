"""Images as tensors: layouts, sizes, values."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headrace.cli.commands.infer_inputs import ImageOptions, read_image
from headrace.cli.remote import CommandFailed
from headrace.client.values import Declared
from headrace.core.datatypes import Datatype


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """4 wide, 2 high; red on the left, blue on the right."""
    pixels = np.zeros((2, 4, 3), np.uint8)
    pixels[:, :2, 0] = pixels[:, 2:, 2] = 255
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return path


@pytest.mark.parametrize(("declared", "rows", "layout", "expected"), [
    ((-1, 3, 2, 4), True, "", (1, 3, 2, 4)), ((-1, 2, 4, 3), True, "", (1, 2, 4, 3)),
    ((-1, 3, -1, -1), True, "", (1, 3, 2, 4)), ((-1, 3, 10, 20), True, "", (1, 3, 10, 20)),
    ((-1, -1, -1, -1), True, "CHW", (1, 3, 2, 4)), ((3, 3, 3), False, "HWC", (3, 3, 3)),
    ((-1, 3, 8, 8), False, "", (1, 3, 8, 8)),  # rows that are not declared as such
    ((1, 2, 4), False, "", (1, 2, 4)), ((2, 4, 1), False, "", (2, 4, 1)),
    ((2, 4, 4), False, "", (2, 4, 4)), ((-1, 2, 4), True, "", (1, 2, 4)),
])  # fmt: skip
def test_shapes(
    picture: Path, declared: tuple[int, ...], rows: bool, layout: str, expected: tuple[int, ...]
) -> None:
    options = ImageOptions(layout)
    array = read_image(picture, Declared("x", Datatype.FP32, declared, rows), options)
    assert array.shape == expected
    assert array.dtype == np.float32
    assert array.max() <= 1


def test_values(picture: Path) -> None:
    declared = Declared("x", Datatype.FP32, (-1, 3, 2, 4), True)
    array = read_image(picture, declared, ImageOptions())
    assert array[0, 0].tolist() == array[0, 2, :, ::-1].tolist() == [[1, 1, 0, 0]] * 2
    options = ImageOptions("", 1.0, (255.0, 0.0, 55.0), (1.0, 1.0, 100.0))
    array = read_image(picture, declared, options)
    assert array[0, :, 0, 0].tolist() == [0, 0, pytest.approx(-0.55)]
    array = read_image(picture, Declared("x", Datatype.UINT8, (2, 4, 3)), ImageOptions())
    assert array[0, 0].tolist() == [255, 0, 0]
    array = read_image(picture, Declared("x", Datatype.INT8, (2, 4, 3)), ImageOptions())
    assert array[0, 0].tolist() == [127, 0, 0]
    array = read_image(picture, Declared("x", Datatype.UINT8, (2, 4)), ImageOptions())
    assert array[0].tolist() == [76, 76, 29, 29]  # grey


def test_a_rotated_picture(picture: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture.with_suffix(".jpg")
    Image.open(picture).save(turned, exif=exif)
    array = read_image(turned, Declared("x", Datatype.UINT8, (-1, -1, 3)), ImageOptions())
    assert array.shape == (4, 2, 3)


@pytest.mark.parametrize(("declared", "options", "text"), [
    ((-1, 10), ImageOptions(), r"of shape \[-1,10\] is not plainly an image; --layout says"),
    ((-1, 3, 8, 3), ImageOptions(), "is not plainly an image"),
    ((-1, -1, -1, -1), ImageOptions(), "is not plainly an image"),
    ((-1, 7, 8, 8), ImageOptions("CHW"), "has 7 channels by layout CHW; images have 1, 3 or"),
    ((-1, 3, 8, 8), ImageOptions("", None, (1.0, 2.0)), "--mean has 2 numbers for 3 channels"),
])  # fmt: skip
def test_files_that_are_not_images(
    picture: Path, declared: tuple[int, ...], options: ImageOptions, text: str
) -> None:
    with pytest.raises(CommandFailed, match=text):
        read_image(picture, Declared("x", Datatype.FP32, declared, True), options)


def test_without_pillow(picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(CommandFailed, match=r"needs Pillow: pip install 'headrace\[cli\]'"):
        read_image(picture, Declared("x", Datatype.FP32, (2, 4)), ImageOptions())
