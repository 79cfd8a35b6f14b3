"""Claims about a model's weights: from one file, from several, or random."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.loading.checkpoint import WEIGHTS
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.loading.progress import Progress
from workers.loading.weights import make_weights, move, read_weights

CPU = torch.device("cpu")


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A directory with a model's config.json and no other file."""
    make_model(tmp_path / "model", *ARCHITECTURES["llama"])
    (tmp_path / "shape").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "shape")
    return tmp_path / "shape"


def dummy(path: Path, dtype: str = "float32") -> LoadedModel:
    return ModelManager("cpu").load(path, dtype, None, load_format="dummy")


# -- from files --------------------------------------------------------------------------------------------------------


def test_model_in_several_files_has_the_weights_that_were_saved(tmp_path: Path) -> None:
    model = make_model(tmp_path / "whole", *ARCHITECTURES["llama"])
    model.save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    files = list((tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2
    config = AutoConfig.from_pretrained(tmp_path / "parts")
    read, num_bytes = read_weights(tmp_path / "parts", config, torch.float32, "eager", Progress())
    assert num_bytes == sum(file.stat().st_size for file in files)
    expected = weights_of(model)
    assert weights_of(read).keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(read).items())
    loaded = ModelManager("cpu").load(tmp_path / "parts", "float32", None)
    assert loaded.weights.num_bytes == num_bytes and loaded.weights.time_s > 0


def test_missing_weight_of_one_of_several_files_is_named(tmp_path: Path) -> None:
    make_model(tmp_path / "whole", *ARCHITECTURES["llama"]).save_pretrained(tmp_path, max_shard_size="60KB")
    part = max(tmp_path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    tensors = load_file(part)
    name, _ = tensors.popitem()
    save_file(tensors, part, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks 1 of the model's weights, among them {name}"):
        ModelManager("cpu").load(tmp_path, "float32", None)


def test_every_stage_of_loading_is_reported(tmp_path: Path) -> None:
    make_model(tmp_path, *ARCHITECTURES["llama"])
    stages: list[str] = []
    ModelManager("cpu").load(tmp_path, "float32", None, report_stage=stages.append)
    assert stages == ["reading the weights", "laying out the weights"]
    stages.clear()
    ModelManager("cpu").load(tmp_path, "float32", None, load_format="dummy", report_stage=stages.append)
    assert stages == ["making random weights", "laying out the weights"]


class RecordedProgress(Progress):
    """Records the last stage."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        self.name, self.total = name, total
        self.moved: list[tuple[int, int]] = []  # bytes as reported, and as they are
        yield self.advance

    def advance(self, amount: int) -> None:
        reported = amount + (self.moved[-1][0] if self.moved else 0)
        weights = weights_of(self.model).values()
        self.moved.append((reported, sum(weight.nbytes for weight in weights if weight.device.type == "meta")))


def test_progress_of_a_move_is_reported_module_by_module(tmp_path: Path) -> None:
    """To the meta device, which every machine has."""
    model = make_model(tmp_path, *ARCHITECTURES["llama"])
    move(model, torch.device("meta"), recorded := RecordedProgress(model))
    assert recorded.name == "copying the weights to meta" and len(recorded.moved) > 20
    assert all(reported == moved for reported, moved in recorded.moved)
    assert recorded.moved[-1][0] == recorded.total == sum(weight.nbytes for weight in weights_of(model).values())


def test_tensors_outside_of_leaf_modules_are_moved_too(tmp_path: Path) -> None:
    model = make_model(tmp_path, *ARCHITECTURES["gpt_oss"])
    move(model, torch.device("meta"), Progress())
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


# -- random  ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_weights_have_the_distribution_of_untrained_models(name: str) -> None:
    """They are the same in each worker, whatever random numbers it drew before."""
    model_type, fields = ARCHITECTURES[name]
    config = AutoConfig.for_model(model_type, **fields, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model, num_bytes = make_weights(config, torch.float32, "eager", CPU)
    torch.rand(7)
    weights, again = weights_of(model), weights_of(make_weights(config, torch.float32, "eager", CPU)[0])
    torch.manual_seed(1)
    expected = weights_of(AutoModelForCausalLM.from_config(config))
    assert weights.keys() == expected.keys()
    assert num_bytes == sum(weight.nbytes for weight in weights.values())
    for name, weight in weights.items():
        assert torch.equal(weight, again[name]), name
        error = 6 / math.sqrt(weight.numel())  # of a mean, in deviations
        tolerance = error * spread(expected[name])
        assert math.isclose(float(weight.mean()), float(expected[name].mean()), abs_tol=tolerance), name
        assert math.isclose(spread(weight), spread(expected[name]), rel_tol=error), name
        is_vector = weight.dim() == 1 or name.endswith("bias")  # those of all experts are a matrix
        assert spread(weight) > 0.005 or is_vector, f"{name}: only norms and biases begin as ones and zeros"


def spread(weight: torch.Tensor) -> float:
    return float((weight - weight.mean()).square().mean().sqrt())


def test_dummy_model_is_served_from_config_json_alone(shape: Path) -> None:
    loaded = dummy(shape)
    assert loaded.weights.num_bytes == 4 * loaded.info.num_parameters
    engine = InProcessEngine(loaded)
    assert engine.runner.self_check() < 1e-4
    sequences = [engine.add(prompt, max_tokens=12, ignore_eos=True) for prompt in ([3, 4, 5], [60, 61, 62])]
    engine.run()
    assert all(len(sequence.output_token_ids) == 12 for sequence in sequences)
    assert sequences[0].output_token_ids != sequences[1].output_token_ids


def test_dummy_model_does_not_read_weights(shape: Path) -> None:
    """Not even damaged ones: a benchmark of another shape starts with a copy of config.json, edited."""
    (shape / WEIGHTS).write_bytes(b"no weights")
    dummy(shape)
    with pytest.raises(ConfigError):
        ModelManager("cpu").load(shape, "float32", None)


@pytest.mark.parametrize(("dtype", "expected"), [("float16", torch.float16), (None, torch.bfloat16)])
def test_dummy_model_has_the_dtype_of_config_json(dtype: str | None, expected: torch.dtype, shape: Path) -> None:
    known = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(known | {"dtype": dtype}))
    model, num_bytes = make_weights(AutoConfig.from_pretrained(shape), "auto", "eager", CPU)
    assert model.dtype == expected and num_bytes == 2 * model.num_parameters()


def test_a_gpu_that_torch_does_not_see_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sees \d+ CUDA devices; choose another --device, such as cpu"):
        ModelManager("cuda:99")


def test_a_gpu_without_a_number_is_the_first_as_tensors_on_it_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert [ModelManager(name).device for name in ("cuda", "cuda:0", "cuda:1")] == [first, first, second] == chosen


def test_model_that_memory_does_not_hold_is_refused(shape: Path) -> None:
    known = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(known | {"vocab_size": 2**50}))
    with pytest.raises(
        ConfigError, match=r"the model's weights cannot be allocated: cpu has [\d,]+ bytes; choose a smaller model"
    ):
        dummy(shape)
