"""Images as tensors: read, resized to what a model takes, scaled and normalised."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.client.signature import Declared
from headrace.commands.remote import CommandFailed
from headrace.core.datatypes import NUMPY
from headrace.core.tensors import Array, brackets

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
LAYOUTS = ("HWC", "CHW", "HW")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How pixels become values: (pixel * scale - mean) / std, a number each or one a channel.

    Empty `layout` is what the model's shape says, no `scale` is 1/255 for floats, else 1.
    """

    layout: str = ""
    scale: float | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


def read_image(path: Path, declared: Declared, options: ImageOptions) -> Array:
    """The image in `path` as one row of `declared`; raises `CommandFailed`."""
    dims = declared.shape[1:] if declared.rows else declared.shape
    if not declared.rows and len(dims) == 4:
        dims = dims[1:]  # a model that counts rows without saying so
    layout = options.layout or _layout(dims)
    if len(layout) != len(dims) or not layout:
        raise CommandFailed(
            f"input '{declared.name}' of shape {brackets(declared.shape)} is not plainly an image;"
            " --layout says which axis is what: HWC, CHW or HW"
        )
    axes = dict(zip(layout, dims, strict=True))
    channels = axes.get("C", 1)
    if channels not in (-1, *_MODES):
        raise CommandFailed(
            f"input '{declared.name}' of shape {brackets(declared.shape)} has {channels} channels"
            f" by layout {layout}; images have 1, 3 or 4"
        )
    with _opened(path) as image:
        image = image.convert(_MODES[3 if channels == -1 else channels])
        high, wide = axes["H"], axes["W"]
        wanted = (image.width if wide < 0 else wide, image.height if high < 0 else high)
        pixels = np.asarray(image if wanted == image.size else _resized(image, wanted))
    values = _normalised(pixels, declared, options)
    if layout == "CHW":
        values = values.transpose(2, 0, 1) if values.ndim == 3 else values[np.newaxis]
    elif layout == "HWC" and values.ndim == 2:
        values = values[:, :, np.newaxis]
    return values if len(dims) == len(declared.shape) else values[np.newaxis]


def _layout(dims: tuple[int, ...]) -> str:
    """Which axis is what, if the number of channels says so."""
    if len(dims) == 2:
        return "HW"
    if len(dims) != 3:
        return ""
    for channels in ((1, 3), (4,)):  # an image may be four pixels wide, but hardly three
        first, last = dims[0] in channels, dims[2] in channels
        if first != last:
            return "CHW" if first else "HWC"
    return ""


def _normalised(pixels: Array, declared: Declared, options: ImageOptions) -> Array:
    wanted = NUMPY[declared.datatype]
    floats = wanted.kind not in "iub"
    scale = options.scale if options.scale is not None else 1 / 255 if floats else 1.0
    channels = pixels.shape[2] if pixels.ndim == 3 else 1
    for name, given in (("--mean", options.mean), ("--std", options.std)):
        if len(given) not in (1, channels):
            raise CommandFailed(f"{name} has {len(given)} numbers for {channels} channels")
    values = (pixels * scale - np.array(options.mean)) / np.array(options.std)
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        values = np.rint(values).clip(limits.min, limits.max)
    result: Array = values.astype(wanted)
    return result


def _opened(path: Path) -> "Image":
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise CommandFailed(
            f"reading {path.name} needs Pillow: pip install 'headrace[cli]'"
        ) from None
    try:
        image = Image.open(path)
        # Cameras store pictures as they were held, and say so beside.
        return ImageOps.exif_transpose(image)
    except UnidentifiedImageError:
        raise CommandFailed(f"{path}: not an image that Pillow can read") from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise CommandFailed(f"{path}: {error}") from None


def _resized(image: "Image", size: tuple[int, int]) -> "Image":
    from PIL import Image

    return image.resize(size, Image.Resampling.BILINEAR)
