"""Load the drafter that the settings name."""

from __future__ import annotations

from collections.abc import Callable

from servekit.errors import ConfigError
from servekit.protocol.messages import LoadModel
from workers.loading.model_manager import LoadedModel
from workers.speculation.draft_model import load_draft_model
from workers.speculation.drafter import LoadedDrafter, WithoutWeights
from workers.speculation.eagle import load_eagle_head, load_mtp_layer
from workers.speculation.lookup_first import LookupFirst
from workers.speculation.medusa import load_medusa_heads
from workers.speculation.ngram import NgramDrafter


def load_drafter(
    loaded: LoadedModel, settings: LoadModel, report_stage: Callable[[str], None] = lambda _: None
) -> LoadedDrafter | None:
    """Return the drafter that `--speculative` names; None if speculation is off. Raises ConfigError."""
    speculative = settings.speculative
    if not speculative.is_on:
        return None
    assert settings.pipeline_parallel_size == 1, "the server refuses speculation in a pipeline"
    drafter = _load(loaded, settings, report_stage)
    return LookupFirst(drafter) if speculative.lookup_first else drafter


def _load(loaded: LoadedModel, settings: LoadModel, report_stage: Callable[[str], None]) -> LoadedDrafter:
    match settings.speculative.method:
        case "ngram":
            return WithoutWeights(NgramDrafter)
        case "draft" | "self":
            return load_draft_model(loaded, settings, report_stage)
        case "medusa":
            report_stage("loading the Medusa heads")
            return load_medusa_heads(loaded, settings)
        case "eagle":
            report_stage("loading the EAGLE-3 head")
            return load_eagle_head(loaded, settings)
        case "mtp":
            report_stage("loading the MTP layer")
            return load_mtp_layer(loaded, settings)
    raise ConfigError(
        f"--speculative {settings.speculative.method}: this worker has no such drafter; choose ngram, draft, self, "
        "medusa, eagle, mtp or off"
    )
