"""Make the Llama of 0.4 billion random weights, and GGUF files of it for llama.cpp.

    python -m benchmarks.peers.make_models FOLDER

makes FOLDER/bfloat16, which servekit serves, and FOLDER/q8_0.gguf, q4_0.gguf and q4_k_m.gguf.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.random_llama import make_random_llama
from tests.support.quantized_checkpoints import write_gguf, write_q4_k_m, write_q8_0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    source = make_random_llama(folder)
    write_q8_0(source, folder / "q8_0.gguf")
    write_gguf(source, folder / "q4_0.gguf", lambda *_: "Q4_0")
    write_q4_k_m(source, folder / "q4_k_m.gguf")


if __name__ == "__main__":
    main()
