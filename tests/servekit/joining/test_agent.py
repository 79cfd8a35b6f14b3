"""Tests of `python -m servekit.worker --connect`: real processes with a simulated device, and a listener here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.executor.model_executor import ModelExecutor
from servekit.joining import agent
from servekit.joining.address import TcpAddress
from servekit.joining.credentials import server_tls
from servekit.protocol.cpu_list import format_cpu_list
from servekit.protocol.frames import add_header
from servekit.protocol.handshake import Refused
from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.worker import USAGE
from tests.servekit.joining.clients import ENOUGH_S, KEY, LOAD, MODEL, RecordingHandler, listening

ONE_OF_TWO = ("--connect", "unix:/x", "--nnodes", "2", "--node-rank", "0", "--master-addr", "host")
SLOW_S = 90.0  # to start Python and join, on a machine that does much else


def make_handler(model: str = "sim:step=50ms") -> RecordingHandler:
    handler = RecordingHandler(model=None)
    handler.load = replace(LOAD, model_path=model, num_kv_blocks=8, max_num_batched_tokens=16)
    return handler


def make_plan(step_id: int) -> StepPlan:
    """A step of the first sequence: the prompt, or the token behind it."""
    if step_id == 0:
        assignment = SlotAssignment(0, SamplingParams(max_tokens=8))
        return StepPlan(0, 0, (assignment,), (ScheduledChunk(0, 0, 2, (5, 6), (0,), True),))
    return StepPlan(0, step_id, (), (ScheduledChunk(0, 1 + step_id, 1, (), (), True),))


class Worker:
    """A worker's agent as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def wait(self) -> tuple[int, str]:
        """(exit code, what it has written)."""
        async with asyncio.timeout(SLOW_S):
            output, _ = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, output.decode()

    def model_process(self) -> int:
        """The process id of the worker process that the agent has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])


@contextlib.asynccontextmanager
async def worker(folder: Path, *arguments: str, key: bytes = KEY) -> AsyncIterator[Worker]:
    (folder / "key").write_bytes(key)
    (folder / "key").chmod(0o600)
    command = [sys.executable, "-m", "servekit.worker", *(arguments or ("--connect", f"unix:{folder}/workers.sock"))]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--key-file",
        str(folder / "key"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    try:
        yield Worker(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def executor_of(handler: RecordingHandler, left: asyncio.Event | None = None) -> ModelExecutor:
    async with asyncio.timeout(SLOW_S):
        joined = await handler.joined.get()
    executor = ModelExecutor(ServeConfig(), lambda: None, (left or asyncio.Event()).set)
    executor.adopt(joined)
    return executor


async def test_a_worker_that_gets_sigterm_finishes_its_steps_and_exits_with_0(tmp_path: Path) -> None:
    handler, left = make_handler(), asyncio.Event()
    async with listening(handler, tmp_path), worker(tmp_path) as joining:
        executor = await executor_of(handler, left)
        executor.send(make_plan(0))
        executor.send(make_plan(1))
        joining.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(ENOUGH_S):
            await left.wait()
        assert executor.is_leaving
        results = [await executor.receive() for _ in range(2)]
        assert [result.step_id for result in results if isinstance(result, StepResult)] == [0, 1]
        await executor.stop()
        code, output = await joining.wait()
        assert code == 0 and "leaving" in output, output


async def test_a_server_that_restarts_finds_its_workers_again(tmp_path: Path) -> None:
    handler = make_handler()
    async with worker(tmp_path) as joining:
        async with listening(handler, tmp_path):
            executor = await executor_of(handler)
            first = joining.model_process()
            await executor.stop(graceful=False)
        async with listening(handler, tmp_path):
            executor = await executor_of(handler)
            assert joining.model_process() != first
            executor.send(make_plan(0))
            assert isinstance(await executor.receive(), StepResult)
            await executor.stop(graceful=False)


async def test_a_worker_process_that_is_killed_is_a_loss_and_joins_again(tmp_path: Path) -> None:
    handler = make_handler()
    async with listening(handler, tmp_path), worker(tmp_path) as joining:
        executor = await executor_of(handler)
        os.kill(joining.model_process(), signal.SIGKILL)
        again = await executor_of(handler)
        assert executor.loss is not None and again.loss is None
        again.send(make_plan(0))
        assert isinstance(await again.receive(), StepResult)
        for each in (executor, again):
            await each.stop(graceful=False)


async def test_the_end_of_the_agent_ends_the_worker_process(tmp_path: Path) -> None:
    handler = make_handler()
    async with listening(handler, tmp_path), worker(tmp_path) as joining:
        executor = await executor_of(handler)
        pidfd = os.pidfd_open(joining.model_process())
        joining.process.kill()
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, ended.set)
        async with asyncio.timeout(ENOUGH_S):
            await ended.wait()
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        await executor.stop(graceful=False)


async def test_a_wrong_key_and_another_model_end_the_worker_with_a_sentence(tmp_path: Path) -> None:
    handler = make_handler()
    async with listening(handler, tmp_path):
        async with worker(tmp_path, key=b"another" * 8) as joining:
            code, output = await joining.wait()
            assert code == 2 and "the worker's key is not the server's" in output, output
        handler.model = replace(MODEL, fingerprint="sim:another")
        async with worker(tmp_path) as joining:
            code, output = await joining.wait()
            assert code == 2 and "is not the one that the server's other workers have loaded" in output, output
        assert handler.joined.empty()


async def test_a_worker_that_is_refused_after_loading_says_why_and_does_not_join_again(tmp_path: Path) -> None:
    """Its fingerprint is right, so only the server sees that it does not fit."""
    handler = make_handler()
    handler.model = replace(MODEL, fingerprint="sim:step=50ms")
    async with listening(handler, tmp_path) as listener, worker(tmp_path) as joining:
        code, output = await joining.wait()
        assert listener.num_refused == 1 and handler.joined.empty()
    assert code == 2 and "it has loaded another model: its" in output and "joining again" not in output, output


async def test_a_model_of_its_own_replaces_the_servers_path(tmp_path: Path) -> None:
    """Its fingerprint counts, wherever the files are."""
    handler = make_handler("/a/path/on/the/server")
    arguments = ("--connect", f"unix:{tmp_path}/workers.sock", "--model", "sim:instant")
    async with listening(handler, tmp_path), worker(tmp_path, *arguments):
        async with asyncio.timeout(SLOW_S):
            joined = await handler.joined.get()
        assert joined.ready.model.fingerprint == "sim:instant" and joined.offer.device == "auto"
        await joined.connection.end()


async def test_a_worker_uses_the_cores_that_it_was_given_and_no_others(tmp_path: Path) -> None:
    """As `taskset` and containers do: the agent and the processes that it starts."""
    allowed = sorted(os.sched_getaffinity(0))
    given = allowed[-2:] if len(allowed) > 2 else allowed[-1:]
    arguments = ("--connect", f"unix:{tmp_path}/workers.sock", "--cpus", format_cpu_list(given))
    handler = make_handler()
    async with listening(handler, tmp_path), worker(tmp_path, *arguments) as joining:
        async with asyncio.timeout(SLOW_S):
            joined = await handler.joined.get()
        assert [rank.cpus for rank in joined.ready.ranks] == [format_cpu_list(given)]
        for pid in (joining.process.pid, joining.model_process()):
            assert os.sched_getaffinity(pid) == set(given)
        await joined.connection.end()


async def test_a_worker_joins_over_tcp_with_tls(tmp_path: Path, certificate: tuple[str, str]) -> None:
    handler = make_handler()
    async with listening(handler, tls=server_tls(*certificate)) as listener:
        assert isinstance(listener.address, TcpAddress)
        address = f"tcp://localhost:{listener.address.port}"
        async with worker(tmp_path, "--connect", address, "--tls-ca", certificate[0]):
            executor = await executor_of(handler)
            executor.send(make_plan(0))
            assert isinstance(await executor.receive(), StepResult)
            await executor.stop(graceful=False)


async def test_a_worker_waits_for_its_server_and_says_what_is_wrong_meanwhile(tmp_path: Path) -> None:
    """The server is not there yet; then something else listens there; then it is the server."""
    handler = make_handler()

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()
        has_answered.set()

    has_answered = asyncio.Event()
    async with worker(tmp_path) as joining:
        assert joining.process.stdout is not None
        async with asyncio.timeout(SLOW_S):
            assert b"cannot join" in await joining.process.stdout.readline()
        other_server = await asyncio.start_unix_server(answer, str(tmp_path / "workers.sock"))
        async with asyncio.timeout(SLOW_S):
            await has_answered.wait()
        other_server.close()
        await other_server.wait_closed()
        async with listening(handler, tmp_path):
            executor = await executor_of(handler)
            await executor.stop(graceful=False)
        joining.process.send_signal(signal.SIGTERM)
        code, output = await joining.wait()
        assert code == 0 and "is not a servekit server" in output, output


async def test_a_forged_refusal_sends_no_control_codes_to_the_terminal(tmp_path: Path) -> None:
    """It needs no key: a refusal may come before any proof."""
    forged = msgspec.msgpack.encode(Refused("wrong_key", "\x1b]0;owned\x07\nerror: none\x9b2J"))

    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(add_header(forged))
        writer.close()

    forger = await asyncio.start_unix_server(refuse, str(tmp_path / "workers.sock"))
    async with worker(tmp_path) as joining:
        code, output = await joining.wait()
    forger.close()
    await forger.wait_closed()
    assert code == 2 and r"\x1b]0;owned\x07\nerror: none\x9b2J" in output, output
    assert all(character.isprintable() for line in output.splitlines() for character in line)


async def test_a_worker_that_has_not_joined_yet_leaves_at_the_first_signal(tmp_path: Path) -> None:
    """The peer accepts the connection, and never answers."""
    accepted = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    silent = await asyncio.start_unix_server(never_answer, str(tmp_path / "workers.sock"))
    async with worker(tmp_path) as joining:
        async with asyncio.timeout(SLOW_S):
            await accepted.wait()
        joining.process.send_signal(signal.SIGTERM)
        code, output = await joining.wait()
    assert code == 0 and "no answer within" not in output, output
    silent.close()
    await silent.wait_closed()


async def test_one_agent_has_a_connection_for_each_rank_on_its_machine(tmp_path: Path) -> None:
    """And a rank that cannot serve ends the agent, because the others cannot without it."""
    handler = make_handler()
    handler.load = replace(handler.load, tensor_parallel_size=4)
    arguments = ("--connect", f"unix:{tmp_path}/workers.sock", "--nnodes", "2", "--node-rank", "1")
    arguments += ("--master-addr", "127.0.0.1", "--device", "cpu,cpu")
    async with listening(handler, tmp_path) as listener, worker(tmp_path, *arguments) as joining:
        async with asyncio.timeout(SLOW_S):
            while len(listener._gathered) < 2:  # noqa: ASYNC110  # there is no event for it
                await asyncio.sleep(0.02)
        assert sorted(listener._gathered._groups["tcp://127.0.0.1:29500"]) == [2, 3]
        joining.process.send_signal(signal.SIGTERM)
        code, output = await joining.wait()
        assert code == 0, output

        handler.load = replace(handler.load, tensor_parallel_size=2)
        async with worker(tmp_path, *arguments) as joining:
            code, output = await joining.wait()
        assert code == 2 and "of 4 (--nnodes times --nproc-per-node)" in output, output


async def test_a_signal_after_the_worker_has_left_does_not_change_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def leave_at_once(_: agent.WorkerAgent) -> int:
        return 0

    monkeypatch.setattr(agent.WorkerAgent, "run", leave_at_once)
    before = {number: signal.getsignal(number) for number in agent.LEAVE_SIGNALS}
    try:
        settings = agent.AgentSettings(TcpAddress("127.0.0.1", 1), KEY, None, "cpu", None)
        assert await agent.run_agent(settings) == 0
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def test_devices_that_are_not_as_many_as_the_ranks_are_refused_with_a_sentence_on_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handler = make_handler()
    handler.load = replace(handler.load, tensor_parallel_size=3)
    arguments = ("--connect", f"unix:{tmp_path}/workers.sock", "--device", "cuda:0,cuda:1")
    async with listening(handler, tmp_path) as listener, worker(tmp_path, *arguments) as joining:
        code, output = await joining.wait()
        assert code == 2 and "--device names 2 devices, and the server divides the model among 3 ranks" in output
        for _ in range(1000):
            if listener.num_refused:
                break
            await asyncio.sleep(0.03)
    assert "--device names 2 devices" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--device", "cpu"), USAGE),
        (("--connect", "10.0.0.7:80"), "is not an address; use unix:PATH"),
        (("--connect", "unix:relative"), "must be absolute"),
        (("--connect", "tcp://host:70000"), "is not an address"),
        (("--connect", "unix:/x", "--tls-ca", "x"), "--tls-ca has no use with a Unix socket"),
        (("--connect", "tcp://[::1]:80", "--device", "tpu"), "it takes auto, cpu, cuda or cuda:N"),
        (("--connect", "tcp://[::1]:80", "--device", "cuda:0,cpu"), "or one device for each rank"),
        (("--connect", "tcp://host:80", "--tls-ca", "/nowhere"), "no certificates in PEM format"),
        (("--connect", "unix:/x", "--cpus", "3-"), "'3-' is not a list of cores; write it like 0-7,16-23"),
        (("--connect", "unix:/x", "--cache-dir", "/proc/none"), "choose a directory that can be written"),
        (("--connect", "unix:/x", "--node-rank", "1"), "--node-rank has no effect without --nnodes"),
        (("--connect", "unix:/x", "--nnodes", "1", "--node-rank", "0"), "it takes 2 machines or more"),
        (("--connect", "unix:/x", "--nnodes", "2"), "--nnodes 2 needs --node-rank, a number from 0 to 1"),
        (("--connect", "unix:/x", "--nnodes", "2", "--node-rank", "2"), "needs --node-rank, a number from 0 to 1"),
        (("--connect", "unix:/x", "--nnodes", "2", "--node-rank", "0"), "--nnodes needs --master-addr"),
        (
            (*ONE_OF_TWO, "--master-port", "65536"),
            "--master-addr, --master-port = 'tcp://host:65536' is not an address",
        ),
        (
            (*ONE_OF_TWO, "--nproc-per-node", "0"),
            "--nproc-per-node 0 is not accepted: each machine has one rank or more",
        ),
        ((*ONE_OF_TWO, "--nproc-per-node", "513"), "--nnodes 2 times --nproc-per-node 513 are 1026 ranks"),
        ((*ONE_OF_TWO, "--nproc-per-node", "3", "--device", "cpu,cpu"), "names 2 devices, and --nproc-per-node is 3"),
        (("--connect", "unix:/x", "--transfer-address", "a:b"), "is not an address of this machine"),
        (
            (*ONE_OF_TWO, "--nproc-per-node", "2", "--transfer-address", "a:65535"),
            "has the port of the first of 2 ranks, the others have the next ones, and the last port is 65535",
        ),
        (("--connect", "unix:/x", "--transfer-tls-cert", "x"), "--transfer-tls-cert and --transfer-tls-key belong"),
        (("--connect", "unix:/x", "--cpus", ""), "'' is not a list of cores; write it like 0-7,16-23"),
        (("--connect", "unix:/x", "--cpus", "9998-9999"), "names cores 9998-9999, which do not exist or which this"),
    ],
)
async def test_wrong_arguments_are_refused_with_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    async with worker(tmp_path, *arguments) as joining:
        code, output = await joining.wait()
    assert code == 2 and expected in output and output.count("\n") == 1


async def test_a_key_that_is_too_short_is_refused(tmp_path: Path) -> None:
    async with worker(tmp_path, key=b"short") as joining:
        code, output = await joining.wait()
    assert code == 2 and "the key has 5 bytes, and must have 32 to 4096; make one with" in output
