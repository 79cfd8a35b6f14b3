"""Claims about models from attackers: no code of their directory runs, and what is not a model is refused by name.

The canary is a file that their code would create.
"""

from __future__ import annotations

import json
import pickle
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from servekit.engine.model_files import DEMO_MODEL_PATH, find_chat_template
from servekit.engine.tokenizer import load_tokenizer
from servekit.errors import ConfigError
from servekit.sandbox.chat_template import render_chat
from servekit.sandbox.jobs import Done, RenderChat
from tests.e2e.bad_inputs import INJECTIONS
from tests.support.inprocess import load
from tests.support.quantized_models import describe, make_quantized_model
from tests.support.tiny_models import ARCHITECTURES, make_model
from tests.torture.model_files import run
from tests.torture.report import table
from workers.loading.checkpoint import INDEX, WEIGHTS

TENSOR = "model.norm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, *ARCHITECTURES["llama"])
    return path


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantized")
    make_quantized_model(path, "w4a16")
    return path


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "model"


class Bomb:
    """Creates the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def configure(path: Path, file: str = "config.json", **fields: Any) -> None:
    known = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps(known | fields))


def index(path: Path, name: str) -> None:
    tensors = dict.fromkeys(load_file(path / WEIGHTS), name) if (path / WEIGHTS).exists() else {TENSOR: name}
    (path / WEIGHTS).unlink(missing_ok=True)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": tensors}))


# -- weights -----------------------------------------------------------------------------------------------------------


def only_a_pickle(path: Path, bomb: bytes) -> None:
    (path / WEIGHTS).unlink()
    (path / "pytorch_model.bin").write_bytes(bomb)


def a_pickle_by_another_name(path: Path, bomb: bytes) -> None:
    (path / WEIGHTS).write_bytes(bomb)


def torchs_format_by_another_name(path: Path, _: bytes) -> None:
    torch.save(load_file(path / WEIGHTS), path / "new")
    (path / "new").rename(path / WEIGHTS)


def an_index_of_a_pickle(path: Path, bomb: bytes) -> None:
    index(path, "evil.bin")
    (path / "evil.bin").write_bytes(bomb)


def an_index_of_torchs_format(path: Path, _: bytes) -> None:
    torch.save(load_file(path / WEIGHTS), path / "weights.pt")
    index(path, "weights.pt")


def an_index_of_somewhere_else(path: Path, _: bytes) -> None:
    shutil.copy(path / WEIGHTS, path.parent / "other.safetensors")
    index(path, "../other.safetensors")


def an_index_of_an_absolute_path(path: Path, _: bytes) -> None:
    shutil.copy(path / WEIGHTS, path.parent / "other.safetensors")
    index(path, str(path.parent / "other.safetensors"))


def an_index_of_nothing(path: Path, _: bytes) -> None:
    index(path, "nowhere.safetensors")


def an_index_that_is_none(path: Path, _: bytes) -> None:
    (path / WEIGHTS).unlink()
    (path / INDEX).write_bytes(b'{"weight_map": ' + b"[" * 10**5)


def an_adapter_of_another_model(path: Path, _: bytes) -> None:
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/", "peft_type": "LORA"}))


def weights_of_a_name_in_the_configuration(path: Path, bomb: bytes) -> None:
    (path / "adapter_model.bin").write_bytes(bomb)
    configure(path, transformers_weights="adapter_model.bin")


def an_empty_file(path: Path, _: bytes) -> None:
    (path / WEIGHTS).write_bytes(b"")


def a_header_of_a_terabyte(path: Path, _: bytes) -> None:
    (path / WEIGHTS).write_bytes((2**40).to_bytes(8, "little") + b"{}")


MALICIOUS_WEIGHTS = [
    only_a_pickle,
    a_pickle_by_another_name,
    torchs_format_by_another_name,
    an_index_of_a_pickle,
    an_index_of_torchs_format,
    an_index_of_somewhere_else,
    an_index_of_an_absolute_path,
    an_index_of_nothing,
    an_index_that_is_none,
    an_adapter_of_another_model,
    weights_of_a_name_in_the_configuration,
    an_empty_file,
    a_header_of_a_terabyte,
]


@pytest.mark.parametrize("put", MALICIOUS_WEIGHTS, ids=lambda put: put.__name__)
def test_only_safetensors_of_the_model_directory_are_opened(
    copied: Path, tmp_path: Path, put: Callable[[Path, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    unpickled: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *arguments, **_: unpickled.append(arguments))
    canary = tmp_path / "canary"
    put(copied, pickle.dumps({TENSOR: Bomb(canary)}))
    with pytest.raises(ConfigError) as refusal:
        load(copied)
    assert len(refusal.value.message) < 600 and "\n" not in refusal.value.message
    assert not canary.exists() and not unpickled


def test_pickle_beside_the_weights_is_not_opened(copied: Path, tmp_path: Path) -> None:
    (copied / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "canary")))
    load(copied)
    assert not (tmp_path / "canary").exists()
    pickle.loads((copied / "pytorch_model.bin").read_bytes())  # noqa: S301
    assert (tmp_path / "canary").exists(), "the canary does not work"


def test_weights_in_several_files_are_loaded(copied: Path) -> None:
    tensors = load_file(copied / WEIGHTS)
    names = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, copied / file, {"format": "pt"})
    (copied / WEIGHTS).unlink()
    (copied / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))
    assert load(copied).info.num_parameters == sum(tensor.numel() for tensor in tensors.values())


def test_tampered_headers_are_refused_quickly_and_without_memory() -> None:
    findings = run(500)
    assert all(finding.is_kept for finding in findings), table(findings)


# -- code --------------------------------------------------------------------------------------------------------------

CODE_FILES = [
    "modeling_x",
    "configuration_x",
    "tokenization_x",
    "processing_x",
    "modeling_llama",
    "custom_generate.generate",
]
AUTO_MAP = {
    "AutoConfig": "configuration_x.X",
    "AutoModelForCausalLM": "modeling_x.X",
    "AutoModel": "modeling_x.X",
    "AutoTokenizer": ["tokenization_x.X", None],
    "AutoProcessor": "processing_x.X",
}


@pytest.mark.parametrize("model_type", ["llama", "x"])
def test_code_in_a_model_directory_is_not_run(copied: Path, tmp_path: Path, model_type: str) -> None:
    canary = tmp_path / "canary"
    for name in CODE_FILES:
        file = copied / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"import pathlib; pathlib.Path({str(canary)!r}).touch()\nclass X: pass\n")
    shutil.copy(DEMO_MODEL_PATH / "tokenizer.json", copied)
    tokenizer_config = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}, "tokenizer_class": "X"}
    (copied / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    configure(copied, auto_map=AUTO_MAP, model_type=model_type, architectures=["X"], _attn_implementation="evil/kernel")
    configure(copied, "generation_config.json", custom_generate="evil/repository")
    load_tokenizer(copied).close()
    find_chat_template(copied)
    if model_type == "llama":
        load(copied)
    else:
        with pytest.raises(ConfigError, match="no model configuration that can be served"):
            load(copied)
    assert not canary.exists()


@pytest.mark.parametrize("template", INJECTIONS)
def test_chat_template_reaches_only_its_conversation(template: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    outcome = render_chat(RenderChat(template, True, False, {}, messages))
    text = outcome.text if isinstance(outcome, Done) else ""
    for leak in ("<class", "<module", "<built-in", "<function", "<code", "uid=", "root:", "__globals__': "):
        assert leak not in text, text


# -- files that are not a model ----------------------------------------------------------------------------------------

BAD_CONFIGURATIONS: list[dict[str, Any]] = [
    {"hidden_size": 2**40},
    {"hidden_size": 6 * 2**40},
    {"hidden_size": 10**30},
    {"hidden_size": -6},
    {"hidden_size": 1.5},
    {"hidden_size": "48"},
    {"hidden_size": None},
    {"vocab_size": 2**40},
    {"vocab_size": 2**24},
    {"vocab_size": 0},
    {"vocab_size": -5},
    {"intermediate_size": 2**40},
    {"num_hidden_layers": 2**20},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": 4},
    {"num_attention_heads": 0},
    {"num_key_value_heads": 0},
    {"num_key_value_heads": 5},
    {"head_dim": 2**31},
    {"head_dim": 0},
    {"max_position_embeddings": 0},
    {"max_position_embeddings": -1},
    {"hidden_act": "os.system"},
    {"rms_norm_eps": "x"},
    {"model_type": "../x"},
    {"model_type": None},
    {"rope_parameters": {"rope_type": "evil", "rope_theta": 1}},
    {"dtype": "os"},
    {"layer_types": ["x"]},
    {"pad_token_id": 10**9},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"tie_word_embeddings": "x"},
]
BAD_DEFAULTS: list[dict[str, Any]] = [
    {"temperature": -1.0, "do_sample": True},
    {"temperature": 1e300, "do_sample": True},
    {"temperature": "x", "do_sample": True},
    {"top_p": 7.0, "do_sample": True},
    {"top_k": -9, "do_sample": True},
    {"top_k": 2**70, "do_sample": True},
    {"eos_token_id": -2},
    {"eos_token_id": 2**70},
    {"eos_token_id": ["x"]},
]
BAD_JSON = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a":' * 10**5, b'{"model_type": NaN}', b"\0" * 1000]


def check_refused(path: Path) -> None:
    """Check that loading fails in 5 s of processor time, with an error of one line, and with less than 200 MiB."""
    before, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ConfigError) as refusal:
        load(path)
    assert time.process_time() - started_s < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
    assert len(refusal.value.message) < 700 and "\n" not in refusal.value.message


@pytest.mark.parametrize("fields", BAD_CONFIGURATIONS, ids=str)
def test_impossible_configuration_is_refused(copied: Path, fields: dict[str, Any]) -> None:
    configure(copied, **fields)
    check_refused(copied)


@pytest.mark.parametrize(
    ("lacks", "fields"), [("mlp", {"intermediate_size": 2**40}), ("embed", {"vocab_size": 2**24}), ("mlp", {})]
)
def test_missing_weights_are_not_filled_with_random_numbers(copied: Path, lacks: str, fields: dict[str, Any]) -> None:
    """transformers would do that, in whatever size config.json describes."""
    tensors = {name: tensor for name, tensor in load_file(copied / WEIGHTS).items() if lacks not in name}
    save_file(tensors, copied / "new", {"format": "pt"})  # the other one is mapped into memory
    (copied / "new").rename(copied / WEIGHTS)
    configure(copied, **fields)
    check_refused(copied)


# Of a group in config_groups of a checkpoint with int4 weights.
BAD_QUANTIZATIONS: list[dict[str, Any]] = [
    {"num_bits": 8},
    {"num_bits": 2**70},
    {"num_bits": None},
    {"group_size": 2**19},
    {"group_size": 7},
    {"group_size": -1},
    {"group_size": 10**30},
    {"group_size": "8"},
    {"strategy": "channel"},
    {"strategy": "tensor"},
    {"strategy": ["group"]},
    {"symmetric": False},
    {"type": "float"},
    {"type": {}},
]


@pytest.mark.parametrize("fields", BAD_QUANTIZATIONS, ids=str)
def test_impossible_quantization_is_refused(quantized: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    copied = shutil.copytree(quantized, tmp_path / "model")
    describe(copied, "w4a16", **fields)
    check_refused(copied)


@pytest.mark.parametrize(
    "fields",
    [{"hidden_size": 96}, {"intermediate_size": 2**40}, {"num_hidden_layers": 4}, {"vocab_size": 2**24}],
    ids=str,
)
def test_quantized_weights_of_another_shape_are_refused(
    quantized: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    copied = shutil.copytree(quantized, tmp_path / "model")
    configure(copied, **fields)
    check_refused(copied)


@pytest.mark.parametrize("scheme", ["w4a16_asymmetric", "w8a8", "fp8_block"])
def test_damaged_quantized_tensors_are_refused_or_load(scheme: str, tmp_path: Path) -> None:
    """Each tensor of one matrix in turn is left out, cut, widened, of another dtype, or full of extreme numbers."""
    make_quantized_model(tmp_path, scheme)
    whole = load_file(tmp_path / WEIGHTS)
    outcomes: Counter[str] = Counter()
    for name in [name for name in whole if name.startswith("model.layers.1.mlp.up_proj.")]:
        tensor = whole[name]
        damaged = [None, tensor[:-1], tensor[:0], tensor[None], tensor.flatten()[:1], torch.cat([tensor, tensor])]
        damaged += [tensor.float().to(dtype) for dtype in (torch.float32, torch.int64, torch.uint8, torch.bool)]
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            damaged += [torch.full_like(tensor, value) for value in (torch.nan, torch.inf, -torch.inf, 0.0)]
        else:
            damaged += [torch.full(tensor.shape, 0x7F, dtype=torch.uint8).to(tensor.dtype)]
        for replacement in damaged:
            tensors = {key: value for key, value in whole.items() if key != name}
            if replacement is not None:
                tensors[name] = replacement.contiguous()
            save_file(tensors, tmp_path / "new", {"format": "pt"})
            (tmp_path / "new").rename(tmp_path / WEIGHTS)
            try:
                load(tmp_path)
            except ConfigError as refusal:
                is_sentence = len(refusal.message) < 700 and "\n" not in refusal.message
                outcomes["refused" if is_sentence else f"refused badly: {refusal.message}"] += 1
            else:
                outcomes["loaded"] += 1
    assert outcomes.keys() == {"refused", "loaded"} and outcomes["refused"] > 4 * outcomes["loaded"], outcomes


@pytest.mark.parametrize("fields", BAD_DEFAULTS, ids=str)
def test_generation_defaults_out_of_range_are_refused(copied: Path, fields: dict[str, Any]) -> None:
    configure(copied, "generation_config.json", **fields)
    check_refused(copied)


@pytest.mark.parametrize("content", BAD_JSON, ids=lambda content: repr(content[:12]))
def test_files_that_are_not_json_are_refused(copied: Path, content: bytes) -> None:
    for file in ("generation_config.json", "config.json"):
        whole = (copied / file).read_bytes()
        (copied / file).write_bytes(content)
        if (file, content) != ("generation_config.json", b'{"model_type": NaN}'):  # which is valid there
            check_refused(copied)
        (copied / file).write_bytes(whole)
    (copied / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer"):
        load_tokenizer(copied)


def test_damaged_tokenizer_is_refused_or_works(tmp_path: Path) -> None:
    whole = (DEMO_MODEL_PATH / "tokenizer.json").read_bytes()
    dice = random.Random(5)
    refusals = 0
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            content[dice.randrange(2000 if dice.random() < 0.5 else len(content))] = dice.randrange(256)
        (tmp_path / "tokenizer.json").write_bytes(content)
        try:
            tokenizer = load_tokenizer(tmp_path)
        except ConfigError:
            refusals += 1
            continue
        (token_ids,) = tokenizer.encode_blocking(["What color is the sky?"])
        tokenizer.decode(token_ids)
        tokenizer.close()
    assert 20 < refusals < 200, "the damage has to matter in some files, and not in others"
