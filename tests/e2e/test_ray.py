"""A server whose workers Ray places on the nodes of a cluster. Needs the package ray, which CI does not install."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.support import proc
from tests.support.ray_nodes import RayNodes
from tests.support.server_process import ServerProcess, serving

pytest.importorskip("ray")
pytestmark = pytest.mark.long

NUM_TOKENS = 150
PROMPTS = [f"What is {number} times {number}?" for number in range(12)]
ENOUGH_S = 120.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(3)
    yield nodes
    nodes.close()


def wait_until(condition: Callable[[], bool], server: ServerProcess) -> None:
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.1)


def expected(num_tokens: int = NUM_TOKENS) -> list[str]:
    params = SamplingParams(max_tokens=num_tokens)
    return [bytes(NaiveReference().output(prompt.encode(), params)).decode() for prompt in PROMPTS]


def answers(server: ServerProcess, during: Callable[[], object]) -> list[str]:
    """The answers to all prompts, streamed; `during` is called when the first tokens have arrived."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streams = [threads.submit(server.stream, prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        before = server.metric("servekit_generation_tokens_total")
        wait_until(lambda: server.metric("servekit_generation_tokens_total") > before + 5 * len(PROMPTS), server)
        during()
        return [stream.result()[-1]["generated_text"] for stream in streams]


def ready_hosts(server: ServerProcess) -> Counter[str]:
    replicas = server.client.get("/info").json()["replicas"]
    return Counter(re.sub(".*Ray node ", "", each["host"]) for each in replicas if each["state"] == "ready")


def agents(server: ServerProcess) -> list[int]:
    """The processes of workers that join this server, wherever Ray has started them."""
    port = re.findall(r"workers can join at tcp://0.0.0.0:(\d+)", server.log.read_text())[0]
    return [pid for pid in proc.all_pids() if f":{port}\0--model" in proc.read(pid, "cmdline")]


def test_a_killed_node_loses_no_token_and_its_workers_are_placed_anew(nodes: RayNodes, tmp_path: Path) -> None:
    arguments = ["sim:step=20ms", "--placement", "ray", "--ray-address", nodes.address, "--data-parallel-size", "4"]
    with serving(*arguments, log=tmp_path / "log") as server:
        wait_until(lambda: ready_hosts(server).total() == 4, server)
        assert sorted(ready_hosts(server).values()) == [1, 1, 2], "the workers are spread over the three nodes"

        added = nodes.add()
        victim = re.findall(r"a worker starts on .* node (\w+)", server.log.read_text())
        killed = next(node for node in victim if node != nodes.head_id[:8])
        assert answers(server, lambda: nodes.kill(killed)) == expected()
        wait_until(lambda: ready_hosts(server).total() == 4 and killed not in ready_hosts(server), server)
        assert added[:8] in ready_hosts(server), "the emptiest node gets the worker"
        assert answers(server, lambda: None) == expected()

        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(ENOUGH_S) == 0
        wait_until(lambda: not agents(server), server)


def test_workers_end_with_a_server_that_is_killed(nodes: RayNodes, tmp_path: Path) -> None:
    arguments = ["sim:step=20ms", "--placement", "ray", "--ray-address", nodes.address, "--data-parallel-size", "2"]
    with serving(*arguments, log=tmp_path / "log") as server:
        wait_until(lambda: ready_hosts(server).total() == 2, server)
        assert len(agents(server)) == 2
        server.process.kill()
        wait_until(lambda: not agents(server), server)


def test_ranks_on_one_node_answer_like_one_process(nodes: RayNodes, tmp_path: Path) -> None:
    arguments = ["--placement", "ray", "--ray-address", nodes.address, "--tensor-parallel-size", "2"]
    with serving("demo", *arguments, log=tmp_path / "log") as server:
        divided = [server.generate(prompt, max_tokens=20, temperature=0)["generated_text"] for prompt in PROMPTS]
        assert len(server.client.get("/info").json()["replicas"][0]["ranks"]) == 2
    with serving("demo", log=tmp_path / "whole.log") as server:
        assert divided == [
            server.generate(prompt, max_tokens=20, temperature=0)["generated_text"] for prompt in PROMPTS
        ]


def test_ranks_on_two_nodes_answer_like_one_process_and_go_on_when_one_of_them_is_killed(
    nodes: RayNodes, tmp_path: Path
) -> None:
    """No node has the four CPUs that both ranks reserve, so each rank gets a node."""
    arguments = ["--placement", "ray", "--ray-address", nodes.address, "--tensor-parallel-size", "2"]
    arguments += ["--ray-num-cpus", "2", "--ray-nodes-per-replica", "2", "--heartbeat-timeout", "30"]
    fields = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0}
    with serving("demo", *arguments, log=tmp_path / "log") as server, ThreadPoolExecutor(len(PROMPTS)) as threads:

        def divided(during: Callable[[], object] = lambda: None) -> list[str]:
            before = server.metric("servekit_generation_tokens_total")
            streams = [threads.submit(server.stream, prompt, **fields) for prompt in PROMPTS]
            wait_until(lambda: server.metric("servekit_generation_tokens_total") > before + len(PROMPTS), server)
            during()
            return [stream.result()[-1]["generated_text"] for stream in streams]

        (replica,) = server.client.get("/info").json()["replicas"]
        hosts = [re.sub(".*Ray node ", "", rank["host"]) for rank in replica["ranks"]]
        assert len(set(hosts)) == 2, "each rank on a node of its own"
        answers = [divided()]
        nodes.add()
        victim = next(host for host in hosts if host != nodes.head_id[:8])
        answers.append(divided(lambda: nodes.kill(victim)))
        (replica,) = server.client.get("/info").json()["replicas"]
        assert victim not in str(replica["ranks"]) and len(replica["ranks"]) == 2
    with serving("demo", log=tmp_path / "whole.log") as server:
        whole = [server.generate(prompt, **fields)["generated_text"] for prompt in PROMPTS]
    assert answers == [whole, whole]


def test_prefill_and_decode_on_two_nodes_answer_like_one_replica_also_when_one_of_them_is_killed(
    nodes: RayNodes, tmp_path: Path
) -> None:
    arguments = ["sim:step=20ms", "--placement", "ray", "--ray-address", nodes.address, "--data-parallel-size", "2"]
    with serving(*arguments, "--prefill-replicas", "1", log=tmp_path / "log") as server:

        def host_of_role() -> dict[str, str]:
            replicas = server.client.get("/info").json()["replicas"]
            ready = [each for each in replicas if each["state"] == "ready"]
            return {each["role"]: re.sub(".*Ray node ", "", each["host"]) for each in ready}

        def num_handed_over() -> int:
            number: int = server.client.get("/info").json()["num_handed_over"]
            return number

        wait_until(lambda: ready_hosts(server).total() == 2, server)
        hosts = host_of_role()
        assert hosts.keys() == {"prefill", "decode"} and len(set(hosts.values())) == 2
        assert answers(server, lambda: None) == expected()
        assert server.metric("servekit_kv_transfer_loaded_blocks_total") > 0
        num_before = num_handed_over()
        assert num_before > 0

        nodes.add()
        role, victim = next(each for each in hosts.items() if each[1] != nodes.head_id[:8])
        assert answers(server, lambda: nodes.kill(victim)) == expected()
        wait_until(lambda: ready_hosts(server).total() == 2 and victim not in ready_hosts(server), server)
        assert host_of_role().keys() == {"prefill", "decode"}, f"another worker computes what the {role} worker did"
        for turn in range(4):  # a first transfer may wait for the pause after one that was lost
            prompts = [f"{turn} {prompt}" for prompt in PROMPTS]
            with ThreadPoolExecutor(len(prompts)) as threads:
                found = threads.map(lambda prompt: server.generate(prompt, max_tokens=NUM_TOKENS), prompts)
            params = SamplingParams(max_tokens=NUM_TOKENS)
            assert [each["generated_text"] for each in found] == [
                bytes(NaiveReference().output(prompt.encode(), params)).decode() for prompt in prompts
            ]
        assert num_handed_over() > num_before


def test_without_a_cluster_the_server_ends_and_says_how_to_start_one(tmp_path: Path) -> None:
    server = ServerProcess("sim:step=1ms", "--placement", "ray", "--ray-address", "127.0.0.1:1", log=tmp_path / "log")
    assert server.process.wait(ENOUGH_S) == 2
    server.client.close()
    assert "there is no Ray cluster at '127.0.0.1:1'" in server.log.read_text()
    assert "`ray start --head`" in server.log.read_text()


def test_workers_are_added_while_requests_wait_and_leave_when_none_do(nodes: RayNodes, tmp_path: Path) -> None:
    # One answer at a time takes 6 s, so twelve of them are not over before the third worker has come.
    arguments = ["sim:step=40ms", "--placement", "ray", "--ray-address", nodes.address, "--max-num-seqs", "1"]
    arguments += ["--max-data-parallel-size", "3", "--scale-target-wait", "1", "--scale-up-delay", "1"]
    with serving(*arguments, "--scale-down-delay", "3", log=tmp_path / "log") as server:
        assert ready_hosts(server).total() == 1
        server.stream("Hello", max_tokens=30, ignore_eos=True)  # nothing is predicted before an answer has ended
        # Each on a node of its own. The first one may leave again before the last answer has ended.
        are_spread = lambda: sorted(ready_hosts(server).values()) == [1, 1, 1]  # noqa: E731
        assert answers(server, lambda: wait_until(are_spread, server)) == expected()
        wait_until(lambda: ready_hosts(server).total() == 1, server)
        assert server.stream(PROMPTS[0], max_tokens=NUM_TOKENS, ignore_eos=True)[-1]["generated_text"] == expected()[0]
