"""Attacks on models beside the bystander's: images for a classifier, and requests for a model on another server."""

from __future__ import annotations

import base64
import functools
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.torture.attacks.attacker import Attack, Attacker
from tests.torture.attacks.claims import Scenario
from tests.torture.attacks.modest import modest_beside
from tests.torture.attacks.upstream import running_upstream
from tests.torture.report import BUILD

NUM_SENDING = 4  # requests with images at a time
NUM_ASKING = 32  # requests for the remote model at a time: more than it has connections
MAX_CONNECTIONS = 8
LARGEST_SIDE = 5760  # of an image; its square is a little less than --max-image-pixels
SERVED_WITHIN_S = 5.0

_OWN = '[[model]]\nid = "demo"\nmodel = "demo"\ndevice = "cpu"\nnum_kv_blocks = 1024\n'
_CLASSIFIER = '[[model]]\nid = "see"\nmodel = "{path}"\ndevice = "cpu"\ndtype = "float32"\n'
_REMOTE = '[[model]]\nid = "far"\nkind = "openai"\nmodel = "far"\nremote = {remote}\n'


def png(side: int) -> bytes:
    """Return a small PNG file of many pixels, which are all black."""
    rows = zlib.compress(bytes(side * ((side + 7) // 8 + 1)), 9)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@functools.cache
def image(side: int) -> str:
    """Return such a file as base64."""
    return base64.b64encode(png(side)).decode()


def photos(number: int = 1, side: int = 512) -> dict[str, object]:
    """Return a request with ordinary images."""
    return {"model": "see", "image": [image(side)] * number}


def _hostile_images(attacker: Attacker) -> list[str]:
    """Return images that cost as much as images can: in pixels, in number, or because they are not what they say."""
    kind = attacker.chance.randrange(5)
    if kind == 0:
        return [image(LARGEST_SIDE)] * attacker.chance.choice([1, 4, 16, 85])
    if kind == 1:
        return [image(8)] * 1000
    if kind == 2:
        return [base64.b64encode(png(LARGEST_SIDE)[:-20]).decode()] * 4  # without its end
    if kind == 3:
        return [base64.b64encode(attacker.chance.randbytes(2**16)).decode()] * 16
    file = bytearray(png(512))
    file[16:24] = struct.pack(">II", 2**31 - 1, 2**31 - 1)
    return [base64.b64encode(bytes(file)).decode()] * 16


async def _images(attacker: Attacker) -> None:
    await attacker.post("/predict", {"model": "see", "image": _hostile_images(attacker)})


async def _photos(attacker: Attacker) -> None:
    await attacker.post("/predict", photos(number=8, side=1024))


async def _far_requests(attacker: Attacker) -> None:
    """Ask the remote model for what it fails at, what it never answers, and for long prompts and answers."""
    prompt, max_tokens = attacker.chance.choice(
        [("fail", 4), ("fail", 4), ("stall", 4), ("a" * 2**20, 4), ("a", 2000), ("a", 100)]
    )
    await attacker.post("/v1/completions", {"model": "far", "prompt": prompt, "max_tokens": max_tokens})


async def _far_answers(attacker: Attacker) -> None:
    await attacker.post("/v1/completions", {"model": "far", "prompt": "a", "max_tokens": 100})


@contextmanager
def _with_classifier() -> Iterator[tuple[str, ...]]:
    from tests.support.predictor_checkpoints import make_image_classifier

    folder = BUILD / "attack-images"
    if not (folder / "see").exists():
        make_image_classifier(folder / "see")
    yield _models_file(folder, _OWN + _CLASSIFIER.format(path=folder / "see"))


@contextmanager
def _with_remote_model() -> Iterator[tuple[str, ...]]:
    with running_upstream() as url:
        remote = f'{{ url = "{url}", max_connections = {MAX_CONNECTIONS}, first_token_timeout = 5 }}'
        yield _models_file(BUILD / "attack-remote", _OWN + _REMOTE.format(remote=remote))


def _models_file(folder: Path, entries: str) -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "models.toml").write_text('default = "demo"\n' + entries)
    return ("--models", str(folder / "models.toml"))


IMAGES = Attack(
    "images",
    _images,
    at_once=NUM_SENDING,
    control=_photos,
    control_at_once=NUM_SENDING,
    makes_flags=_with_classifier,
)
REMOTE = Attack(
    "remote-model",
    _far_requests,
    at_once=NUM_ASKING,
    control=_far_answers,
    makes_flags=_with_remote_model,
)
FAR = {"model": "far", "prompt": "hello", "max_tokens": 4}
ATTACKS = [IMAGES, REMOTE]
SCENARIOS = [
    Scenario("modest-images", modest_beside(IMAGES, "/predict", photos(), SERVED_WITHIN_S)),
    Scenario("modest-remote", modest_beside(REMOTE, "/v1/completions", FAR, SERVED_WITHIN_S)),
]
