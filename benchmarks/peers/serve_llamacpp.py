"""Serve a GGUF file by llama.cpp's server, for benchmarks/against_peers.py. It needs `pip install xllamacpp`.

    python benchmarks/peers/serve_llamacpp.py MODEL.gguf PORT [--slots 32] [--slot-tokens 640] [--threads 2] \
        [--ngram]

Run it with an interpreter that has xllamacpp, a wheel with llama-server inside. `llama-server -m MODEL.gguf --port
PORT` is the same server.
"""

from __future__ import annotations

import argparse
import os
import threading

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("port", type=int)
    parser.add_argument("--slots", type=int, default=32, help="sequences at the same time")
    parser.add_argument("--slot-tokens", type=int, default=640, help="the longest sequence")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--ngram", action="store_true", help="speculative decoding by prompt lookup")
    arguments = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.hostnames = ["127.0.0.1"]
    params.port = arguments.port
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.slots * arguments.slot_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    params.sampling.temp = 0.0
    if arguments.ngram:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)  # answers until it is deleted
    print(f"listening on {server.listening_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
