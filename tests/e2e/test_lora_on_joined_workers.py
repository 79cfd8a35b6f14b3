"""LoRA adapters on workers that join: each answers as the merged model would, and a machine must have the files."""

from __future__ import annotations

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.e2e.test_joining_workers import ENOUGH_S, Service, num_serving
from tests.e2e.test_lora import Served
from tests.support.lora_adapters import make_adapter
from tests.support.server_process import ONE_THREAD

PROMPTS = [f"What color is boat {number}?" for number in range(8)]


def assert_answers(served: Served, *names: str) -> None:
    """Check answers of adapters, asked at the same time, so that each worker computes some."""
    asked = [(name, prompt) for name in names for prompt in PROMPTS]
    with ThreadPoolExecutor(len(asked)) as threads:
        answers = threads.map(lambda each: served.answer(model=each[0], prompt=each[1]), asked)
        for (name, _), (prompt, answer, model) in zip(asked, answers, strict=True):
            assert model == name and answer == served.expected(name, prompt)


def test_adapters_are_served_by_workers_whose_machines_have_the_files_and_by_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32).eval()
    models = {name: make_adapter(tmp_path / name, base, number) for number, name in enumerate("ab")}
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    flags = ("--model", "demo", "--dtype", "float32", "--lora", f"a={tmp_path / 'a'}", "--enable-lora")
    service = Service(tmp_path, *flags)
    try:
        served = Served(service.server, tmp_path, models)
        for _ in range(2):
            service.add_worker()
        service.server.wait_until_ready(ENOUGH_S)
        service.wait_until(lambda: num_serving(service) == 2)
        body = {"lora_name": "b", "lora_path": str(tmp_path / "b")}
        response = service.server.client.post("/v1/load_lora_adapter", json=body)
        assert response.status_code == 200, response.text
        assert_answers(served, "a", "b")
        metrics = service.server.client.get("/metrics").text
        for replica in "01":
            name = f'servekit_prefix_cache_queries_total{{model_name="demo",replica="{replica}"}}'
            (computed,) = (float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name))
            assert computed > 0, "each worker has computed prompts"

        (tmp_path / "b").rename(tmp_path / "away")  # as on a machine that does not have it
        service.workers[1].send_signal(signal.SIGTERM)
        assert service.workers[1].wait(ENOUGH_S) == 0
        service.add_worker()
        refusal = "it cannot serve the LoRA adapter 'b' in "
        service.wait_until(lambda: refusal in service.server.log.read_text())
        service.wait_until(lambda: refusal in (tmp_path / "worker2.log").read_text())
        assert num_serving(service) == 1
        assert_answers(served, "a", "b")  # the other worker has it in memory

        shutil.copytree(tmp_path / "away", tmp_path / "b")  # files of another time and number, with the same contents
        service.wait_until(lambda: num_serving(service) == 2)
        assert_answers(served, "a", "b")
    finally:
        service.end()
