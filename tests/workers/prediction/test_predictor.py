"""What a predictor computes equals what transformers computes of one item at a time."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast, pipeline

from servekit.errors import ConfigError
from servekit.protocol.prediction import (
    Activation,
    BatchResult,
    ImageItem,
    LoadPredictor,
    Modality,
    PredictBatch,
    PredictorInfo,
    PredictorKind,
    TextItem,
)
from tests.support.predictor_checkpoints import (
    ENCODERS,
    MAX_LENGTH,
    PAIRS,
    TEXTS,
    make_classifier,
    make_embedder,
    make_image,
    make_image_classifier,
    make_tokenizer,
)
from workers.prediction.predictor import Predictor, load_predictor
from workers.prediction.text_model import ROW_FAMILIES

TOLERANCE = 1e-5
MEAN = {"type": "Pooling", "pooling_mode_mean_tokens": True}
NORMALIZE = {"type": "Normalize"}


def load(folder: Path, kind: PredictorKind, **changes: Any) -> Predictor:
    settings = {"dtype": "auto", "device": "cpu", "max_model_len": None, "max_image_pixels": 10_000}
    return load_predictor(LoadPredictor(str(folder), kind, **{**settings, **changes}), lambda _: None)[0]


def numbers(result: BatchResult) -> list[Tensor | None]:
    values, found, start = torch.tensor(array("f", result.values)), [], 0
    for count in result.counts:
        found.append(values[start : start + count] if count else None)
        start += count
    return found


def items_of(texts: Sequence[Any], **more: Any) -> tuple[TextItem, ...]:
    items = []
    for encoding in make_tokenizer().encode_batch(list(texts)):
        num_first = encoding.type_ids.index(1) if 1 in encoding.type_ids else 0
        items.append(TextItem(tuple(encoding.ids), num_first, **more))
    return tuple(items)


def predicted(predictor: Predictor, texts: Sequence[Any], **more: Any) -> Tensor:
    found = numbers(predictor.predict(PredictBatch(0, 0, items_of(texts, **more))))
    assert all(each is not None for each in found)
    return torch.stack([each for each in found if each is not None])


@torch.inference_mode()
def hidden_states(folder: Path, texts: Sequence[str]) -> list[Tensor]:
    """The naive reference: each text alone, without padding."""
    model = AutoModel.from_pretrained(folder).eval()
    return [
        model(
            input_ids=torch.tensor([encoding.ids]), attention_mask=torch.ones(1, len(encoding.ids), dtype=torch.long)
        ).last_hidden_state[0]
        for encoding in make_tokenizer().encode_batch(list(texts))
    ]


@pytest.mark.parametrize("architecture", ENCODERS)
def test_embeddings_equal_the_mean_of_transformers_hidden_states(architecture: str, tmp_path: Path) -> None:
    make_embedder(tmp_path, architecture, [MEAN, NORMALIZE])
    predictor = load(tmp_path, PredictorKind.EMBED)
    expected = torch.stack([F.normalize(each.mean(dim=0), dim=0) for each in hidden_states(tmp_path, TEXTS)])
    found = predicted(predictor, TEXTS)
    assert (found - expected).abs().max() < TOLERANCE
    assert (expected[0] - expected[1]).abs().max() > 0.01, "or all texts would be equal"
    assert predictor._texts is not None
    assert predictor._texts.uses_row == (architecture in ("bert", "xlm-roberta"))
    assert (predictor._texts._encoder is not None) == predictor._texts.uses_row
    assert predictor.info.dimensions == 32 and predictor.info.max_model_len in (MAX_LENGTH, MAX_LENGTH - 1)


@pytest.mark.parametrize(
    ("mode", "pool"),
    [
        ("cls", lambda h: h[0]),
        ("lasttoken", lambda h: h[-1]),
        ("max", lambda h: h.amax(dim=0)),
        ("mean_sqrt_len_tokens", lambda h: h.sum(dim=0) / len(h) ** 0.5),
        ("weightedmean", lambda h: (h * torch.arange(1, len(h) + 1)[:, None]).sum(dim=0) / sum(range(1, len(h) + 1))),
        (["cls", "mean"], lambda h: torch.cat([h[0], h.mean(dim=0)])),
    ],
)
@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
def test_pooling_does_what_the_checkpoint_says(architecture: str, mode: Any, pool: Any, tmp_path: Path) -> None:
    """With a row, and with padding."""
    make_embedder(tmp_path, architecture, [{"type": "Pooling", "pooling_mode": mode}])
    expected = torch.stack([pool(each) for each in hidden_states(tmp_path, TEXTS)])
    assert (predicted(load(tmp_path, PredictorKind.EMBED), TEXTS) - expected).abs().max() < TOLERANCE


def test_older_names_of_pooling_are_known_and_without_files_it_is_the_mean(tmp_path: Path) -> None:
    make_embedder(tmp_path / "cls", "bert", [{"type": "Pooling", "pooling_mode_cls_token": True}])
    make_embedder(tmp_path / "none")
    (hidden,) = hidden_states(tmp_path / "none", TEXTS[:1])
    assert (predicted(load(tmp_path / "cls", PredictorKind.EMBED), TEXTS[:1])[0] - hidden[0]).abs().max() < TOLERANCE
    assert (
        predicted(load(tmp_path / "none", PredictorKind.EMBED), TEXTS[:1])[0] - hidden.mean(0)
    ).abs().max() < TOLERANCE


def test_dense_and_layer_norm_come_behind_pooling(tmp_path: Path) -> None:
    weight, bias, scale = torch.randn(16, 32), torch.randn(16), torch.randn(16)
    dense = {
        "type": "Dense",
        "activation_function": "torch.nn.modules.activation.Tanh",
        "weights": {"linear.weight": weight, "linear.bias": bias},
    }
    norm = {"type": "LayerNorm", "dimension": 16, "weights": {"norm.weight": scale, "norm.bias": bias}}
    make_embedder(tmp_path, "bert", [MEAN, dense, NORMALIZE, norm, NORMALIZE])
    expected = []
    for each in hidden_states(tmp_path, TEXTS):
        projected = F.normalize(torch.tanh(F.linear(each.mean(dim=0), weight, bias)), dim=0)
        expected.append(F.normalize(F.layer_norm(projected, (16,), scale, bias), dim=0))
    predictor = load(tmp_path, PredictorKind.EMBED)
    assert (predicted(predictor, TEXTS) - torch.stack(expected)).abs().max() < TOLERANCE
    assert predictor.info.dimensions == 16


def test_fewer_dimensions_are_the_first_ones_with_length_one(tmp_path: Path) -> None:
    make_embedder(tmp_path, "bert", [MEAN, NORMALIZE])
    predictor = load(tmp_path, PredictorKind.EMBED)
    full, cut = predicted(predictor, TEXTS), predicted(predictor, TEXTS, dimensions=8)
    assert cut.shape == (len(TEXTS), 8)
    assert (cut - F.normalize(full[:, :8], dim=1)).abs().max() < TOLERANCE


@pytest.mark.parametrize("architecture", ["bert", "distilbert"])
def test_tokens_of_a_prompt_can_be_left_out_of_pooling(architecture: str, tmp_path: Path) -> None:
    make_embedder(tmp_path, architecture, [{**MEAN, "include_prompt": False}])
    predictor = load(tmp_path, PredictorKind.EMBED)
    expected = torch.stack([each[3:].mean(dim=0) for each in hidden_states(tmp_path, TEXTS[:4])])
    assert (predicted(predictor, TEXTS[:4], num_unpooled=3) - expected).abs().max() < TOLERANCE
    assert not predictor.info.pools_prompts


@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta", "modernbert", "distilbert"])
def test_scores_of_pairs_equal_transformers(architecture: str, tmp_path: Path) -> None:
    make_classifier(tmp_path, architecture, labels=["LABEL_0"])
    predictor = load(tmp_path, PredictorKind.RERANK)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    expected = []
    for encoding in make_tokenizer().encode_batch(PAIRS):
        inputs = {"input_ids": torch.tensor([encoding.ids]), "attention_mask": torch.tensor([encoding.attention_mask])}
        if architecture == "bert":
            inputs["token_type_ids"] = torch.tensor([encoding.type_ids])
        with torch.inference_mode():
            expected.append(model(**inputs).logits[0])
    assert (predicted(predictor, PAIRS) - torch.stack(expected)).abs().max() < TOLERANCE
    assert predictor.info.activation is Activation.SIGMOID


@pytest.mark.parametrize("problem", [None, "multi_label_classification", "regression"])
def test_labels_equal_transformers_pipeline(problem: str | None, tmp_path: Path) -> None:
    from servekit.api.responses.prediction import scores_of

    make_classifier(tmp_path, problem_type=problem)
    predictor = load(tmp_path, PredictorKind.CLASSIFY)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    classify: Any = pipeline("text-classification", model=str(tmp_path), tokenizer=tokenizer, device="cpu")
    for text, found in zip(TEXTS, predicted(predictor, TEXTS), strict=True):
        expected = {each["label"]: each["score"] for each in classify(text, top_k=None)}
        scores = scores_of(found.tolist(), predictor.info.activation)
        for label, score in zip(predictor.info.labels, scores, strict=True):
            assert abs(score - expected[label]) < TOLERANCE


def test_images_equal_transformers_pipeline_and_a_bad_one_fails_alone(tmp_path: Path) -> None:
    from servekit.api.responses.prediction import scores_of

    make_image_classifier(tmp_path)
    predictor = load(tmp_path, PredictorKind.CLASSIFY)
    assert predictor.info.modality is Modality.IMAGE and predictor.info.item_tokens == 4
    files = [make_image(seed=1), make_image(33, 57, "JPEG", seed=2), make_image(200, 20, "WEBP", seed=3)]
    text = base64.b64encode(files[1])
    items = (
        ImageItem(False, memoryview(files[0])),
        ImageItem(False, memoryview(b"not an image")),
        ImageItem(True, memoryview(text)),
        ImageItem(True, memoryview(b"data:image/webp;base64," + base64.b64encode(files[2]))),
        ImageItem(False, memoryview(make_image(200, 51))),
        ImageItem(True, memoryview(b"data:image/png,abc")),
        ImageItem(True, memoryview(b"????")),
        ImageItem(False, memoryview(files[0][:200])),
        ImageItem(False, memoryview(files[0]), num_pixels=1199),
    )
    result = predictor.predict(PredictBatch(0, 0, items))
    failed = {failure.index: failure for failure in result.failures}
    assert sorted(failed) == [1, 4, 5, 6, 7, 8] and all(failure.is_client_error for failure in failed.values())
    assert "cannot be decoded" in failed[1].message and "10200" not in failed[1].message
    assert "200 x 51 pixels; the limit is 10000" in failed[4].message
    assert "base64" in failed[5].message and "not valid base64" in failed[6].message
    assert "has 40 x 30 pixels, and its first header says 1199 in all" in failed[8].message
    classify: Any = pipeline("image-classification", model=str(tmp_path), device="cpu")
    found = numbers(result)
    for place, content in zip((0, 2, 3), files, strict=True):
        expected = {each["label"]: each["score"] for each in classify(Image.open(io.BytesIO(content)))}
        logits = found[place]
        assert logits is not None
        for label, score in zip(predictor.info.labels, scores_of(logits.tolist(), Activation.SOFTMAX), strict=True):
            assert abs(score - expected[label]) < TOLERANCE


def test_images_that_are_cheap_to_send_and_dear_to_open_are_refused(tmp_path: Path) -> None:
    """A scan of 53 bytes took 9 ms of a large JPEG file, and a profile of 1 kB in a PNG file 2 ms."""
    make_image_classifier(tmp_path)
    predictor = load(tmp_path, PredictorKind.CLASSIFY)
    content = io.BytesIO()
    Image.open(io.BytesIO(make_image())).save(content, "JPEG", progressive=True)
    jpeg, png = content.getvalue(), make_image()
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    profile = zlib.compress(bytes(2**20))
    chunk = b"iCCP" + b"a\0\0" + profile
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    files = [jpeg, jpeg[:-2] + 200 * scan + jpeg[-2:], png[:33] + chunk + png[33:], png[:33] + 20 * chunk + png[33:]]
    result = predictor.predict(PredictBatch(0, 0, tuple(ImageItem(False, memoryview(data)) for data in files)))
    assert result.counts == (3, 0, 3, 0)
    messages = [failure.message for failure in result.failures]
    assert "more than 100 scans" in messages[0] and "more than 10 profiles of colors" in messages[1]


def test_a_narrow_image_is_not_enlarged_to_gigabytes(tmp_path: Path) -> None:
    """A processor that gives the shorter side a size makes 29 billion pixels of a line of 32 x 1 megapixels."""
    make_image_classifier(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings |= {
        "image_processor_type": "ConvNextImageProcessor",
        "size": {"shortest_edge": 32},
        "crop_pct": 0.875,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    predictor = load(tmp_path, PredictorKind.CLASSIFY, max_image_pixels=2**25)
    content = io.BytesIO()
    Image.new("1", (1, 20_000)).save(content, "PNG")
    items = (ImageItem(False, memoryview(content.getvalue())), ImageItem(False, memoryview(make_image(20, 200))))
    result = predictor.predict(PredictBatch(0, 0, items))
    assert [failure.index for failure in result.failures] == [0] and result.counts == (0, 3)
    assert "has 1 x 20000 pixels, and the model needs 32 on the shorter side" in result.failures[0].message


def test_items_that_do_not_fit_into_memory_are_computed_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_embedder(tmp_path, "bert", [MEAN])
    predictor = load(tmp_path, PredictorKind.EMBED)
    expected = predicted(predictor, TEXTS)
    compute, longest = predictor._predict_texts, max(len(item.token_ids) for item in items_of(TEXTS))

    def short_of_memory(items: Sequence[TextItem]) -> list[Tensor]:
        if len(items) > 2 or any(len(item.token_ids) == longest for item in items):
            raise torch.OutOfMemoryError("planted")
        return compute(items)

    monkeypatch.setattr(predictor, "_predict_texts", short_of_memory)
    result = predictor.predict(PredictBatch(0, 0, items_of(TEXTS)))
    found = numbers(result)
    assert [failure.index for failure in result.failures] == [3] and found[3] is None
    assert not result.failures[0].is_client_error
    for index, each in enumerate(found):
        assert each is None or (each - expected[index]).abs().max() < TOLERANCE


def test_a_model_whose_row_differs_computes_with_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_embedder(tmp_path, "bert", [MEAN])
    monkeypatch.setitem(ROW_FAMILIES, "bert", True)  # which gives wrong positions
    predictor = load(tmp_path, PredictorKind.EMBED)
    assert predictor._texts is not None and not predictor._texts.uses_row
    expected = torch.stack([each.mean(dim=0) for each in hidden_states(tmp_path, TEXTS)])
    assert (predicted(predictor, TEXTS) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"modules.json": '[{"type": "x.WordEmbeddings", "path": ""}]'}, "needs a Transformer"),
        ({"modules.json": '[{"type": "x.Transformer", "path": ""}]'}, "one Pooling must come first"),
        ({"modules.json": '[{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "../a"}]'}, "folder"),
        ({"modules.json": '[{"type": "x.Transformer", "path": ""}, {"type": "x.CNN", "path": "1"}]'}, "a module x.CNN"),
        ({"modules.json": "{"}, "not a list of modules"),
        ({"config_sentence_transformers.json": "[]"}, "not a JSON object"),
        ({"config_sentence_transformers.json": '{"prompts": {"a": 1}}'}, "not an object of texts"),
        ({"config_sentence_transformers.json": '{"activation_fn": "os.system"}'}, "activation"),
    ],
)
def test_files_that_are_not_understood_are_refused(files: dict[str, str], words: str, tmp_path: Path) -> None:
    make_embedder(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, PredictorKind.EMBED)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    make_classifier(tmp_path)
    with pytest.raises(ConfigError, match="has 3 labels; a reranker has one"):
        load(tmp_path, PredictorKind.RERANK)
    with pytest.raises(ConfigError, match="exceeds the model's"):
        load(tmp_path, PredictorKind.CLASSIFY, max_model_len=10_000)


def test_prompts_limits_and_activations_are_read(tmp_path: Path) -> None:
    make_classifier(
        tmp_path, labels=["LABEL_0"], sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}
    )
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 20, "do_lower_case": true}')
    (tmp_path / "config_sentence_transformers.json").write_text(
        '{"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}'
    )
    info: PredictorInfo = load(tmp_path, PredictorKind.RERANK).info
    assert (info.activation, info.max_model_len, info.lowercases) == (Activation.NONE, 20, True)
    assert (info.prompts, info.default_prompt) == ({"query": "query: "}, "query")
