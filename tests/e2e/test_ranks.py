"""A server whose model is divided among several processes: clients see no difference, even if one is killed."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.server_process import ONE_THREAD, ServerProcess, serving

pytestmark = pytest.mark.long

FIELDS = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.0}
PROMPTS = [f"Count from {number}." for number in range(6)]
DIGITS = {"type": "json_schema", "value": {"type": "object", "properties": {"n": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of one process: to each of the prompts, and one with a grammar."""
    with serving(log=tmp_path_factory.mktemp("one") / "log", environment=ONE_THREAD) as server:
        answers = [server.generate(prompt, **FIELDS)["generated_text"] for prompt in PROMPTS]
        return [*answers, constrained(server)]


def constrained(server: ServerProcess) -> str:
    answer: str = server.generate("A number:", max_tokens=30, temperature=0.0, grammar=DIGITS)["generated_text"]
    return answer


@pytest.mark.parametrize(
    ("tensor_size", "pipeline_size", "victim"), [(2, 1, 1), (1, 2, 0), (2, 2, 2)], ids=["tensor", "pipeline", "both"]
)
def test_a_divided_model_answers_as_an_undivided_one_also_when_a_rank_is_killed(
    tensor_size: int, pipeline_size: int, victim: int, undivided: list[str], tmp_path: Path
) -> None:
    sizes = ("--tensor-parallel-size", str(tensor_size), "--pipeline-parallel-size", str(pipeline_size))
    with (
        serving(*sizes, log=tmp_path / "log", environment=ONE_THREAD) as server,
        ThreadPoolExecutor(len(PROMPTS)) as threads,
    ):
        ranks = sorted(server.worker_pids())
        assert len(ranks) == tensor_size * pipeline_size
        answers = threads.map(lambda prompt: server.generate(prompt, **FIELDS)["generated_text"], PROMPTS)
        while server.metric("servekit_generation_tokens_total") < 50:
            time.sleep(0.05)
        os.kill(ranks[victim], signal.SIGKILL)
        assert [*answers, constrained(server)] == undivided
        assert server.metric("servekit_worker_restarts_total") == 1
        assert not set(server.worker_pids()) & set(ranks), "the other ranks are replaced, too"
