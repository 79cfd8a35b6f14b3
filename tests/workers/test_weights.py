"""Claims about where a model's weights come from: its files, one or several, or nowhere."""

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
from tests.inprocess import InProcessEngine
from tests.tiny_models import ARCHITECTURES, make_model
from workers.checkpoint import WEIGHTS
from workers.model_manager import LoadedModel, ModelManager
from workers.progress import Progress
from workers.weights import make_weights, move, read_weights

CPU = torch.device("cpu")


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """A directory with a model's configuration, and nothing else of it."""
    make_model(tmp_path / "model", *ARCHITECTURES["llama"])
    (tmp_path / "shape").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "shape")
    return tmp_path / "shape"


def dummy(path: Path, dtype: str = "float32") -> LoadedModel:
    return ModelManager("cpu").load(path, dtype, None, load_format="dummy")


# -- from files --------------------------------------------------------------------------------------------------------


def test_a_model_in_several_files_has_the_weights_that_were_saved(tmp_path: Path) -> None:
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
    assert loaded.num_weight_bytes == num_bytes and loaded.weights_time_s > 0


def test_parts_lack_nothing_but_what_is_told(tmp_path: Path) -> None:
    make_model(tmp_path / "whole", *ARCHITECTURES["llama"]).save_pretrained(tmp_path, max_shard_size="60KB")
    part = max(tmp_path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    tensors = load_file(part)
    name, _ = tensors.popitem()
    save_file(tensors, part, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks 1 of the model's weights, among them {name}"):
        ModelManager("cpu").load(tmp_path, "float32", None)


def test_whoever_waits_hears_of_every_stage(tmp_path: Path) -> None:
    make_model(tmp_path, *ARCHITECTURES["llama"])
    told: list[str] = []
    ModelManager("cpu").load(tmp_path, "float32", None, tell=told.append)
    assert told == ["reading the weights", "laying out the weights"]
    told.clear()
    ModelManager("cpu").load(tmp_path, "float32", None, load_format="dummy", tell=told.append)
    assert told == ["making up the weights", "laying out the weights"]


class Heard(Progress):
    """Of the last stage."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        self.name, self.total = name, total
        self.moved: list[tuple[int, int]] = []  # as it is told, and as it is
        yield self.advance

    def advance(self, amount: int) -> None:
        told = amount + (self.moved[-1][0] if self.moved else 0)
        weights = weights_of(self.model).values()
        self.moved.append((told, sum(weight.nbytes for weight in weights if weight.device.type == "meta")))


def test_a_model_that_is_moved_is_told_of_piece_by_piece(tmp_path: Path) -> None:
    """To a device that every machine has, though it holds nothing."""
    model = make_model(tmp_path, *ARCHITECTURES["llama"])
    move(model, torch.device("meta"), heard := Heard(model))
    assert heard.name == "copying the weights to meta" and len(heard.moved) > 20
    assert all(told == moved for told, moved in heard.moved)
    assert heard.moved[-1][0] == heard.total == sum(weight.nbytes for weight in weights_of(model).values())


def test_a_model_is_moved_with_what_stands_beside_its_layers(tmp_path: Path) -> None:
    model = make_model(tmp_path, *ARCHITECTURES["gpt_oss"])
    move(model, torch.device("meta"), Progress())
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


# -- from nowhere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_made_up_weights_are_those_that_a_training_begins_with(name: str) -> None:
    """And the same in the next worker, whatever was drawn before."""
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


def test_a_model_is_served_by_its_configuration_alone(shape: Path) -> None:
    loaded = dummy(shape)
    assert loaded.num_weight_bytes == 4 * loaded.info.num_parameters
    engine = InProcessEngine(loaded)
    assert engine.runner.self_check() < 1e-4
    sequences = [engine.add(prompt, max_tokens=12, ignore_eos=True) for prompt in ([3, 4, 5], [60, 61, 62])]
    engine.run()
    assert all(len(sequence.output_token_ids) == 12 for sequence in sequences)
    assert sequences[0].output_token_ids != sequences[1].output_token_ids


def test_weights_in_the_directory_are_left_alone(shape: Path) -> None:
    """Be they damaged: a benchmark of another shape begins with a copy of config.json, edited."""
    (shape / WEIGHTS).write_bytes(b"no weights")
    dummy(shape)
    with pytest.raises(ConfigError):
        ModelManager("cpu").load(shape, "float32", None)


@pytest.mark.parametrize(("told", "expected"), [("float16", torch.float16), (None, torch.bfloat16)])
def test_the_configuration_says_what_the_checkpoint_would_have_been(
    told: str | None, expected: torch.dtype, shape: Path
) -> None:
    known = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(known | {"dtype": told}))
    model, num_bytes = make_weights(AutoConfig.from_pretrained(shape), "auto", "eager", CPU)
    assert model.dtype == expected and num_bytes == 2 * model.num_parameters()


def test_a_shape_that_no_memory_holds_is_refused(shape: Path) -> None:
    known = json.loads((shape / "config.json").read_text())
    (shape / "config.json").write_text(json.dumps(known | {"vocab_size": 2**50}))
    with pytest.raises(ConfigError, match="do not make a model"):
        dummy(shape)
