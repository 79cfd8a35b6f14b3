"""Models of several kinds in one server, loaded on demand; and a server of one model that generates nothing."""

from __future__ import annotations

import base64
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, pipeline

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.browser import chromium, new_page
from tests.support.predictor_checkpoints import TEXTS, make_classifier, make_embedder, make_image, make_image_classifier
from tests.support.server_process import ServerProcess, serving

# There is memory for two of these. What each one does is in its files.
MODELS = """
[memory]
cpu = 200
"""
MODEL = """
[[model]]
id = "{id}"
model = "{model}"
device = "cpu"
dtype = "float32"
num_kv_blocks = 100
memory_bytes = 100
keep = "on_demand"
"""
QUESTION = "What color is the sky?"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    make_classifier(folder / "texts")
    make_image_classifier(folder / "images")
    make_embedder(folder / "embedder")
    paths = {"chat": "demo", **{name: str(folder / name) for name in ("texts", "images", "embedder")}}
    (folder / "models.toml").write_text(
        MODELS + "".join(MODEL.format(id=name, model=path) for name, path in paths.items())
    )
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving("--models", str(folder / "models.toml"), log=folder / "log") as started:
        yield started


def post(server: ServerProcess, path: str, **body: Any) -> Any:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def states(server: ServerProcess) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.client.get("/v1/models").json()["data"]}


def labelled(prediction: dict[str, Any]) -> dict[str, float]:
    return {each["label"]: each["score"] for each in prediction["scores"]}


def close(found: dict[str, float], expected: list[dict[str, Any]]) -> bool:
    """Return whether these are the scores of a pipeline of transformers."""
    return found == pytest.approx({each["label"]: each["score"] for each in expected}, abs=TOLERANCE)


def check_texts(server: ServerProcess, folder: Path, **body: Any) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "texts")
    classify: Any = pipeline("text-classification", model=str(folder / "texts"), tokenizer=tokenizer, device="cpu")
    predictions = post(server, "/predict", input=TEXTS, **body)["predictions"]
    for text, found in zip(TEXTS, predictions, strict=True):
        assert close(labelled(found), classify(text, top_k=None))


def test_third_model_evicts_the_first_and_answers_equal_transformers_pipelines(
    server: ServerProcess, folder: Path
) -> None:
    """The example of the books: three models of different kinds by id, and memory for two of them."""
    check_texts(server, folder, model="texts")
    image = make_image(seed=1)
    body = {"model": "images", "image": base64.b64encode(image).decode()}
    (found,) = post(server, "/predict", **body)["predictions"]
    see: Any = pipeline("image-classification", model=str(folder / "images"), device="cpu")
    assert close(labelled(found), see(Image.open(io.BytesIO(image))))
    assert (states(server)["texts"], states(server)["images"]) == ("ready", "ready")
    answer = post(server, "/v1/completions", model="chat", prompt=QUESTION, max_tokens=12, temperature=0)
    write: Any = pipeline("text-generation", model=str(DEMO_MODEL_PATH), dtype=torch.float32, device="cpu")
    (expected,) = write(QUESTION, max_new_tokens=12, do_sample=False, return_full_text=False)
    assert answer["choices"][0]["text"] == expected["generated_text"]
    found_states = states(server)
    assert (found_states["texts"], found_states["images"], found_states["chat"]) == ("cold", "ready", "ready")
    hot = server.client.post("/predict", json=body)
    assert "x-model-position" not in hot.headers and labelled(hot.json()["predictions"][0]) == labelled(found)
    # Now the LLM was used least recently.
    cold = server.client.post("/predict", json={"model": "texts", "input": TEXTS[0]})
    assert cold.headers["x-model-position"] == "1" and states(server)["chat"] == "cold"


def test_model_of_another_kind_is_refused_with_the_names_of_those_that_fit(server: ServerProcess) -> None:
    before = states(server)
    for path, body, words in (
        ("/v1/completions", {"model": "embedder", "prompt": "x"}, "it generates no text. Please name 'chat'."),
        ("/v1/embeddings", {"model": "chat", "input": "x"}, "it computes no embeddings. Please name 'embedder'."),
        ("/predict", {"model": "chat", "input": "x"}, "it classifies nothing. Please name 'texts', 'images'."),
        ("/score", {"model": "chat", "text_1": "x", "text_2": "y"}, "it scores no documents. Please start a model of"),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}, "it scores no documents. Please start a model of"),
    ):
        response = server.client.post(path, json=body)
        assert response.status_code == 400 and response.json()["error"]["code"] == "not_supported", response.text
        assert words in response.json()["error"]["message"]
    assert states(server) == before, "a refused request loads nothing"


def test_without_a_name_the_first_model_of_the_routes_kind_answers(server: ServerProcess) -> None:
    listed = {each["id"]: each["kind"] for each in server.client.get("/v1/models").json()["data"]}
    assert listed == {"chat": "generate", "texts": "classify", "images": "classify", "embedder": "embed"}
    named = post(server, "/v1/embeddings", model="embedder", input=QUESTION)
    assert post(server, "/v1/embeddings", input=QUESTION)["data"] == named["data"] and named["model"] == "embedder"
    assert post(server, "/embed", inputs=QUESTION) == [named["data"][0]["embedding"]]
    assert post(server, "/predict", input=TEXTS[0])["model"] == "texts"
    mixed = server.client.post("/predict", json={"model": "texts", "image": "AAAA"})
    assert mixed.status_code == 400 and "takes texts" in mixed.text
    info = server.client.get("/info", params={"model": "embedder"}).json()
    assert info["kind"] == "embed" and info["worker"]["model"]["architecture"] == "BertModel"
    assert info["replicas"][0]["predictor"]["dimensions"] == 32
    assert server.client.get("/ui/state", params={"model": "embedder"}).json()["model_name"] == "embedder"
    assert server.metric('servekit_model_loads_total{model_name="embedder",result="loaded"}') == 1.0


def test_console_compares_two_texts_and_classifies_a_picture(server: ServerProcess, tmp_path: Path) -> None:
    image = make_image(seed=3)
    (tmp_path / "a.png").write_bytes(image)
    with chromium() as browser, new_page(browser) as page:
        page.goto(server.url)
        page.locator("#model-choice").wait_for()
        choice, rows = page.locator("#model-choice"), page.locator("#predictions tr")
        tiles = page.locator(".tiles dt").locator("visible=true")
        assert "embedder (embed)" in choice.locator("option").nth(3).inner_text()

        def send() -> list[str]:
            page.locator("#predict-button").click()
            page.locator("#prediction-status").filter(has_text="Done.").wait_for()
            return rows.all_inner_texts()

        choice.select_option("embedder")
        page.locator("#second-field textarea").fill(TEXTS[0])
        shown = dict(row.split("\t") for row in send())
        texts = [QUESTION, TEXTS[0]]
        vectors = [each["embedding"] for each in post(server, "/v1/embeddings", model="embedder", input=texts)["data"]]
        similarity = torch.nn.functional.cosine_similarity(*torch.tensor(vectors), dim=0).item()
        assert float(shown["cosine similarity"]) == pytest.approx(similarity, abs=1e-4)
        assert not page.locator("#playground-form").is_visible()
        assert (
            tiles.all_inner_texts() == ["waiting", "workers"]
            and not page.locator(".charts, .sequences").locator("visible=true").count()
        )
        choice.select_option("images")
        page.locator("#picture-field").wait_for()  # the form is that of the chosen model
        page.locator("#picture-field input").set_input_files(tmp_path / "a.png")
        with page.expect_request("**/predict") as request:
            shown = dict(row.split("\t") for row in send())
        assert request.value.post_data_json["top_k"] == 10, "a classifier may have thousands of labels"
        encoded = base64.b64encode(image).decode()
        (expected,) = post(server, "/predict", model="images", image=encoded)["predictions"]
        assert {label: float(score) for label, score in shown.items()} == pytest.approx(labelled(expected), abs=1e-4)
        assert page.locator("#picture img").is_visible()
        choice.select_option("chat")
        page.locator("#playground-form").wait_for()
        page.locator(".charts").wait_for()
        assert "preemptions" in tiles.all_inner_texts()


def test_lost_worker_of_a_predictor_is_replaced_and_what_it_had_is_computed_again(tmp_path: Path, folder: Path) -> None:
    """A server of one model, which classifies texts."""
    with serving(str(folder / "texts"), "--dtype", "float32", log=tmp_path / "log") as server:
        check_texts(server, folder)
        assert server.client.get("/v1/models").json()["data"][0]["kind"] == "classify"
        refused = server.client.post("/generate", json={"prompt": "x"})
        assert refused.status_code == 400 and "classifies: POST /predict; it generates no text" in refused.text
        (worker,) = server.worker_pids()
        near = [
            pytest.approx(labelled(each), abs=TOLERANCE)
            for each in post(server, "/predict", input=TEXTS)["predictions"]
        ]
        with ThreadPoolExecutor(8) as threads:
            asked = [threads.submit(post, server, "/predict", input=TEXTS) for _ in range(16)]
            os.kill(worker, signal.SIGKILL)
            for each in asked:
                assert list(map(labelled, each.result()["predictions"])) == near
        assert server.worker_pids() != [worker] and server.metric("servekit_worker_restarts_total") == 1.0
        log = server.log.read_text()
        assert "kind classify" in log and """/predict -d '{"input": "A wonderful film."}'""" in log
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_image_is_uploaded_as_a_form_to_the_model_that_the_form_names(server: ServerProcess) -> None:
    image = make_image(seed=2)
    uploaded = server.client.post("/predict", data={"model": "images"}, files={"image": ("a.png", image)})
    assert uploaded.status_code == 200, uploaded.text
    encoded = post(server, "/predict", model="images", image=base64.b64encode(image).decode())
    assert uploaded.json()["predictions"] == encoded["predictions"]
    broken = server.client.post("/predict", json={"model": "images", "image": "AAAA"})
    assert broken.status_code == 400
