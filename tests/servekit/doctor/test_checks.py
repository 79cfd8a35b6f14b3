"""Claims about machines that do not exist: what is said of them, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.doctor.checks import Check, examine, weight_bytes
from servekit.doctor.machine import Clock, Cores, Folder, Hub, Limits, Machine, Memory, Port, Processor
from servekit.protocol.worker_facts import GpuFacts, KernelFacts, ModelFacts, TorchFacts, WorkerFacts

GIB = 2**30
MODEL = ModelFacts(
    architecture="LlamaForCausalLM",
    weight_format="safetensors, bfloat16",
    file_bytes=14 * GIB,
    file_number_bytes=2,
    num_parameters=7 * GIB,
    kv_numbers_per_token=2 * 32 * 8 * 128,
)
TORCH = TorchFacts(version="2.13.0", cuda=None, num_threads=8, multiplies_bfloat16=False)
KERNELS = KernelFacts(is_loaded=True, compiler="/usr/bin/cc", messages=("C kernels: prebuilt, avx2-float32",))
H100 = GpuFacts(name="H100", capability=(9, 0), total_bytes=80 * GIB, free_bytes=79 * GIB)
GPU_TORCH = replace(TORCH, cuda="13.0", gpus=(H100,), triton="3.7.1")
ROOM = Folder(path="/var/room", free_bytes=500 * GIB)
GOOD = Machine(
    python_version=(3, 12, 1),
    pointer_bits=64,
    processor=Processor(name="EPYC", architecture="x86_64", features=frozenset({"avx2"})),
    cores=Cores(total=8, usable=8, load=0.3),
    memory=Memory(total=64 * GIB, available=60 * GIB),
    clock=Clock(source="tsc", read_ns=40.0),
    temporary=ROOM,
    cache=ROOM,
    models=ROOM,
    shared_memory=ROOM,
    limits=Limits(open_files=2**20, reserved_files=192),
    port=Port(host="127.0.0.1", port=8000),
    hub=Hub(address="https://hub", has_token=True),
    missing_packages={"terminal": (), "otel": ()},
    driver=None,
    worker=WorkerFacts(torch=TORCH, kernels=KERNELS),
    model=MODEL,
)
WITH_GPU = replace(GOOD, driver="580.1", worker=WorkerFacts(torch=GPU_TORCH, kernels=KERNELS))


def checks_of(machine: Machine, **settings: Any) -> dict[str, Check]:
    return {check.name: check for check in examine(machine, ServeConfig(**settings))}


def with_torch(machine: Machine, **facts: Any) -> Machine:
    assert machine.worker is not None
    return replace(machine, worker=replace(machine.worker, torch=replace(machine.worker.torch, **facts)))


def with_kernels(machine: Machine, **facts: Any) -> Machine:
    assert machine.worker is not None
    return replace(machine, worker=replace(machine.worker, kernels=replace(machine.worker.kernels, **facts)))


@pytest.mark.parametrize("machine", [GOOD, WITH_GPU])
def test_nothing_is_said_against_a_good_machine(machine: Machine) -> None:
    assert {check.status for check in examine(machine, ServeConfig())} == {"ok"}
    assert not [check for check in examine(machine, ServeConfig()) if check.remedy]


IN_BFLOAT16 = with_torch(replace(GOOD, model=replace(MODEL, cpu_dtype="bfloat16")), multiplies_bfloat16=True)
FULL = Folder(path="/full", free_bytes=10)
READ_ONLY = Folder(path="/ro", problem="Read-only file system")
# A machine, the settings, the check's name and status, and words of what it finds or advises.
CASES: list[tuple[Machine, dict[str, Any], str, str, str]] = [
    (replace(GOOD, python_version=(3, 10, 2)), {}, "Python", "broken", "3.10.2"),
    (replace(GOOD, pointer_bits=32), {}, "Python", "broken", "32 bits"),
    (
        replace(GOOD, processor=Processor(name="old", architecture="x86_64", features=frozenset({"sse2"}))),
        {},
        "processor",
        "slow",
        "AVX2 or newer",
    ),
    (with_torch(GOOD, multiplies_bfloat16=True), {}, "processor", "ok", "--dtype bfloat16"),
    (IN_BFLOAT16, {}, "processor", "ok", "--dtype auto is the checkpoint's bfloat16"),
    (replace(GOOD, cores=Cores(total=64, usable=1)), {}, "cores", "slow", "1 of 64"),
    (replace(GOOD, cores=Cores(total=8, usable=8, quota=1.5)), {}, "cores", "slow", "1.5"),
    (replace(GOOD, cores=Cores(total=8, usable=8, load=9.0)), {}, "other load", "slow", "9.0 processes on 8"),
    (replace(GOOD, worker=None, worker_problem="killed by SIGILL", model=None), {}, "torch", "broken", "SIGILL"),
    (replace(GOOD, worker=None, worker_problem="?", model=None), {}, "model", "ok", "unknown without torch"),
    (replace(GOOD, cores=Cores(total=8, usable=8, quota=4.0)), {}, "torch", "slow", "OMP_NUM_THREADS=4"),
    (with_torch(GOOD, num_threads=1), {}, "torch", "slow", "OMP_NUM_THREADS=8"),
    (with_kernels(GOOD, is_loaded=False, messages=("no C compiler found",)), {}, "C kernels", "slow", "GCC 12"),
    (with_kernels(WITH_GPU, compiler=None), {}, "C compiler", "broken", "gcc"),
    (replace(GOOD, driver="580.1"), {}, "GPU", "slow", "built for CPUs"),
    (replace(GOOD, driver="580.1", worker=None, worker_problem="?"), {}, "GPU", "slow", "torch fails"),
    (with_torch(replace(GOOD, driver="450.1"), gpu_problem="driver too old"), {}, "GPU", "slow", "driver too old"),
    (replace(GOOD, driver="580.1"), {"device": "cuda:0"}, "GPU", "broken", "built for CPUs"),
    (GOOD, {"device": "cuda"}, "GPU", "broken", "docker run --gpus all"),
    (GOOD, {"devices": "cuda:0,cuda:1"}, "GPU", "broken", "--device cpu"),
    (with_torch(WITH_GPU, gpus=(replace(H100, capability=(7, 5)),)), {}, "GPU", "slow", "8.0 or newer"),
    (with_torch(WITH_GPU, triton=None), {}, "Triton, flash-attn", "slow", "Triton is not installed"),
    (replace(GOOD, model=ModelFacts(problem="there is no such directory")), {}, "model", "broken", "no such directory"),
    (replace(GOOD, model=None), {"model": "sim:instant"}, "model", "ok", "simulated"),
    (replace(GOOD, model=replace(MODEL, architecture="", is_here=False)), {}, "model", "ok", "not downloaded yet"),
    (replace(GOOD, memory=Memory(total=16 * GIB, available=16 * GIB)), {}, "memory", "broken", "28.0 GiB"),
    (replace(GOOD, memory=Memory(total=64 * GIB, available=10 * GIB)), {}, "memory", "slow", "end other programs"),
    (
        replace(GOOD, memory=Memory(total=64 * GIB, available=60 * GIB, limit=8 * GIB)),
        {},
        "memory",
        "broken",
        "8.0 GiB of 8.0 GiB available (the control group's limit)",
    ),
    (with_torch(WITH_GPU, gpus=(replace(H100, total_bytes=8 * GIB),)), {}, "GPU memory", "broken", "14.0 GiB"),
    (WITH_GPU, {}, "GPU memory", "ok", "475,136 tokens"),  # 0.9 of 80 GiB less 14, at 128 KiB a token
    (
        replace(WITH_GPU, model=replace(MODEL, kv_numbers_per_token=0)),
        {},
        "GPU memory",
        "ok",
        "that the settings allow",
    ),
    (replace(GOOD, memory=replace(GOOD.memory, huge_pages="never")), {}, "huge pages", "slow", "echo madvise"),
    (replace(WITH_GPU, shared_memory=FULL), {"tensor_parallel_size": 2}, "shared memory", "limited", "--shm-size"),
    (replace(GOOD, temporary=READ_ONLY), {}, "temporary files", "broken", "/ro: Read-only file system"),
    (replace(GOOD, cache=READ_ONLY), {}, "cache folder", "slow", "--cache-dir"),
    (replace(GOOD, cache=FULL), {}, "cache folder", "limited", "0 MiB free"),
    (replace(GOOD, models=READ_ONLY), {}, "downloaded models", "limited", "HF_HOME"),
    (
        replace(GOOD, model=replace(MODEL, is_here=False), models=Folder(path="/small", free_bytes=GIB)),
        {},
        "downloaded models",
        "limited",
        "1.0 GiB free",
    ),
    (replace(GOOD, limits=Limits(open_files=1024, reserved_files=192)), {}, "open files", "limited", "8,384"),
    (replace(GOOD, limits=Limits(processes=100)), {}, "other limits", "limited", "ulimit -u"),
    (replace(GOOD, limits=Limits(address_space_bytes=GIB)), {}, "other limits", "limited", "ulimit -v"),
    (
        replace(GOOD, port=Port(host="::1", port=80, problem="cannot listen on ::1:80", holder="process 7 (nginx)")),
        {},
        "port",
        "broken",
        "cannot listen on ::1:80, by process 7 (nginx)",
    ),
    (replace(GOOD, port=Port(host="h", port=80, problem="cannot listen")), {}, "port", "broken", "cannot listen"),
    (replace(GOOD, hub=Hub(address="https://hub", problem="no route")), {}, "Hugging Face", "limited", "no route"),
    (replace(GOOD, hub=Hub(address="https://hub", is_offline=True)), {}, "Hugging Face", "limited", "HF_HUB_OFFLINE"),
    (replace(GOOD, clock=Clock(source="hpet", read_ns=2000.0)), {}, "clock", "slow", "clocksource=tsc"),
    (replace(GOOD, clock=Clock(source="tsc", read_ns=40.0, behind_s=9e5)), {}, "clock", "limited", "10 days before"),
    (
        replace(GOOD, missing_packages={"terminal": ("rich>=14.0",), "otel": ()}),
        {},
        "extras",
        "limited",
        "pip install 'rich>=14.0'",
    ),
    (
        replace(GOOD, missing_packages={"otel": ("opentelemetry-sdk>=1.40",)}),
        {"otlp_endpoint": "http://host:4318"},
        "extras",
        "broken",
        "otel lacks opentelemetry-sdk>=1.40",
    ),
]


@pytest.mark.parametrize(
    ("machine", "settings", "name", "status", "words"), CASES, ids=[f"{case[2]}-{case[4]}" for case in CASES]
)
def test_what_is_wrong_is_named_with_a_remedy(
    machine: Machine, settings: dict[str, Any], name: str, status: str, words: str
) -> None:
    check = checks_of(machine, **settings)[name]
    assert check.status == status
    assert words in f"{check.found} {check.remedy}"
    assert bool(check.remedy) == (status != "ok")


def test_a_machine_with_a_gpu_is_not_judged_by_what_only_a_cpu_needs() -> None:
    machine = with_kernels(with_torch(WITH_GPU, num_threads=1, multiplies_bfloat16=True), is_loaded=False)
    machine = replace(machine, memory=Memory(total=8 * GIB, available=8 * GIB, huge_pages="never"))
    assert {check.status for check in checks_of(machine).values()} == {"ok"}
    assert "C kernels" not in checks_of(machine) and "huge pages" not in checks_of(machine)
    on_cpu = checks_of(machine, device="cpu")
    assert {on_cpu[name].status for name in ("C kernels", "torch", "huge pages")} == {"slow"}
    assert on_cpu["memory"].status == "broken"


def test_shared_memory_matters_to_several_gpus_only() -> None:
    assert "shared memory" not in checks_of(WITH_GPU)
    assert "shared memory" not in checks_of(GOOD, tensor_parallel_size=2)
    assert checks_of(WITH_GPU, tensor_parallel_size=2)["shared memory"].status == "ok"


@pytest.mark.parametrize(
    ("settings", "on_gpu", "expected"),
    [
        ({}, False, 28 * GIB),  # float32
        ({}, True, 14 * GIB),  # as in the files
        ({"dtype": "bfloat16"}, False, 14 * GIB),
        ({"quantization": "int8"}, False, 7.35 * GIB),
        ({"quantization": "int4"}, False, 4.2 * GIB),
    ],
)
def test_memory_of_weights(settings: dict[str, Any], on_gpu: bool, expected: float) -> None:
    assert weight_bytes(MODEL, ServeConfig(**settings), on_gpu=on_gpu) == pytest.approx(expected)


def test_quantized_weights_take_what_their_files_take() -> None:
    facts = replace(MODEL, is_quantized=True, file_bytes=4 * GIB)
    assert weight_bytes(facts, ServeConfig(), on_gpu=False) == 4 * GIB


def test_each_replica_has_weights_and_a_cache_of_its_own() -> None:
    one, two = (checks_of(GOOD, data_parallel_size=number)["memory"] for number in (1, 2))
    assert "weights take 28.0 GiB, the KV cache up to 1.0 GiB" in one.found
    assert "weights take 56.0 GiB, the KV cache up to 2.0 GiB" in two.found
    assert "weights take 0 MiB" in checks_of(GOOD, listen_workers="unix:/socket")["memory"].found


@pytest.mark.parametrize(("kv_cache_dtype", "expected"), [("auto", "4.0 GiB"), ("int8", "1.0 GiB")])
def test_a_number_of_blocks_decides_the_size_of_the_cache(kv_cache_dtype: str, expected: str) -> None:
    settings = {"num_kv_blocks": 1024, "kv_cache_dtype": kv_cache_dtype}  # 16 tokens of 64 Ki numbers each
    assert f"the KV cache up to {expected}" in checks_of(GOOD, **settings)["memory"].found
