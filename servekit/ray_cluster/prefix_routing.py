"""Rank replicas for a prompt: by what each would have to compute of it, and by how much each has to do. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

from servekit.ray_cluster.prefix_table import PrefixTable

# A request that a replica has already counts as much as these bytes of prompt, some 125 tokens. With the step times of
# `sim:h100-8b`, to compute them takes 4 ms, and one sequence more in each of 200 steps takes 4 ms, too. So a short
# beginning that all prompts share does not send all of them to one replica, and a long conversation stays where it is
# cached until that replica has several requests more than another one.
BYTES_PER_REQUEST = 512


class _Body(Struct):
    """Where the APIs have what a prompt begins with. Nothing of it is decoded."""

    model: Raw = Raw()
    system: Raw = Raw()
    instructions: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()
    inputs: Raw = Raw()
    input: Raw = Raw()


_decode = msgspec.json.Decoder(_Body).decode

Replica = TypeVar("Replica", bound=Hashable)


def prompt_of(body: bytes) -> bytes:
    """Return the part of a request's body that its prompt is made of; empty if there is none."""
    try:
        found = _decode(body)
    except (msgspec.DecodeError, RecursionError):
        return b""
    return b"".join(bytes(getattr(found, name)) for name in found.__struct_fields__)


def rank(table: PrefixTable, prompt: bytes, num_requests: Mapping[Replica, int]) -> list[list[Replica]]:
    """Return the replicas with the best ones first. Those in one list are equally good.

    `num_requests` is what each replica has now.
    """
    known = table.known_bytes(prompt, num_requests)
    costs = {each: BYTES_PER_REQUEST * number - known[each] for each, number in num_requests.items()}
    return [[each for each in costs if costs[each] == cost] for cost in sorted(set(costs.values()))]
