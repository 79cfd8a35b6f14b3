"""Run the worker of a predictor: load a model that embeds, reranks or classifies, and compute batches with it."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from servekit.protocol.framing import MessageReceiver, MessageSender
from servekit.protocol.messages import FromWorker, Loading, ToWorker
from servekit.protocol.prediction import LoadPredictor, PredictBatch, PredictorReady
from workers.loading.fingerprint import fingerprint
from workers.prediction.predictor import Predictor, load_predictor
from workers.worker_loop import WorkerLoop


class PredictorWorker(WorkerLoop):
    """One process, one device, one model. Between batches its only state is the model."""

    def __init__(self, tasks: MessageReceiver[ToWorker], results: MessageSender[FromWorker]) -> None:
        super().__init__(tasks, results)
        self._predictor: Predictor | None = None

    def execute(self, message: ToWorker) -> None:
        match message:
            case LoadPredictor():
                self.send(self._load(message))
            case PredictBatch():
                assert self._predictor is not None, "a batch before the model was loaded"
                self.send(self._predictor.predict(message))
            case _:
                raise ValueError(f"{type(message).__name__} is not for a predictor's worker")

    def _load(self, settings: LoadPredictor) -> PredictorReady:
        found = fingerprint(Path(settings.model_path), has_weights=True)
        self._predictor, ready = load_predictor(
            replace(settings, fingerprint=found), lambda stage: self.send(Loading(stage))
        )
        return ready
