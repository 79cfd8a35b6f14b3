"""Open weights with tampered headers as the worker opens them: thousands of seeded mutations."""

from __future__ import annotations

import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from servekit.errors import ConfigError
from tests.support.tiny_models import ARCHITECTURES, make_model
from tests.torture.report import Finding
from workers.loading.checkpoint import check_num_layers, count_tensors
from workers.loading.model_manager import ModelManager

SEED = 20261121
MAX_GROWTH_MIB = 256
NUM_LAYERS = 3  # of the tiny model
MANY_LOADED = 200  # number of files that are loaded completely
NUMBERS = [b"0", b"-1", b"1e9", b"9" * 19, b"18446744073709551615", b"4294967296", b"null", b'"a"', b"[]", b"1.5"]


def run(num_mutations: int, seed: int = 0) -> list[Finding]:
    """Open the mutations; report the results, the slowest one, and the memory that all of them took."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        make_model(path, *ARCHITECTURES["llama"])
        manager = ModelManager("cpu")
        manager.load(path, "float32", None)
        counts: Counter[str] = Counter()
        slowest_s, before = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for content in mutations((path / "model.safetensors").read_bytes(), num_mutations, seed):
            (path / "model.safetensors").write_bytes(content)
            started_s = time.perf_counter()
            counts[_outcome(manager, path, counts["loaded"] + counts["refused by the loader"] < MANY_LOADED)] += 1
            slowest_s = max(slowest_s, time.perf_counter() - started_s)
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    summary = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.most_common())
    num_wrong = sum(count for outcome, count in counts.items() if outcome.startswith("!"))
    return [
        Finding(
            "tampered headers of weights: neither loaded nor refused", "0", f"{num_wrong} ({summary})", not num_wrong
        ),
        Finding("the slowest of them", "2 s", f"{slowest_s:.2f} s", slowest_s < 2),
        Finding("memory for all of them", f"{MAX_GROWTH_MIB} MiB", f"{grown_mib:.0f} MiB", grown_mib < MAX_GROWTH_MIB),
    ]


def _outcome(manager: ModelManager, path: Path, in_full: bool) -> str:
    try:
        check_num_layers(count_tensors([path / "model.safetensors"]), NUM_LAYERS)
        if not in_full:
            return "opened"
    except (SafetensorError, ConfigError):
        return "refused"
    except BaseException as error:
        return f"! {type(error).__name__}: {error}"[:200]
    try:
        manager.load(path, "float32", None)
    except ConfigError:
        return "refused by the loader"
    except BaseException as error:
        return f"! {type(error).__name__}: {error}"[:200]
    return "loaded"


def mutations(whole: bytes, num: int, seed: int) -> Iterator[bytes]:
    """Yield the file with changes to its header's length, bytes or numbers, or to its end."""
    dice = random.Random(SEED + seed)
    header, data = whole[8 : 8 + int.from_bytes(whole[:8], "little")], whole[8 + int.from_bytes(whole[:8], "little") :]
    for _ in range(num):
        kind = dice.randrange(6)
        if kind == 0:  # a wrong length of the header
            length = dice.choice(
                [0, 1, len(header) - 1, len(header) + 1, 2**31, 2**63, 2**64 - 1, dice.randrange(2**20)]
            )
            yield length.to_bytes(8, "little") + header + data
        elif kind == 1:  # truncated
            yield whole[: dice.randrange(len(whole))]
        elif kind == 2:  # with inserted bytes
            at = dice.randrange(8, len(whole))
            yield whole[:at] + dice.randbytes(dice.randrange(1, 64)) + whole[at:]
        else:
            changed = bytearray(header)
            for _ in range(dice.randrange(1, 5)):
                at = dice.randrange(len(changed))
                if kind == 3:
                    changed[at] = dice.randrange(256)
                elif kind == 4:  # a number
                    digits = [i for i, byte in enumerate(changed) if 48 <= byte < 58]
                    at = dice.choice(digits)
                    changed[at : at + 1] = dice.choice(NUMBERS)
                else:  # a piece twice, or elsewhere
                    piece = changed[at : at + dice.randrange(1, 80)]
                    to = dice.randrange(len(changed))
                    changed[to:to] = piece
            yield len(changed).to_bytes(8, "little") + bytes(changed) + data
