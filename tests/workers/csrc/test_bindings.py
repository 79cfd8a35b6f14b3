"""The ctypes structs and prototypes are those of kernels.h."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from workers.csrc import bindings, build
from workers.kv_cache.kv_quantization import FLOAT8_PAGES, INT8_PAGES, PlainPages

STRUCTS = {
    "attention_params": bindings.CAttentionParams,
    "layer_pages": bindings.CLayerPages,
    "attention_metadata": bindings.CAttentionMetadata,
    "prepared_weight": bindings.CPreparedWeight,
    "packed_weight": bindings.CPackedWeight,
    "quantized_weight": bindings.CQuantizedWeight,
    "side_by_side_weight": bindings.CSideBySideWeight,
    "rotation": bindings.CRotation,
    "head_norms": bindings.CHeadNorms,
    "norm": bindings.CNorm,
    "experts": bindings.CExperts,
    "decoder_layer": bindings.CDecoderLayer,
    "lora_part": bindings.CLoraPart,
    "lora_weight": bindings.CLoraWeight,
    "lora_run": bindings.CLoraRun,
    "lora_step": bindings.CLoraStep,
    "language_model": bindings.CLanguageModel,
    "slot_table": bindings.CSlotTable,
    "token_span": bindings.CTokenSpan,
}
HEADER = (build.FOLDER / "kernels.h").read_text()


def test_structs_have_the_sizes_and_offsets_that_the_compiler_gives_them(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C compiler")
    lines = [f"sizeof({name}) == {ctypes.sizeof(struct)}" for name, struct in STRUCTS.items()]
    for name, struct in STRUCTS.items():
        for field, *_ in struct._fields_:
            member = getattr(struct, field)
            lines.append(f"offsetof({name}, {field}) == {member.offset}")
            lines.append(f"sizeof((({name} *)0)->{field}) == {member.size}")
    checks = "\n".join(f'_Static_assert({line}, "{line}");' for line in lines)
    source = tmp_path / "layouts.c"
    source.write_text(f'#include <stddef.h>\n#include "kernels.h"\n{checks}\n')
    command = [compiler, "-std=gnu11", "-fsyntax-only", f"-I{build.FOLDER}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_function_of_the_header_has_a_prototype_with_as_many_arguments() -> None:
    without_comments = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    functions = re.findall(r"^(?:void|int64_t) (\w+)\((.*?)\);", without_comments, flags=re.DOTALL | re.MULTILINE)
    counts = {name: 0 if arguments == "void" else arguments.count(",") + 1 for name, arguments in functions}
    assert counts == {name: len(arguments) for name, (_, arguments) in bindings._PROTOTYPES.items()}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("LANES", build.LANES),
        ("MAX_HEAD_DIM", bindings.MAX_HEAD_DIM),
        ("STRIP", bindings.STRIP),
        ("LORA_RUN_ROWS", bindings.LORA_RUN_ROWS),
        ("MAX_STEP_TOKENS", bindings.MAX_STEP_TOKENS),
    ],
)
def test_constants_are_those_of_the_headers(name: str, number: int) -> None:
    text = HEADER.replace("2 * LANES", str(2 * build.LANES)) + (build.FOLDER / "vectors.h").read_text()
    assert re.findall(rf"enum {{ {name} = (\d+) }}", text) == [str(number)]


def test_page_formats_have_the_numbers_of_the_header() -> None:
    (numbers,) = re.findall(r"enum { PLAIN_PAGES = (\d), INT8_PAGES = (\d), FLOAT8_PAGES = (\d) }", HEADER)
    assert list(bindings.PAGE_FORMATS.values()) == [int(number) for number in numbers]
    assert list(bindings.PAGE_FORMATS) == [PlainPages.name, INT8_PAGES.name, FLOAT8_PAGES.name]
