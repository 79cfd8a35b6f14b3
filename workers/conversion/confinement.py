"""Give up rights of this process for good: no network, no other programs, no files outside of one directory.

A file of a model may come from an attacker. Should it take over the code that reads it, there is nothing that this code
could do but write other weights.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from pathlib import Path

from servekit.errors import ConfigError
from servekit.protocol.child_process import limit_address_space

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_EPERM = 1

# System calls that are refused: sockets, and what could open them in another way; other programs; other processes.
# The numbers are those of Linux (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
_REFUSED = {
    "x86_64": {
        "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "socketpair": 53, "fork": 57, "vfork": 58,
        "execve": 59, "kill": 62, "ptrace": 101, "mount": 165, "tkill": 200, "keyctl": 250, "unshare": 272,
        "perf_event_open": 298, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "bpf": 321,
        "execveat": 322, "userfaultfd": 323,
    },
    "aarch64": {
        "mount": 40, "unshare": 97, "ptrace": 117, "kill": 129, "tkill": 130, "socket": 198, "socketpair": 199,
        "bind": 200, "listen": 201, "accept": 202, "connect": 203, "keyctl": 219, "execve": 221, "perf_event_open": 241,
        "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "execveat": 281,
        "userfaultfd": 282,
    },
}  # fmt: skip
# The same numbers on both.
_REFUSED_ANYWHERE = {"pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_getfd": 438}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000  # of system call numbers of x86-64's other table, which would pass the list

# Of BPF: load a word of the system call's description, compare, return (linux/filter.h, linux/seccomp.h).
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4
_KILL_PROCESS, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000

# Landlock (linux/landlock.h): rights to change files, which the first version of it knows.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_RULE_PATH_BENEATH = 1
_WRITE_RIGHTS = 1 << 1 | 0b1111_1111_0000  # write a file; remove and make files and directories of all kinds


def confine(writable: Path, memory_bytes: int, cpu_s: int) -> None:
    """Give up all rights but those to read files, and to write in `writable`. Call it after slow imports.

    `memory_bytes` may be allocated from now on, and `cpu_s` of processor time used. Raises ConfigError where the kernel
    cannot do it. Landlock, which limits the writing, is left out on kernels without it (before 5.13).
    """
    limit_address_space(memory_bytes)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise _refused("PR_SET_NO_NEW_PRIVS")
    _forbid_writing_outside(library, writable)
    _forbid_system_calls(library)


class _Program(ctypes.Structure):
    """A BPF program: `struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def _forbid_system_calls(library: ctypes.CDLL) -> None:
    machine = platform.machine()
    if machine not in _REFUSED:
        raise ConfigError(
            f"files like these are converted on x86_64 and aarch64 only, and this machine is {machine!r}: there the "
            "process that reads them cannot be kept from the network; convert them on another machine"
        )
    numbers = sorted({*_REFUSED[machine].values(), *_REFUSED_ANYWHERE.values()})
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_IF_AT_LEAST, len(numbers) + 1, 0, _X32_BIT),
        *((_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | _EPERM),
    ]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    program = _Program(len(code), packed)
    if library.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise _refused("seccomp")


def _forbid_writing_outside(library: ctypes.CDLL, writable: Path) -> None:
    rights = ctypes.c_uint64(_WRITE_RIGHTS)
    ruleset = library.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(rights), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return  # the kernel has no Landlock, or it is turned off
    directory = os.open(writable, os.O_PATH)
    try:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", _WRITE_RIGHTS, directory))
        if library.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0) != 0:
            raise _refused("Landlock")
        if library.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
            raise _refused("Landlock")
    finally:
        os.close(directory)
        os.close(ruleset)


def _refused(what: str) -> ConfigError:
    reason = os.strerror(ctypes.get_errno())
    return ConfigError(
        f"the kernel refuses {what} ({reason}), without which the process that reads files of others cannot give up "
        "its rights; convert them on another machine, or in a container that allows it"
    )
