"""Load a model that embeds, reranks or classifies, and compute batches of items with it."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)
from transformers.utils import logging as transformers_logging

from servekit.errors import ConfigError
from servekit.protocol.prediction import (
    Activation,
    BatchResult,
    ImageItem,
    ItemFailure,
    LoadPredictor,
    Modality,
    PredictBatch,
    PredictorInfo,
    PredictorKind,
    PredictorReady,
    TextItem,
)
from workers.device.memory import allocation_refused_as, held_bytes, is_out_of_memory, release_memory
from workers.loading.checkpoint import check_num_parameters, find_weights
from workers.loading.model_config import architecture_of, read_config
from workers.loading.model_manager import torch_device
from workers.loading.progress import Progress
from workers.loading.refusals import in_one_line
from workers.loading.weights import check_complete, move, tensors_counted
from workers.prediction.checkpoint_files import SentenceTransformerFiles, read_files, tokenizer_limit
from workers.prediction.images import BadImage, ImageProcessor
from workers.prediction.pooling import EmbeddingHead
from workers.prediction.text_model import TextModel

log = logging.getLogger("servekit.worker")

POSITIONS_BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl", "xmod", "longformer")
PIXELS_PER_TOKEN = 256  # an image counts as many tokens as patches of 16 x 16 pixels
MAX_MESSAGE = 500  # characters of a failure


class Predictor:
    """One loaded model. It computes the items of a batch together."""

    def __init__(
        self,
        info: PredictorInfo,
        model: PreTrainedModel,
        head: EmbeddingHead | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        """`head` is that of an embedder, `images` prepares the items of a model of images."""
        self.info = info
        self._model = model
        self._head = head
        self._images = images
        self._texts = None if info.modality is Modality.IMAGE else TextModel(model)

    @torch.inference_mode()
    def predict(self, batch: PredictBatch) -> BatchResult:
        """Compute a batch. An item that cannot be computed fails alone."""
        started_s = time.monotonic()
        num_before = 0 if self._texts is None else self._texts.num_computed_tokens
        failures: list[ItemFailure] = []
        if self._images is not None:
            vectors = self._predict_images([each for each in batch.items if isinstance(each, ImageItem)], failures)
            num_tokens = self.info.item_tokens * (len(batch.items) - len(failures))
        else:
            assert self._texts is not None
            texts = [each for each in batch.items if isinstance(each, TextItem)]
            vectors = self._in_pieces(self._predict_texts, texts, 0, failures)
            num_tokens = self._texts.num_computed_tokens - num_before
        arrays = [b"" if vector is None else vector.numpy().tobytes() for vector in vectors]
        return BatchResult(
            batch.epoch,
            batch.batch_id,
            b"".join(arrays),
            tuple(0 if vector is None else len(vector) for vector in vectors),
            time.monotonic() - started_s,
            num_tokens,
            tuple(failures),
        )

    def _predict_texts(self, items: Sequence[TextItem]) -> list[Tensor]:
        assert self._texts is not None
        if self._head is None:
            return list(self._texts.logits(items).cpu())
        placed: dict[int, Tensor] = {}
        for hidden in self._texts.hidden_states(items):
            embeddings = self._head(hidden)
            wanted = [items[index].dimensions for index in hidden.indices]
            if not any(wanted):
                placed.update(zip(hidden.indices, self._head.finish(embeddings, None).cpu(), strict=True))
                continue
            for number, index in enumerate(hidden.indices):
                placed[index] = self._head.finish(embeddings[number], wanted[number]).cpu()
        return [placed[index] for index in range(len(items))]

    def _predict_images(self, items: Sequence[ImageItem], failures: list[ItemFailure]) -> list[Tensor | None]:
        assert self._images is not None
        prepared: dict[int, Tensor] = {}
        for index, item in enumerate(items):
            try:
                prepared[index] = self._images(item)
            except BadImage as error:
                failures.append(ItemFailure(index, str(error)[:MAX_MESSAGE], is_client_error=True))
        vectors: list[Tensor | None] = [None] * len(items)
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, values in prepared.items():
            by_shape.setdefault(tuple(values.shape), []).append(index)
        for indices in by_shape.values():
            own: list[ItemFailure] = []
            computed = self._in_pieces(self._compute_pixels, [prepared[index] for index in indices], 0, own)
            failures += [ItemFailure(indices[each.index], each.message, each.is_client_error) for each in own]
            for index, vector in zip(indices, computed, strict=True):
                vectors[index] = vector
        return vectors

    def _compute_pixels(self, values: Sequence[Tensor]) -> list[Tensor]:
        pixels = torch.stack(list(values)).to(self._model.device, self._model.dtype)
        logits: Tensor = self._model(pixel_values=pixels).logits
        return list(logits.float().cpu())

    @torch.inference_mode()
    def try_image(self) -> int:
        """Compute an image, and return the tokens that one counts in a batch. Raises what the model raises."""
        assert self._images is not None
        pixels = self._images.blank()
        self._compute_pixels([pixels])
        return max(1, pixels.shape[-1] * pixels.shape[-2] // PIXELS_PER_TOKEN)

    def _in_pieces(
        self,
        compute: Callable[[Sequence[Any]], list[Tensor]],
        items: Sequence[Any],
        first: int,
        failures: list[ItemFailure],
    ) -> list[Tensor | None]:
        """Compute items together, and halves of them if the device's memory does not hold them."""
        try:
            return list(compute(items))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release_memory()
        if len(items) == 1:
            message = "the device's memory does not hold this item; send a shorter text or a smaller image"
            failures.append(ItemFailure(first, message, is_client_error=False))
            return [None]
        half = len(items) // 2
        log.warning("%d items do not fit into the device's memory together; computing halves", len(items))
        return [
            *self._in_pieces(compute, items[:half], first, failures),
            *self._in_pieces(compute, items[half:], first + half, failures),
        ]


def load_predictor(settings: LoadPredictor, report_stage: Callable[[str], None]) -> tuple[Predictor, PredictorReady]:
    """Load the model that `settings` name. Raises ConfigError for what cannot be served."""
    started_s, path, progress = time.monotonic(), Path(settings.model_path), Progress(report_stage)
    transformers_logging.set_verbosity_error()
    device = torch_device(settings.device)
    config, files = read_config(path), read_files(path)
    architecture = architecture_of(config)
    modality = _check_kind(settings.kind, config, architecture)
    images = ImageProcessor(path, settings.max_image_pixels) if modality is Modality.IMAGE else None
    log.info("loading %s from %s", architecture, path)
    remedy = "choose a smaller model, a dtype of fewer bytes (--dtype), or a device with more memory"
    with allocation_refused_as("the model's weights", device, remedy):
        model, num_bytes = _read_model(path, config, settings, modality, device, progress)
        head = EmbeddingHead(files.modules) if settings.kind is PredictorKind.EMBED else None
        move(model, device, progress)
        if head is not None:
            head.to(device, model.dtype)
    model.eval()
    info = PredictorInfo(
        kind=settings.kind,
        modality=modality,
        architecture=architecture,
        num_parameters=model.num_parameters(),
        vocab_size=0 if images is not None else config.get_text_config().vocab_size,
        max_model_len=_max_model_len(settings.max_model_len, path, config, files) if images is None else 1,
        labels=_labels(config) if settings.kind is PredictorKind.CLASSIFY else (),
        activation=_activation(settings.kind, config, files),
        prompts=files.prompts,
        default_prompt=files.default_prompt,
        lowercases=files.lowercases,
        pools_prompts=head is None or head.pooling.includes_prompt,
        fingerprint=settings.fingerprint,
    )
    predictor = Predictor(info, model, head, images)
    info = predictor.info = _measured(predictor)
    ready = PredictorReady(
        info,
        str(device),
        str(model.dtype).removeprefix("torch."),
        time.monotonic() - started_s,
        num_bytes,
        held_bytes(torch.device(device), num_bytes),
    )
    return predictor, ready


def _check_kind(kind: PredictorKind, config: Any, architecture: str) -> Modality:
    """Return what the model's items are. Raises ConfigError if transformers has no model of this kind."""
    if kind is PredictorKind.CLASSIFY and architecture.endswith("ForImageClassification"):
        mapping, modality = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, Modality.IMAGE
    elif kind is PredictorKind.EMBED:
        mapping, modality = MODEL_MAPPING, Modality.TEXT
    else:
        mapping, modality = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, Modality.TEXT
    if type(config) not in mapping:
        raise ConfigError(
            f"architecture {architecture} cannot be served as kind {kind}: transformers has no such model for model "
            f"type {config.model_type}; choose another --kind"
        )
    if kind is PredictorKind.RERANK and config.num_labels != 1:
        raise ConfigError(
            f"architecture {architecture} has {config.num_labels} labels; a reranker has one. --kind classify serves it"
        )
    return modality


def _read_model(
    path: Path, config: Any, settings: LoadPredictor, modality: Modality, device: torch.device, progress: Progress
) -> tuple[PreTrainedModel, int]:
    """Return the model with the weights of its files, on the CPU, and their size in bytes. Raises ConfigError."""
    files = find_weights(path)
    if modality is Modality.IMAGE:
        model_class: Any = AutoModelForImageClassification
    else:
        model_class = AutoModel if settings.kind is PredictorKind.EMBED else AutoModelForSequenceClassification
    auto: Any = torch.float32 if device.type == "cpu" else "auto"
    dtype = auto if settings.dtype == "auto" else getattr(torch, settings.dtype)
    try:
        with torch.device("meta"):
            described = model_class.from_config(copy.deepcopy(config), trust_remote_code=False)
        check_num_parameters(files, described.num_parameters())
        with tensors_counted(progress):
            model, report = model_class.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises various errors for files that are not a model
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"transformers cannot load the model in {path}: {in_one_line(error)}") from error
    missing = report["missing_keys"]
    if settings.kind is PredictorKind.EMBED:  # checkpoints of language models have no pooler, which is not used
        missing = [name for name in missing if not str(name).startswith("pooler.")]
    check_complete({**report, "missing_keys": missing}, path)
    return model, sum(file.stat().st_size for file in files)


def _max_model_len(requested: int | None, path: Path, config: Any, files: SentenceTransformerFiles) -> int:
    """Return the most tokens of an item: as sentence-transformers, or less if the operator says so."""
    text = config.get_text_config()
    trained: int | None = getattr(text, "max_position_embeddings", None)
    if trained is not None and config.model_type in POSITIONS_BEHIND_PADDING:
        trained -= (config.pad_token_id or 0) + 1
    limits = [each for each in (trained, files.max_seq_length or tokenizer_limit(path)) if each is not None]
    own = min(limits, default=None)
    if own is None and requested is None:
        raise ConfigError("the checkpoint does not give the longest text; set --max-model-len")
    if trained is not None and requested is not None and requested > trained:
        raise ConfigError(f"max_model_len = {requested} exceeds the model's {trained} positions")
    if own is not None and own < 1:
        raise ConfigError(f"the checkpoint gives a longest text of {own} tokens; it must be at least 1")
    return requested or own or 1


def _labels(config: Any) -> tuple[str, ...]:
    try:
        return tuple(str(config.id2label[index]) for index in range(config.num_labels))
    except KeyError as error:
        raise ConfigError(f"config.json: id2label has no label {error} of {config.num_labels}") from None


def _activation(kind: PredictorKind, config: Any, files: SentenceTransformerFiles) -> Activation:
    """Return what makes scores of logits: for classifiers as transformers' pipelines, for rerankers as CrossEncoder."""
    if kind is PredictorKind.EMBED:
        return Activation.NONE
    if kind is PredictorKind.RERANK:
        return files.activation or Activation.SIGMOID
    if config.problem_type == "regression":
        return Activation.NONE
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return Activation.SIGMOID
    return Activation.SOFTMAX


def _measured(predictor: Predictor) -> PredictorInfo:
    """Return the info with what one forward pass shows. Raises ConfigError if the model cannot compute one."""
    info = predictor.info
    try:
        if info.modality is Modality.IMAGE:
            return replace(info, item_tokens=predictor.try_image())
        result = predictor.predict(PredictBatch(0, 0, (TextItem((1,)), TextItem((1, 2)))))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"transformers cannot run the {info.architecture} of config.json: {in_one_line(error)}"
        ) from error
    return replace(info, dimensions=result.counts[0]) if info.kind is PredictorKind.EMBED else info
