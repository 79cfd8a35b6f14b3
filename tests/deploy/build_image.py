"""Build an image of deploy/Dockerfile with buildah, without a daemon, and start the server in it.

    sudo python -m tests.deploy.build_image --folder /var/tmp/images --target cpu

Where no registry of images can be reached, buildah gets a base image that is made here: that of `replay_dockerfile`,
Debian of the same release (debootstrap) and the CPython that runs this script. With `--base NAME`, it is another one.
Then the image's command is started as the image's user, with a read-only root and one folder that can be written, as
the Helm chart does it. It must serve, with the prebuilt kernels.

It needs root, Linux, buildah, debootstrap, and packages from Debian and PyPI; `--bind` shows files and folders of this
machine to RUN, for example pip's settings as PATH:/etc/pip.conf. It is not a test: compiling the kernels alone takes
minutes, and it needs 6 GB of disk. What was built is kept in the folder, so the next build takes its layers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.deploy.replay_dockerfile import DOCKERFILE, ROOT, Replay, Stage, check

BASE = "localhost/python:3.11-slim-bookworm"
PATHS = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"  # of the official image


class Buildah:
    """buildah, with images in one folder of the disk."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "storage.conf"
        folders = f'graphroot = "{folder}/images"\nrunroot = "{folder}/run"\n'
        settings.write_text(f'[storage]\ndriver = "overlay"\n{folders}')
        self._environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(settings)}

    def run(self, *arguments: str, is_shown: bool = False) -> str:
        """Run a command of buildah, and return what it printed. `is_shown` prints it here, as it comes."""
        output = None if is_shown else subprocess.PIPE
        command = ["/usr/bin/buildah", *arguments]
        done = subprocess.run(command, env=self._environment, stdout=output, text=True, check=False)
        if done.returncode:
            sys.exit(f"buildah {arguments[0]} ended with code {done.returncode}")
        return (done.stdout or "").strip()

    def has(self, image: str) -> bool:
        return bool(self.run("images", "--quiet", "--filter", f"reference={image}"))

    def import_base(self, root: Path) -> None:
        """Make an image of a folder with the files of the base image."""
        container = self.run("from", "scratch")
        self.run("add", "--quiet", container, str(root), "/")
        self.run("config", "--env", f"PATH={PATHS}", container)
        self.run("commit", "--quiet", "--rm", container, BASE)

    def build(self, target: str, base: str, binds: list[str], variants: str) -> str:
        """Build an image, and return its name. `variants` are the kinds of processors to compile for; "": all."""
        name = f"localhost/servekit:{target}"
        shown = [argument for bind in binds for argument in ("--volume", f"{with_target(bind)}:ro")]
        # In a chroot, RUN needs neither cgroups nor a network of its own, which a container may not be given here.
        how = ["--isolation", "chroot", "--layers", "--target", target]
        how += ["--build-arg", f"PYTHON_IMAGE={base}", "--build-arg", f"SERVEKIT_KERNEL_VARIANTS={variants}"]
        ignored = ["--ignorefile", str(ROOT / ".dockerignore")]
        self.run("build", *how, *ignored, *shown, "--file", str(DOCKERFILE), "--tag", name, str(ROOT), is_shown=True)
        return name

    def stage_of(self, image: str) -> Stage:
        """Return what an image says of how it is started."""
        config = json.loads(self.run("inspect", "--type", "image", image))["OCIv1"]["config"]
        return Stage(
            name=image,
            base="",
            environment=dict(pair.split("=", 1) for pair in config["Env"]),
            workdir=config["WorkingDir"],
            user=config["User"],
            entrypoint=config["Entrypoint"],
            command=config["Cmd"],
        )


def with_target(bind: str) -> str:
    return bind if ":" in bind else f"{bind}:{bind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where images are kept")
    parser.add_argument("--target", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--base", help="an image to build on, in place of one that is made here")
    parser.add_argument("--bind", action="append", default=[], help="PATH or PATH:TARGET, which RUN may read")
    parser.add_argument("--variants", default="", help="compile kernels for these only, as in avx2,baseline")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("only root can use chroot and mount")
    folder: Path = arguments.folder.resolve()
    buildah, base = Buildah(folder), arguments.base
    if base is None:
        base = BASE
        if not buildah.has(BASE):
            buildah.import_base(Replay(folder, arguments.bind).base_root())
    began_s = time.monotonic()
    image = buildah.build(arguments.target, base, arguments.bind, arguments.variants)
    print(f"built in {time.monotonic() - began_s:.0f} s", flush=True)
    container = buildah.run("from", "--pull-never", image)
    try:
        root = Path(buildah.run("mount", container))
        for sentence in check(arguments.target, buildah.stage_of(image), root):
            print(f"- {sentence}", flush=True)
    finally:
        buildah.run("rm", container)


if __name__ == "__main__":
    main()
