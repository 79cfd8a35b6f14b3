"""LoRA adapters over HTTP: each answers as the merged model would; operators load and unload them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.lora_adapters import make_adapter
from tests.support.server_process import ONE_THREAD, ServerProcess, serving
from tests.support.streams import from_all, new_client

PROMPT = "What color is the sky?"
ADAPTERS = ("a", "b", "c")
MAX_TOKENS = 12


@dataclass
class Served:
    server: ServerProcess
    folder: Path
    models: dict[str, PreTrainedModel]

    def expected(self, name: str, prompt: list[int]) -> list[int]:
        with torch.inference_mode():
            output = self.models[name].generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=[2**31],
            )
        found: list[int] = output[0, len(prompt) :].tolist()
        return found

    def answer(self, **fields: Any) -> tuple[list[int], list[int], str]:
        """Return the token ids of prompt and answer, and the model's name in the answer."""
        body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
        response = self.server.client.post("/v1/completions", json={**body, "return_token_ids": True})
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        return choice["prompt_token_ids"], choice["token_ids"], response.json()["model"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("lora")
    base = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32).eval()
    models = {"demo": base} | {name: make_adapter(folder / name, base, i) for i, name in enumerate(ADAPTERS)}
    flags = ["--enable-lora", "--max-loras", "2", "--data-parallel-size", "2", "--speculative", "ngram:4"]
    flags += [flag for name in ("a", "b") for flag in ("--lora", f"{name}={folder / name}")]
    with serving(*flags, log=folder / "log", environment=ONE_THREAD) as server:
        yield Served(server, folder, models)


def test_each_model_of_a_batch_answers_as_its_merged_weights_do(served: Served) -> None:
    names = ["demo", "a", "b", "a", "demo", "b"]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda name: served.answer(model=name), names))
    for name, (prompt, token_ids, model) in zip(names, answers, strict=True):
        assert token_ids == served.expected(name, prompt)
        assert model == name
    assert len({tuple(token_ids) for _, token_ids, _ in answers}) == 3


def test_models_are_listed_with_their_parent(served: Served) -> None:
    listed = {each["id"]: each for each in served.server.client.get("/v1/models").json()["data"]}
    assert listed["a"]["parent"] == "demo" and listed["a"]["root"] == str(served.folder / "a")
    assert listed["demo"]["parent"] is None
    assert served.server.client.get("/v1/models/b").json()["parent"] == "demo"


def test_adapter_id_names_an_adapter_in_the_native_and_in_tgis_body(served: Served) -> None:
    expected = served.server.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0, model="a")["generated_text"]
    for fields in ({"adapter_id": "a"}, {"adapter_id": "a", "model": "demo"}, {"adapter_id": "a", "model": "a"}):
        native = served.server.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0, **fields)
        assert native["generated_text"] == expected
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": MAX_TOKENS, "do_sample": False, "adapter_id": "a"}}
    assert served.server.client.post("/generate", json=body).json()["generated_text"] == expected
    assert expected != served.server.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0)["generated_text"]


def test_an_adapter_that_does_not_exist_is_refused_by_name(served: Served) -> None:
    client = served.server.client
    wrong = client.post("/generate", json={"prompt": "a", "adapter_id": "nobody"})
    assert wrong.status_code == 400 and "'a', 'b'" in wrong.json()["error"]["message"]
    missing = client.post("/v1/completions", json={"prompt": "a", "model": "nobody"})
    assert missing.status_code == 404 and "'demo', 'a', 'b'" in missing.json()["error"]["message"]


def test_adapters_are_loaded_and_unloaded_while_others_answer(served: Served) -> None:
    client, path = served.server.client, str(served.folder / "c")
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(served.answer, model="a") for _ in range(4)]
        loaded = client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": path})
        assert loaded.status_code == 200 and loaded.text == "Success: LoRA adapter 'c' added successfully."
        answers = [pool.submit(served.answer, model=name) for name in ("c", "b", "a", "c")]
    for future, name in zip([*others, *answers], ["a"] * 4 + ["c", "b", "a", "c"], strict=True):
        prompt, token_ids, _ = future.result()
        assert token_ids == served.expected(name, prompt)
    again = client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": path})
    assert again.status_code == 400 and "loaded already" in again.json()["error"]["message"]
    taken = client.post("/v1/load_lora_adapter", json={"lora_name": "demo", "lora_path": path})
    assert taken.status_code == 400 and "name of a model" in taken.json()["error"]["message"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "c"}).status_code == 200
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "c"}).status_code == 404
    assert client.post("/v1/completions", json={"prompt": "a", "model": "c"}).status_code == 404


def test_replicas_have_the_same_adapters_also_after_one_lost_its_worker(served: Served) -> None:
    """An adapter that was loaded at run time is known to the worker that replaces the lost one."""
    client, server = served.server.client, served.server
    path = str(served.folder / "c")
    assert client.post("/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": path}).status_code == 200
    before = steps_of_replicas(server)
    names = ["a", "c", "demo", "c", "a", "c", "a", "c"]
    with ThreadPoolExecutor() as pool:
        for lost in server.worker_pids():
            answers = [pool.submit(served.answer, model=name) for name in names]
            os.kill(lost, signal.SIGKILL)
            for name, future in zip(names, answers, strict=True):
                prompt, token_ids, _ = future.result()
                assert token_ids == served.expected(name, prompt)
            server.wait_for_metric("servekit_workers_alive", 2)
        answers = [pool.submit(served.answer, model=name) for name in names * 2]
        for name, future in zip(names * 2, answers, strict=True):
            prompt, token_ids, _ = future.result()
            assert token_ids == served.expected(name, prompt)
    assert all(now > then for now, then in zip(steps_of_replicas(server), before, strict=True))
    server.wait_until_at_rest()
    assert server.metric("servekit_accounting_faults_total") == 0
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "c"}).status_code == 200


def steps_of_replicas(server: ServerProcess) -> list[float]:
    lines = server.client.get("/metrics").text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("servekit_scheduler_steps_total{")]


def test_metrics_and_info_count_by_adapter(served: Served) -> None:
    def counted(kind: str, adapter: str) -> float:
        label = f'servekit_lora_{kind}_total{{adapter="{adapter}"'
        lines = served.server.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(label))

    kinds = ("requests", "prompt_tokens", "generation_tokens")
    before = {kind: counted(kind, "a") for kind in kinds}
    prompt, token_ids, _ = served.answer(model="a")
    served.answer(model="demo")
    found = [counted(kind, "a") - before[kind] for kind in kinds]
    assert found == [1, len(prompt), len(token_ids)]
    assert served.server.metric("servekit_lora_adapters") == 2
    assert served.server.metric("servekit_lora_adapters_in_use") == 0
    assert served.server.metric("servekit_lora_reads_total") >= 2
    assert served.server.metric("servekit_lora_evictions_total") >= 0
    adapters = served.server.client.get("/info").json()["adapters"]
    assert adapters == {"num_adapters": 2, "num_waiting": 0, "in_use": {}, "waiting": []}


@pytest.mark.long
def test_ranks_answer_as_merged_weights_do(served: Served, tmp_path: Path) -> None:
    flags = [flag for name in ("a", "b") for flag in ("--lora", f"{name}={served.folder / name}")]
    flags += ["--tensor-parallel-size", "2", "--max-loras", "1"]
    with serving(*flags, log=tmp_path / "log", environment=ONE_THREAD) as server:
        divided = Served(server, served.folder, served.models)
        for name in ("a", "demo", "b", "a"):
            prompt, token_ids, _ = divided.answer(model=name)
            assert token_ids == served.expected(name, prompt)


@pytest.mark.long
def test_adapters_reach_every_api_process(served: Served, tmp_path: Path) -> None:
    flags = ["--lora", f"a={served.folder / 'a'}", "--enable-lora", "--max-loras", "1", "--api-processes", "2"]
    with serving(*flags, log=tmp_path / "log", environment=ONE_THREAD) as server:
        ours = Served(server, served.folder, served.models)
        body = {"lora_name": "b", "lora_path": str(served.folder / "b")}
        with new_client(server) as client:
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert {len(each.json()["data"]) for each in from_all(server, "GET", "/v1/models")} == {3}
        prompt, _, _ = ours.answer(model="a")
        expected = {name: ours.expected(name, prompt) for name in ("demo", "a", "b")}

        def answer(name: str) -> list[int]:
            body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "model": name}
            with new_client(server) as client:
                answered = client.post("/v1/completions", json={**body, "return_token_ids": True})
            assert answered.status_code == 200, answered.text
            return list(answered.json()["choices"][0]["token_ids"])

        names = ["a", "b", "demo"] * 6
        with ThreadPoolExecutor(6) as pool:
            for name, token_ids in zip(names, pool.map(answer, names), strict=True):
                assert token_ids == expected[name]
        with new_client(server) as client:
            assert client.post("/v1/unload_lora_adapter", json={"lora_name": "b"}).status_code == 200
        answers = from_all(server, "POST", "/v1/completions", json={"prompt": "a", "model": "b"})
        assert {each.status_code for each in answers} == {404}
        server.wait_until_at_rest()
        assert server.metric("servekit_lora_adapters_in_use") == 0


def test_an_adapter_that_does_not_fit_is_refused_in_a_sentence(served: Served, tmp_path: Path) -> None:
    make_adapter(tmp_path / "large", served.models["demo"], 9, r=17)
    make_adapter(tmp_path / "dora", served.models["demo"], 9, use_dora=True)
    for path, reason in (("large", "--max-lora-rank"), ("dora", "DoRA"), ("nothing", "holds no adapter")):
        body = {"lora_name": path, "lora_path": str(tmp_path / path)}
        refused = served.server.client.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 400 and reason in refused.json()["error"]["message"], refused.text
    assert served.answer(model="a")[1], "the worker lives"


def entry(key: str, rest: str) -> str:
    return f'[[key]]\nsha256 = "{sha256(key.encode()).hexdigest()}"\n{rest}\n'


def test_only_operators_load_adapters(tmp_path: Path) -> None:
    keys = entry("operator", 'tenant = "operators"\nadmin = true') + entry("client", 'tenant = "clients"')
    (tmp_path / "keys.toml").write_text(keys)
    flags = ("sim:instant", "--enable-lora", "--api-keys-file", str(tmp_path / "keys.toml"))
    with serving(*flags, log=tmp_path / "log") as server:

        def status(key: str, route: str, **body: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            answer = server.client.post(f"/v1/{route}_lora_adapter", json={"lora_name": "a", **body}, headers=headers)
            return answer.status_code

        assert status("client", "load", lora_path=str(tmp_path)) == 403
        assert status("operator", "load", lora_path=str(tmp_path)) == 200
        assert status("client", "unload") == 403
        assert status("operator", "unload") == 200
