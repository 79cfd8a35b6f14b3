"""A build hook of hatch: compile the C kernels into the wheel, for each kind of processor.

    make wheel                               for the machine that the compiler is for
    CC=aarch64-linux-gnu-gcc make wheel      with a cross compiler
    SERVEKIT_KERNEL_VARIANTS=avx2,baseline   only these of workers/csrc/prebuilt.py

Without HATCH_BUILD_HOOK_ENABLE_CUSTOM, which `make wheel` sets, hatch does not run this hook: then the wheel has
only the sources, is for every machine, and the kernels are compiled where the worker starts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST_GLIBC = 17  # glibc 2.17, of 2012: pip and Python support none before it


class PrebuiltKernels(BuildHookInterface):
    """Adds a library for each variant and dtype to the wheel, and makes it a wheel for one kind of machine."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatch of the files. Raises RuntimeError if there is no compiler or no variant."""
        if version == "editable":  # a checkout compiles its own sources, whatever changes in them
            return
        sys.path.insert(0, self.root)
        from workers.csrc import build, prebuilt

        compiler = os.environ.get("CC") or build.find_compiler()
        if compiler is None:
            raise RuntimeError(f"a wheel with prebuilt kernels needs a C compiler: install {build.REQUIRED_COMPILER}")
        target = _output([compiler, "-dumpmachine"])  # such as x86_64-linux-gnu
        machine, wanted = target.partition("-")[0], os.environ.get("SERVEKIT_KERNEL_VARIANTS")
        variants = [variant for variant in prebuilt.VARIANTS if variant.machine == machine]
        if wanted:
            variants = [variant for variant in variants if variant.name in wanted.split(",")]
        if not variants:
            raise RuntimeError(f"there are no variants {wanted or ''} for the target {target} of {compiler}")
        self._folder = TemporaryDirectory()
        libraries = []
        for variant in variants:
            for dtype, macros in build.MACROS.items():
                library = Path(self._folder.name) / variant.library_name(dtype)
                self.app.display_info(f"compiling {library.name}")
                # No limit of time: a build of an image has the processor that others leave, and a worker does not wait.
                flags = (*variant.flags, *macros, "-s")
                libraries.append(build.compile_library(compiler, flags, library, timeout_s=None))
        packed = prebuilt.PREBUILT_FOLDER.relative_to(build.FOLDER.parents[1])
        build_data["force_include"].update({str(library): str(packed / library.name) for library in libraries})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag(target, libraries)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the libraries, which the wheel contains by now."""
        if version != "editable":
            self._folder.cleanup()


def _platform_tag(target: str, libraries: list[Path]) -> str:
    """Return which systems can load the libraries: those with the newest version of glibc whose symbols they use.

    They also use the OpenMP library (libgomp), which torch's packages bring.
    """
    machine = target.partition("-")[0]
    if not target.endswith("linux-gnu"):
        return f"linux_{machine}"
    versions = {int(version) for path in libraries for version in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())}
    return f"manylinux_2_{max({OLDEST_GLIBC} | versions)}_{machine}"


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
