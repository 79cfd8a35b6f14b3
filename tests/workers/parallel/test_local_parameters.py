"""Claims about parts of models: whatever the architecture, a rank's weights find their places, or it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from servekit.errors import ConfigError
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.loading.model_config import read_config
from workers.loading.progress import Progress
from workers.loading.weights import read_weights
from workers.parallel.local_parameters import partial_class, use_local_parameters
from workers.parallel.pipeline_stage import PipelineStage
from workers.parallel.rank_group import RankGroup
from workers.parallel.tensor_parallel_plan import TensorParallelPlan

# transformers has no plan that divides these.
_WITHOUT = {"opt", "gpt2", "stablelm", "bloom", "mpt", "falcon", "falcon_multi_query", "gptj", "codegen", "gpt_neo"}
WITHOUT_STAGES = {*_WITHOUT, "phi", "gpt_neox", "nemotron"}
WITHOUT_RANKS = {*_WITHOUT, "gpt_oss"}


@pytest.fixture(scope="module")
def first_of_two() -> Iterator[RankGroup]:
    """The first rank of two; whatever it sends is lost."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield RankGroup(init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    dist.destroy_process_group()


def read_part(path: Path, ranks: Any) -> Any:
    config = read_config(path)
    model_class = partial_class(config, config.architectures[0], ranks)
    return read_weights(path, config, torch.float32, "eager", Progress(), model_class)[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_stage_reads_its_layers_of_every_architecture(architecture: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, *ARCHITECTURES[architecture])
    ranks = SimpleNamespace(group=None, stage=PipelineStage(0, 1, 2))
    if architecture in WITHOUT_STAGES:
        with pytest.raises(ConfigError, match=rf"{type(model).__name__} cannot be served with --pipeline.*-size 1$"):
            read_part(tmp_path, ranks)
        return
    part = read_part(tmp_path, ranks)
    found = dict(part.named_parameters())
    assert 0 < len(found) < len(list(model.parameters()))
    for name, parameter in found.items():
        assert torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_rank_reads_its_part_of_every_architecture(
    architecture: str, tmp_path: Path, first_of_two: RankGroup
) -> None:
    model = make_model(tmp_path, *ARCHITECTURES[architecture])
    if architecture in WITHOUT_RANKS:
        with pytest.raises(ConfigError, match=rf"{type(model).__name__} cannot be served with --tensor.*-size 1$"):
            read_part(tmp_path, SimpleNamespace(group=first_of_two, stage=None))
        return
    part = read_part(tmp_path, SimpleNamespace(group=first_of_two, stage=None))
    use_local_parameters(part, first_of_two, TensorParallelPlan.of(part, architecture, 2))
    num_cut = 0
    for name, parameter in part.named_parameters():
        whole = model.get_parameter(name)
        num_cut += parameter.shape != whole.shape
        assert torch.isin(parameter, whole).all(), f"{name} has other numbers"
    assert num_cut
