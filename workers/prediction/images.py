"""Decode the images that clients send, within limits, and prepare them as the checkpoint's image processor says.

Pillow decodes them here, in the worker. The server only passes the bytes on: a decoder may take long, and a fault in
one ends the worker, which is replaced.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from servekit.errors import ConfigError
from servekit.protocol.prediction import ImageItem
from workers.prediction.jpeg import MAX_SCANS, has_too_many_scans

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PROFILES = 10  # of colors, in a PNG file; Pillow inflates each one to 1 MB at most, and 8,000 took 17 s
MAX_RESIZED_PIXELS = 2**24  # of an image whose shorter side gets the model's size; the middle is then cut out
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # Pillow knows forty more, some of which run other programs
_DATA_URL = re.compile(rb"data:[\w.+-]*/?[\w.+-]*(?:;[\w.+=-]+)*?(;base64)?,", re.I)


class BadImage(Exception):
    """An image cannot be decoded, or is too large. The message is for the client."""


class ImageProcessor:
    """Makes a model's input of image files."""

    def __init__(self, path: Path, max_pixels: int) -> None:
        """Read the checkpoint's preprocessor_config.json. Raises ConfigError."""
        try:
            import PIL.Image
            from transformers import AutoImageProcessor
        except ImportError as error:
            raise ConfigError(f"a model of images needs Pillow ({error}): pip install pillow") from None
        PIL.Image.MAX_IMAGE_PIXELS = None  # the limit is checked here, before anything is decoded
        self._max_pixels = max_pixels
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except Exception as error:  # transformers raises various errors for a file that is not valid
            raise ConfigError(
                f"{path} has no image processor that can be used: {' '.join(str(error).split())[:300]}"
            ) from None

    def __call__(self, item: ImageItem) -> Tensor:
        """Return the pixel values of an image, [channels, height, width]. Raises BadImage."""
        image = self._decode(item)
        try:
            values: Tensor = self._processor(images=image, return_tensors="pt")["pixel_values"][0]
        except ValueError as error:  # an image of one pixel, for example
            raise BadImage(f"the image cannot be prepared for the model: {error}") from None
        return values

    def blank(self) -> Tensor:
        """Return the pixel values of a black image."""
        from PIL import Image

        values: Tensor = self._processor(images=Image.new("RGB", (64, 64)), return_tensors="pt")["pixel_values"][0]
        return values

    def _check_prepared_size(self, width: int, height: int) -> None:
        """Raise BadImage for a strip of which the processor would make a large image, by enlarging its shorter side."""
        size = getattr(self._processor, "size", None)
        edge = size.get("shortest_edge") if size is not None and "longest_edge" not in size else None
        if edge is not None and edge**2 * max(width, height) > MAX_RESIZED_PIXELS * min(width, height):
            raise BadImage(
                f"the image has {width} x {height} pixels, and the model needs {edge} on the shorter side, which would "
                f"make more than {MAX_RESIZED_PIXELS} pixels of it in all; send one that is less narrow"
            )

    def _decode(self, item: ImageItem) -> Image:
        from PIL import Image, ImageOps

        data = _bytes_of(item)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged metadata
            try:
                if data.count(b"iCCP") > MAX_PROFILES:
                    raise BadImage(f"the PNG file has more than {MAX_PROFILES} profiles of colors; save it again")
                image = Image.open(io.BytesIO(data), formats=FORMATS)
                width, height = image.size
                if width * height > self._max_pixels:
                    raise BadImage(
                        f"the image has {width} x {height} pixels; the limit is {self._max_pixels} in all "
                        "(max_image_pixels); send a smaller one"
                    )
                if width * height > item.num_pixels:  # it was batched as a smaller one
                    raise BadImage(
                        f"the image has {width} x {height} pixels, and its first header says {item.num_pixels} in all; "
                        "save it again"
                    )
                self._check_prepared_size(width, height)
                if image.format in ("JPEG", "MPO") and has_too_many_scans(data):
                    raise BadImage(
                        f"the JPEG file has more than {MAX_SCANS} scans, or too many segments; save it again, or send "
                        "it as a PNG file"
                    )
                # As transformers' pipeline: a camera's note which side is up counts.
                ImageOps.exif_transpose(image, in_place=True)  # without a copy, if there is none
                return image.convert("RGB")
            except BadImage:
                raise
            except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error and others
                raise BadImage(
                    f"the image cannot be decoded ({type(error).__name__}); send a {', '.join(FORMATS[:-1])} or "
                    f"{FORMATS[-1]} file"
                ) from None


def _bytes_of(item: ImageItem) -> bytes:
    """Return the bytes of the file: as they are, or of base64 text, or of a data URL. Raises BadImage."""
    text = bytes(item.data)
    if not item.is_base64:
        return text
    if text[:5].lower() == b"data:":
        match = _DATA_URL.match(text)
        if match is None or match[1] is None:
            raise BadImage("the data URL of the image is not in base64; write it as data:image/png;base64,...")
        text = text[match.end() :]
    try:
        return base64.b64decode(b"".join(text.split()), validate=True)
    except binascii.Error as error:
        raise BadImage(f"the image is not valid base64: {error}") from None
