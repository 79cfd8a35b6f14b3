"""Define how server and worker name a LoRA adapter."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class LoraAdapter(Struct, frozen=True, array_like=True, gc=False):
    """An adapter of one load: loaded again under its name, it has another number, because its files may have changed.

    The worker reads the files when a step needs them, and may have to read them again later.
    """

    number: int
    path: str  # a directory in PEFT's format
    fingerprint: str = ""  # of what the files held when they were checked, on any machine; other ones are refused
    name: str = ""  # its name in requests


class LoadAdapter(Struct, frozen=True, tag="load_adapter"):
    """Read an adapter and check that it fits the model; answered by `AdapterLoaded`."""

    adapter: LoraAdapter


class AdapterLoaded(Struct, frozen=True, tag="adapter_loaded"):
    """The answer to LoadAdapter. After a refusal, nothing has changed."""

    refusal: str = ""
    fingerprint: str = ""
    rank: int = 0  # the highest rank of its matrices


def common_answer(answers: Sequence[AdapterLoaded]) -> AdapterLoaded:
    """Return what several processes, perhaps on several machines, say of one adapter together."""
    if refused := next((answer for answer in answers if answer.refusal), None):
        return refused
    if len({answer.fingerprint for answer in answers}) > 1:
        return AdapterLoaded("the files of the adapter are not the same on all machines; copy it again")
    return answers[0]


def salted(tenant: str, adapter: LoraAdapter | None) -> str:
    """The salt of prefix hashes: sequences with different adapters have different keys and values.

    An adapter that failed has another number when it is loaded again, so what was computed without it is not found. A
    number means another adapter after a restart, and blocks may be on the disk, so the salt has the files' fingerprint,
    too.
    """
    return tenant if adapter is None else f"{tenant}\0{adapter.number}\0{adapter.fingerprint}"
