"""What the API asks of an engine that generates text, answered by one that does not."""

from __future__ import annotations

from typing import Any, NoReturn

from servekit import __version__
from servekit.config import ServeConfig
from servekit.engine.live_view import LiveView
from servekit.errors import InvalidRequest
from servekit.observability.live_frames import LiveState, LiveWorker
from servekit.protocol.messages import ModelInfo, WorkerReady
from servekit.protocol.prediction import PredictorInfo, PredictorKind, PredictorReady
from servekit.scheduler.scheduler_config import SchedulerConfig

ROUTES: dict[str, str] = {
    PredictorKind.EMBED: "computes embeddings: POST /v1/embeddings",
    PredictorKind.RERANK: "scores documents for a query: POST /v1/rerank",
    PredictorKind.CLASSIFY: "classifies: POST /predict",
}


class NoGeneration:
    """The part of `Engine` (servekit.engine.interface) that is about generation. What generates is refused in words."""

    config: ServeConfig
    kind: str

    @property
    def state(self) -> str:
        raise NotImplementedError

    @property
    def stage(self) -> str:
        raise NotImplementedError

    @property
    def ready(self) -> PredictorReady | None:
        raise NotImplementedError

    @property
    def model(self) -> PredictorInfo:
        raise NotImplementedError

    def now(self) -> float:
        raise NotImplementedError

    @property
    def worker(self) -> WorkerReady | None:
        """What the worker reported, as far as a worker that generates reports the same."""
        ready = self.ready
        if ready is None:
            return None
        info = ready.model
        model = ModelInfo(
            architecture=info.architecture,
            num_parameters=info.num_parameters,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=(),
            default_temperature=0.0,
            default_top_k=0,
            default_top_p=1.0,
            fingerprint=info.fingerprint,
        )
        return WorkerReady(model, ready.device, ready.dtype, 0, 0, ready.load_time_s, ready.num_weight_bytes)

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The limits of inputs: the longest one, and of a batch. Raises WorkerNotReady while the model loads."""
        length = self.model.max_model_len
        return SchedulerConfig(
            num_blocks=1,
            block_size=length,
            max_model_len=length,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )

    @property
    def tokenizer(self) -> Any:
        raise self._refusal()

    @property
    def input_processor(self) -> Any:
        raise self._refusal()

    @property
    def profiling(self) -> Any:
        raise self._refusal()

    async def take_places(self, *_: Any) -> NoReturn:
        raise self._refusal()

    async def live_view(self) -> LiveView:
        """One frame of the live view, without sequences and blocks."""
        ready = self.ready
        worker = LiveWorker(self.stage)
        if ready is not None:
            worker = LiveWorker("serving" if self.stage == "serving" else self.stage, ready.device, ready.dtype)
        return LiveView(LiveState(self.now(), self.state, self.stage, self.config.model_name, __version__, [worker]))

    async def describe_replicas(self) -> list[dict[str, Any]]:
        """What /info says of the worker."""
        ready = self.ready
        return [{"replica": 0, "state": self.stage, "predictor": None if ready is None else ready.model}]

    def _refusal(self) -> InvalidRequest:
        return InvalidRequest(
            f"the model {self.config.model_name!r} generates no text; it {ROUTES[self.kind]}",
            code="not_supported",
        )
