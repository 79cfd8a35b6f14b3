"""Offloaded KV blocks over HTTP: answers stay the same after evictions, lost workers, restarts and damage."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from servekit.cli import main
from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.support.server_process import ONE_THREAD, ServerProcess, serving

# 22 to 30 blocks each, and the KV cache has 40: the blocks of each are reused when the others have been asked.
PROMPTS = [" ".join(f"{word} {number} of {word}s" for number in range(60)) for word in ("boat", "mirror", "grace")]
FIELDS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
LOADED = "servekit_kv_offload_loaded_blocks_total"


def ask_all(server: ServerProcess) -> tuple[list[str], int]:
    """The answers to all prompts, and how many of their tokens were cached."""
    answers = [server.generate(prompt, **FIELDS) for prompt in PROMPTS]
    return [each["generated_text"] for each in answers], sum(each["usage"]["cached_tokens"] for each in answers)


def loaded_from(server: ServerProcess, tier: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(LOADED) and f'tier="{tier}"' in line)


def test_blocks_come_back_from_memory_and_after_a_killed_worker_and_a_restart_from_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    flags = ("--model", "demo", "--dtype", "float32", "--num-kv-blocks", "40")
    offload = ("--kv-offload-memory-bytes", str(2**28), "--kv-offload-dir", str(folder))
    with serving(*flags, *offload, log=tmp_path / "log", environment=ONE_THREAD) as server:
        prompt_tokens = [server.generate(prompt, **FIELDS)["usage"]["prompt_tokens"] for prompt in PROMPTS]
        assert max(prompt_tokens) + 12 < 40 * 16 < sum(prompt_tokens), "one fits, and all do not"
        expected, _ = ask_all(server)
        answers, num_cached = ask_all(server)
        assert answers == expected and num_cached > 0.8 * sum(prompt_tokens)
        assert loaded_from(server, "memory") > 60 and loaded_from(server, "disk") == 0
        info = server.client.get("/info").json()["replicas"][0]["kv_connector"]
        assert info["num_blocks"] > 60 and info["num_failed_loads"] == 0
        server.wait_for_metric("servekit_kv_offload_unwritten_blocks_total", 0.0)
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        answers, num_cached = ask_all(server)
        assert answers == expected and num_cached > 0 and loaded_from(server, "disk") > 0
    files = sorted(folder.glob("*/0/*.block"))
    assert len(files) > 60
    for path in files[::7]:  # damaged in several ways
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    for path in files[1::7]:
        path.write_bytes(b"")
    with serving(*flags, *offload, log=tmp_path / "log-2", environment=ONE_THREAD) as server:
        answers, num_cached = ask_all(server)
        assert answers == expected and num_cached > 0 and loaded_from(server, "disk") > 0
        assert server.metric("servekit_kv_offload_failed_loads_total") > 0
        assert "is computed again" in (tmp_path / "log-2").read_text()
        assert ask_all(server)[0] == expected


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2")],
    ids=["tensor", "pipeline"],
)
def test_each_rank_keeps_its_part_of_the_blocks_and_what_one_has_lost_is_computed(
    tmp_path: Path, sizes: tuple[str, str]
) -> None:
    """In memory; then a rank is killed, and the blocks come from the disk, where one rank finds damage."""
    folder = tmp_path / "blocks"
    flags = ("--model", "demo", "--dtype", "float32", "--num-kv-blocks", "40", *sizes)
    offload = ("--kv-offload-memory-bytes", str(2**28), "--kv-offload-dir", str(folder))
    with serving(*flags[:-2], log=tmp_path / "log-1", environment=ONE_THREAD) as server:
        expected, _ = ask_all(server)
    with serving(*flags, *offload, log=tmp_path / "log-2", environment=ONE_THREAD) as server:
        prompt_tokens = [server.generate(prompt, **FIELDS)["usage"]["prompt_tokens"] for prompt in PROMPTS]
        answers, num_cached = ask_all(server)
        assert answers == expected and num_cached > 0.8 * sum(prompt_tokens)
        assert loaded_from(server, "memory") > 60
        assert server.metric("servekit_kv_offload_failed_loads_total") == 0
        os.kill(server.worker_pids()[1], signal.SIGKILL)
        answers, num_cached = ask_all(server)
        assert answers == expected and num_cached > 0 and loaded_from(server, "disk") > 0
    of_ranks = sorted(folder.glob("*/0"))
    assert len(of_ranks) == 2, "one could take the other's blocks for its own"
    names = [{path.name for path in of_rank.glob("*.block")} for of_rank in of_ranks]
    assert len(names[0] & names[1]) > 60
    for path in sorted(of_ranks[1].glob("*.block"))[::7]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with serving(*flags, *offload, log=tmp_path / "log-3", environment=ONE_THREAD) as server:
        for _ in range(2):
            assert ask_all(server)[0] == expected
        assert loaded_from(server, "disk") > 0
        assert server.metric("servekit_kv_offload_failed_loads_total") > 0


def test_a_simulated_model_offloads_and_a_journal_of_it_is_replayed(tmp_path: Path) -> None:
    flags = ("--model", "sim:step=1ms", "--num-kv-blocks", "12", "--kv-offload-memory-bytes", str(2**20))
    prompts = [f"{letter * 100} What is it?" for letter in "abcd"]
    journal = tmp_path / "journal"
    with serving(*flags, "--journal", str(journal), log=tmp_path / "log") as server:
        for _ in range(3):
            for prompt in prompts:
                expected = bytes(NaiveReference().output(prompt.encode(), SamplingParams(max_tokens=20))).decode()
                assert server.generate(prompt, max_tokens=20)["generated_text"] == expected
        assert loaded_from(server, "memory") > 20
        server.process.send_signal(signal.SIGTERM)
        server.process.wait()
    assert main(["replay", str(journal)]) == 0
