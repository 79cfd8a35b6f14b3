"""Replay deploy/Dockerfile without a builder of images, and start the server in what comes out.

    sudo python -m tests.deploy.replay_dockerfile --folder /var/tmp/replay --target cpu

Each stage becomes a folder, and each RUN a command in a chroot of it. The base image cannot be fetched where there is
no registry, so a stand-in is made: Debian of the same release (debootstrap), and the CPython that runs this script in
/usr/local, where the official image has its own. Then the image's command is started as the image's user, with a
read-only root and one folder that can be written, as the Helm chart does it. It must serve, with the prebuilt kernels.

It needs root, Linux, debootstrap, and packages from Debian and PyPI; `--bind` shows folders of this machine to RUN, for
example those of pip's settings. It is not a test: compiling the kernels alone takes minutes, and it needs 3 GB of disk.
Each instruction that has succeeded is noted. With `--resume`, the next run goes on after it, in the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
RELEASE = "bookworm"
# What CPython's extension modules are linked with, in the official image, too.
LIBRARIES = "ca-certificates,libbz2-1.0,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,zlib1g,netbase"
USER_ID = 10001
READY_TIMEOUT_S = 300.0


@dataclass
class Stage:
    """One FROM of the file: its instructions, and what they have set so far."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def parse(text: str) -> dict[str, Stage]:
    """Return the stages of a Dockerfile, by name, in their order. It knows the instructions that ours has."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    defaults: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line in filter(str.strip, joined.splitlines()):
        instruction, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            for key, value in defaults.items():
                base = base.replace(f"${{{key}}}", value)
            stages[name] = Stage(name, base)
        elif not stages:
            assert instruction == "ARG", instruction
            key, _, value = rest.partition("=")
            defaults[key] = value
        else:
            assert instruction in ("ARG", "COPY", "CMD", "ENTRYPOINT", "ENV", "EXPOSE", "RUN", "USER", "WORKDIR"), line
            stages[next(reversed(stages))].instructions.append((instruction, rest))
    return stages


class Replay:
    """Stages as folders in one folder of the disk."""

    def __init__(self, folder: Path, binds: list[str], resumes: bool = False) -> None:
        """With `resumes`, instructions that have succeeded in an earlier run are not executed again."""
        self.folder = folder
        self.binds = binds
        self.resumes = resumes
        self.stages = parse(DOCKERFILE.read_text())

    def base_root(self) -> Path:
        """Return the stand-in for the base image. It is made once."""
        root = self.folder / "base"
        made = self.folder / "base.made"
        if made.exists():
            return root
        shutil.rmtree(root, ignore_errors=True)
        command = ["/usr/sbin/debootstrap", "--variant=minbase", f"--include={LIBRARIES}", RELEASE, str(root)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        prefix, target = Path(sys.base_prefix), root / "usr/local"
        for part in ("bin", "include", "lib"):
            ignored = shutil.ignore_patterns("test", "tests", "__pycache__", "*.a", "site-packages")
            shutil.copytree(prefix / part, target / part, symlinks=True, dirs_exist_ok=True, ignore=ignored)
        shutil.rmtree(target / "bin")
        (target / "bin").mkdir()
        shutil.copy2(prefix / "bin" / version, target / "bin" / version)
        for name in ("python3", "python"):
            (target / "bin" / name).symlink_to(version)
        (target / "lib" / version / "site-packages").mkdir(exist_ok=True)
        self.run_in(root, "ldconfig && python -m ensurepip", {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"})
        made.touch()
        return root

    def build(self, name: str) -> tuple[Stage, Path]:
        """Replay a stage, after those that it needs."""
        stage, root = self.stages[name], self.folder / name
        source = self.build(stage.base)[1] if stage.base in self.stages else self.base_root()
        if stage.base in self.stages:
            before = self.stages[stage.base]
            stage.environment, stage.workdir = dict(before.environment), before.workdir
            stage.entrypoint, stage.command = before.entrypoint, before.command
        else:
            stage.environment = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"}
        record = self.folder / f"{name}.done"
        done = record.read_text().splitlines() if self.resumes and record.exists() else []
        if not done:
            shutil.rmtree(root, ignore_errors=True)
            subprocess.run(["/bin/cp", "--archive", "--reflink=auto", str(source), str(root)], check=True)
        lines = [f"{instruction} {rest}" for instruction, rest in stage.instructions]
        if done != lines[: len(done)]:
            sys.exit(f"{name}: instructions that were executed have changed; leave out --resume")
        for number, (instruction, rest) in enumerate(stage.instructions):
            began_s = time.monotonic()
            if number >= len(done) or instruction not in ("COPY", "RUN"):  # the others only change the stage
                self.replay(stage, root, instruction, rest)
            record.write_text("\n".join(lines[: max(number + 1, len(done))]))
            if (took_s := time.monotonic() - began_s) > 1:
                print(f"{name}: {instruction} {rest[:90]} … {took_s:.0f} s", flush=True)
        return stage, root

    def replay(self, stage: Stage, root: Path, instruction: str, rest: str) -> None:
        match instruction:
            case "RUN":
                self.run_in(root, f"cd {stage.workdir} && {rest}", stage.environment)
            case "COPY":
                *sources, target = shlex.split(rest)
                origin = ROOT
                if sources[0].startswith("--from="):
                    origin = self.build(sources.pop(0).partition("=")[2])[1]
                for each in sources:
                    copy(origin / each.lstrip("/"), root / (Path(stage.workdir) / target).as_posix().lstrip("/"))
            case "ENV":
                for pair in shlex.split(rest):
                    key, _, value = pair.partition("=")
                    stage.environment[key] = value.replace("$PATH", stage.environment.get("PATH", ""))
            case "WORKDIR":
                stage.workdir = rest
                (root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                stage.user = rest
            case "ENTRYPOINT":
                stage.entrypoint = json.loads(rest)
            case "CMD":
                stage.command = json.loads(rest)

    def run_in(self, root: Path, command: str, environment: dict[str, str]) -> None:
        """Run a shell command as root in a chroot, with the network of this machine."""
        mounts = "".join(
            f"mkdir -p {root}{path} && mount --bind {path} {root}{path} && " for path in ("/dev", *self.binds)
        )
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        script = f"{mounts} mount -t proc proc {root}/proc && exec chroot {root} /bin/sh -ec {shlex.quote(command)}"
        passed = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        unshare = ["/usr/bin/unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-ec", script]
        done = subprocess.run(
            unshare, env={**environment, **passed, "HOME": "/root"}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def copy(source: Path, target: Path) -> None:
    """Copy as COPY does: the contents of a folder, or a file into a folder or under a name."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        into = target / source.name if target.is_dir() else target
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, into)


def confined(stage: Stage, root: Path, command: list[str], more: dict[str, str]) -> subprocess.Popen[str]:
    """Start a command as the image's user, with a read-only root and the folder /cache, as in a pod."""
    (root / "cache").mkdir(exist_ok=True)
    script = (
        f"mount --bind {root} {root} && mount -t tmpfs -o mode=0700,uid={USER_ID},gid={USER_ID} tmpfs {root}/cache && "
        f"mount --bind /dev {root}/dev && mount -t proc proc {root}/proc && mount -o remount,bind,ro {root} && "
        f"exec chroot --userspec={stage.user}:{stage.user} {root} /bin/sh -c "
        + shlex.quote(f"cd {stage.workdir} && exec {shlex.join(command)}")
    )
    return subprocess.Popen(
        ["/usr/bin/unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-ec", script],
        env={**stage.environment, "HOME": stage.workdir, "SERVEKIT_CACHE_DIR": "/cache", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(stage: Stage, root: Path, *command: str) -> tuple[int, str]:
    process = confined(stage, root, list(command), {})
    text, _ = process.communicate(timeout=120)
    return process.returncode, text


def check(target: str, stage: Stage, root: Path) -> Iterator[str]:
    """Start what was built. Yields sentences of what was seen; an AssertionError names what was not."""
    assert stage.user == str(USER_ID)
    code, text = output(stage, root, "sh", "-c", "id -u; touch /opt/file 2>&1; touch /cache/file && echo written")
    assert code == 0 and text.split()[0] == stage.user and "Read-only" in text and "written" in text, text
    yield f"it runs as user {stage.user}; the root is read-only, and /cache can be written"
    code, text = output(stage, root, "sh", "-c", "command -v gcc cc clang tcc")
    assert (code != 0) == (target == "cpu"), text
    yield "it has no compiler" if target == "cpu" else f"it has a compiler: {text.split()[0]}"
    if target == "gpu":
        extension = "#include <Python.h>\nPyMODINIT_FUNC PyInit_x(void) { return NULL; }"
        compile_it = (
            f"echo {shlex.quote(extension)} > /cache/x.c; gcc -O3 -shared -fPIC /cache/x.c -o /cache/x.so "
            "-I$(python -c 'import sysconfig; print(sysconfig.get_paths()[\"include\"])') && echo compiled"
        )
        code, text = output(stage, root, "sh", "-c", compile_it)
        assert "compiled" in text, text
        yield "it compiles an extension of Python, as Triton does, in the one folder that can be written"
    materials = json.loads((root / "opt/servekit/sbom.cdx.json").read_text())
    names = {component["name"] for component in materials["components"]}
    assert {"torch", "transformers", "llguidance"} <= names and materials["bomFormat"] == "CycloneDX"
    yield f"the bill of materials names {len(names)} packages"
    yield from serve(target, stage, root)
    measured = subprocess.run(["/usr/bin/du", "-sm", str(root)], capture_output=True, text=True, check=True).stdout
    size = measured.split()[0]
    yield f"it takes {size} MB, the stand-in for the base image included"


def serve(target: str, stage: Stage, root: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began_s = time.monotonic()
    process = confined(stage, root, [*stage.entrypoint, *stage.command], {"SERVEKIT_PORT": str(port)})
    try:
        while not is_ready(port):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() - began_s < READY_TIMEOUT_S, "it is not ready"
            time.sleep(0.5)
        yield f"the server was ready after {time.monotonic() - began_s:.0f} s"
        body = {"model": "demo", "prompt": "What color is the sky?", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            text = json.load(answer)["choices"][0]["text"]
        assert text, "an empty answer"
        yield f"it answered {text!r}"
        # The server is the process below unshare's own; a signal to that one would not arrive.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), 15)
        log, _ = process.communicate(timeout=60)
        assert process.returncode == 0, (process.returncode, log[-2000:])
        yield "it drained at SIGTERM, and exited with 0"
        kernels = re.findall(r"C kernels: ([^\"\\]+)", log)
        assert kernels and kernels[0].startswith("prebuilt"), (kernels, log[-2000:])
        yield f"its worker used C kernels: {kernels[0]}"
    finally:
        if process.poll() is None:
            process.kill()


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the stages are built")
    parser.add_argument("--target", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--bind", action="append", default=[], help="a folder of this machine that RUN may read")
    parser.add_argument("--resume", action="store_true", help="go on after the last instruction that succeeded")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("only root can use chroot and mount")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    stage, root = Replay(arguments.folder.resolve(), arguments.bind, arguments.resume).build(arguments.target)
    print(f"replayed in {time.monotonic() - began_s:.0f} s", flush=True)
    for sentence in check(arguments.target, stage, root):
        print(f"- {sentence}", flush=True)


if __name__ == "__main__":
    main()
