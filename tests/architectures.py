"""Try every language model that transformers has, and write into docs/architectures.md what is served and what is not.

`python -m tests.architectures` makes a small random model of each model type, from the defaults of its configuration,
and compares servekit's greedy tokens with those of transformers' `generate`, in float32. Each model type has a process
of its own, with limits of time and memory. `--only llama gemma3` tries some; `--resume` goes on after a run that was
stopped; `--write` puts the results into tests/architectures.json and the page.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import random
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import logging as transformers_logging

from scripts.tables import with_table
from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine
from tests.support.small_configs import FIRST_OTHER_TOKEN, small_config
from tests.support.tiny_models import set_weights_apart
from workers.loading.model_config import check_is_decoder
from workers.loading.model_manager import ModelManager
from workers.loading.refusals import SERVED, in_one_line

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "architectures.md"
UNFINISHED = ROOT / "build" / "architectures.json"  # the results of a run so far
MAKER = "python -m tests.architectures --write"

# Classes that generate text, of text alone or of other inputs, too.
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
MODEL_TYPES = sorted(
    {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
)
TIMEOUT_S, MAX_MEMORY_BYTES, MAX_PARAMETERS = 180.0, 12 * 2**30, 130_000_000
LENGTHS, MAX_TOKENS, MAX_MODEL_LEN = [23, 2, 41, 7, 13], 12, 80
NO_TOKEN = 2**31  # an id that no model samples

Outcome = Literal["served", "refused", "differs", "not tried"]


class Result(NamedTuple):
    """What became of a model type."""

    architecture: str  # its class in transformers
    outcome: Outcome
    text: str = ""  # the refusal, or why it was not tried


def result_of(model_type: str) -> Result:
    """Make a small model of this type, serve it in this process, and compare its tokens with those of transformers."""
    architecture = ""
    try:
        config = small_config(model_type)
        model_class = _class_of(config)
        architecture = model_class.__name__
        config.architectures = [architecture]
        check_is_decoder(config)
        for seed in range(3):  # until the model answers prompts differently
            with tempfile.TemporaryDirectory() as directory:
                result = _compare(_save_model(model_class, config, Path(directory), seed), Path(directory))
            if result.outcome != "not tried":
                break
        return result
    except ConfigError as refusal:
        is_of_the_type = refusal.message.startswith("architecture ")  # and not about the small model's files
        text = re.sub(r"/\S*/tmp\w+", "MODEL", refusal.message)
        return Result(architecture, "refused" if is_of_the_type else "not tried", text)
    except Exception as error:
        return Result(architecture, "not tried", in_one_line(error))


def _class_of(config: PreTrainedConfig) -> Any:
    """Return the class for all inputs of a model type: some have another one for text alone, too."""
    found = [mapping[type(config)] for mapping in MAPPINGS if type(config) in mapping]
    classes: list[Any] = [each[0] if isinstance(each, tuple) else each for each in found]
    if not classes:
        raise ValueError("transformers names the model type, and has no class for it")
    return next((each for each in classes if each.config_class is type(config)), classes[0])


def _save_model(model_class: Any, config: PreTrainedConfig, directory: Path, seed: int) -> PreTrainedModel:
    with torch.device("meta"):
        num_parameters = model_class._from_config(copy.deepcopy(config)).num_parameters()
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"the small model has {num_parameters} parameters")
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    set_weights_apart(model)
    model.save_pretrained(directory)
    return model


def _compare(model: PreTrainedModel, directory: Path) -> Result:
    """Raises ConfigError if the model is refused."""
    try:
        engine = _engine(directory)
    except ConfigError as refusal:
        if "does not run its language part" in refusal.message:
            _generate(model, [5, 9])  # raises if it is the small configuration that does not run
        raise
    source = random.Random(7)
    prompts = [[source.randrange(3, FIRST_OTHER_TOKEN) for _ in range(length)] for length in LENGTHS]
    sequences = [engine.add(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in prompts]
    engine.run()
    expected = [_generate(model, prompt) for prompt in prompts]
    architecture = type(model).__name__
    if [sequence.output_token_ids for sequence in sequences] != expected:
        return Result(architecture, "differs", "other tokens than those of transformers")
    if len({tuple(tokens) for tokens in expected}) == 1:
        return Result(architecture, "not tried", "the model answers every prompt alike")
    return Result(architecture, "served")


def _engine(directory: Path) -> InProcessEngine:
    engine = InProcessEngine(ModelManager("cpu").load(directory, "float32", MAX_MODEL_LEN), max_num_batched_tokens=16)
    engine.runner.self_check()
    return engine


def _generate(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=[NO_TOKEN],
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def result_in_process(model_type: str) -> Result:
    """Return the result of a process of its own, which may crash, hang, or ask for too much memory."""
    with tempfile.NamedTemporaryFile() as file:
        process = multiprocessing.get_context("fork").Process(target=_write_result, args=(model_type, file.name))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return Result("", "not tried", f"did not end in {TIMEOUT_S:.0f} s")
        written = Path(file.name).read_text()
    if not written:
        return Result("", "not tried", f"its process ended with {process.exitcode}")
    return Result(*json.loads(written))


def _write_result(model_type: str, file: str) -> None:
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    Path(file).write_text(json.dumps(result_of(model_type)))


def page_with_tables(text: str, results: dict[str, Result], version: str) -> str:
    """Return the page with new tables."""
    served = {name: result for name, result in results.items() if result.outcome == "served"}
    refused = {name: result for name, result in results.items() if result.outcome == "refused"}
    others = {name: result for name, result in results.items() if result.outcome not in ("served", "refused")}
    text = with_table(text, "served", _table("served", served, version), MAKER)
    text = with_table(text, "refused", _table("refused", refused, version), MAKER)
    return with_table(text, "not-tried", _table("not tried", others, version), MAKER)


def _table(outcome: str, results: dict[str, Result], version: str) -> Iterator[str]:
    yield f"{len(results)} of {len(MODEL_TYPES)} model types of transformers {version} are {outcome}:"
    yield ""
    yield "| model type | class |" + (" the error says |" if outcome == "refused" else " why |" * (outcome != "served"))
    yield "|---|---|" + "---|" * (outcome != "served")
    for name, result in results.items():
        text = result.text.replace("|", "\\|").replace("<", "&lt;")
        for common in (f"architecture {result.architecture} cannot be served: ", f"; {SERVED}"):
            text = text.replace(common, "")
        model_class = f"`{result.architecture}`" if result.architecture else "?"
        yield f"| {name} | {model_class} |" + f" {text} |" * (outcome != "served")


def read_data() -> tuple[dict[str, Result], str]:
    """Return the results that the page shows, by model type, and the version of transformers that they are of."""
    data = json.loads(DATA.read_text())
    return {name: Result(*fields) for name, fields in data["model_types"].items()}, data["transformers"]


def write(results: dict[str, Result]) -> None:
    """Write the data file and the page."""
    lines = (f"    {json.dumps(name)}: {json.dumps(results[name])}" for name in sorted(results))
    rows = ",\n".join(lines)
    DATA.write_text(f'{{\n  "transformers": "{transformers.__version__}",\n  "model_types": {{\n{rows}\n  }}\n}}\n')
    PAGE.write_text(page_with_tables(PAGE.read_text(), *read_data()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="MODEL_TYPE", default=MODEL_TYPES, choices=MODEL_TYPES, help="try these"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what the last run has tried")
    parser.add_argument("--write", action="store_true", help=f"write {DATA.name} and {PAGE.name}")
    arguments = parser.parse_args()
    results: dict[str, Result] = {}
    if arguments.resume and UNFINISHED.exists():
        results = {name: Result(*fields) for name, fields in json.loads(UNFINISHED.read_text()).items()}
    UNFINISHED.parent.mkdir(exist_ok=True)
    for model_type in arguments.only:
        if model_type in results:
            continue
        started_s = time.monotonic()
        results[model_type] = result = result_in_process(model_type)
        UNFINISHED.write_text(json.dumps(results))
        text = f"{model_type}: {result.outcome} ({time.monotonic() - started_s:.0f} s) {result.text}"
        sys.stdout.write(f"{text.strip()}\n")
        sys.stdout.flush()
    wrong = [name for name, result in results.items() if result.outcome == "differs"]
    if wrong:
        raise SystemExit(f"served with other tokens than transformers': {', '.join(wrong)}")
    if arguments.write:
        known = read_data()[0] if DATA.exists() else {}
        results = {name: result for name, result in {**known, **results}.items() if name in MODEL_TYPES}
        if missing := set(MODEL_TYPES) - results.keys():
            raise SystemExit(f"--write needs a run of all model types; not tried: {', '.join(sorted(missing))}")
        write(results)


if __name__ == "__main__":
    main()
