"""Drop the privileges of this process for good: no network, no other programs, no changes outside of one directory.

A file of a model may come from an attacker. Should it take over the code that reads it, there is nothing that this code
could do but write other weights.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from pathlib import Path

from servekit.errors import ConfigError
from servekit.protocol.child_process import limit_address_space

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1

# System calls that are refused: sockets, and what could open them in another way; other programs; other processes; and
# changes of files that Landlock does not know (owners, permissions, times, attributes), or knows only in newer kernels.
# Links are refused in the writable directory, too: the server would follow them when it copies files there.
# The numbers are those of Linux (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
_REFUSED = {
    "x86_64": {
        "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "socketpair": 53, "fork": 57, "vfork": 58,
        "execve": 59, "kill": 62, "truncate": 76, "link": 86, "symlink": 88, "chmod": 90, "fchmod": 91, "chown": 92,
        "fchown": 93, "lchown": 94, "ptrace": 101, "rt_sigqueueinfo": 129, "utime": 132, "mknod": 133, "mount": 165,
        "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
        "fremovexattr": 199, "tkill": 200, "utimes": 235, "keyctl": 250, "mknodat": 259, "fchownat": 260,
        "futimesat": 261, "linkat": 265, "symlinkat": 266, "fchmodat": 268, "unshare": 272, "utimensat": 280,
        "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "bpf": 321, "execveat": 322, "userfaultfd": 323,
    },
    "aarch64": {
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "mknodat": 33, "symlinkat": 36, "linkat": 37, "mount": 40, "truncate": 45, "fchmod": 52, "fchmodat": 53,
        "fchownat": 54, "fchown": 55, "utimensat": 88, "unshare": 97, "ptrace": 117, "kill": 129, "tkill": 130,
        "rt_sigqueueinfo": 138, "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202,
        "connect": 203, "keyctl": 219, "execve": 221, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "execveat": 281, "userfaultfd": 282,
    },
}  # fmt: skip
# The same numbers on both.
_REFUSED_ANYWHERE = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_getfd": 438, "fchmodat2": 452, "setxattrat": 463,
    "removexattrat": 466, "file_setattr": 469,
}  # fmt: skip
_CLONE3 = 435  # its flags are in memory, which a filter cannot read; without it, the C library takes clone
# System calls that depend on an argument.
_CLONE, _TGKILL, _PRLIMIT, _FCNTL, _IOCTL, _SECCOMP = 0, 1, 2, 3, 4, 5
_NUMBERS = {"x86_64": (56, 234, 302, 72, 16, 317), "aarch64": (220, 131, 261, 25, 29, 277)}
_CLONE_THREAD = 0x10000
# Of fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX, which make the kernel send a signal to any process of the user.
_REFUSED_FCNTL = (8, 10, 15)
_TIOCSTI = 0x5412  # of ioctl: types into the user's terminal
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000  # of system call numbers of x86-64's other table, which would pass the list

# Of BPF: load a word of the system call's description, compare, return (linux/filter.h, linux/seccomp.h).
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16  # an argument has 8 bytes, the low ones in front
_JUMP_ALWAYS = 0x05
_KILL_PROCESS, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_Instruction = tuple[int, int, int, int]  # operation, instructions to skip if true and if not, value
_REFUSE: _Instruction = (_RETURN, 0, 0, _ERROR | errno.EPERM)

# Landlock (linux/landlock.h).
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1
_WRITE_FILE, _REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 1, 1 << 4, 1 << 5, 1 << 7, 1 << 8
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
# Access rights, with the version that knows them: write a file; remove and make files and directories of all
# kinds; change a file's length; give commands to devices. To move a file to another directory needs no mention: every
# ruleset refuses it.
_CHANGES = {1: _WRITE_FILE | sum(1 << bit for bit in range(4, 13)), 3: _TRUNCATE, 5: _IOCTL_DEV}
_ALLOWED_INSIDE = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE


def confine(writable: Path, memory_bytes: int, cpu_s: int) -> None:
    """Drop all privileges but reading files, and writing in `writable`.

    Call it after slow imports, while the process has one thread: Landlock confines only the thread that asks for it,
    and those that it starts later.

    `memory_bytes` may be allocated from now on, and `cpu_s` of processor time used. Raises ConfigError where the kernel
    cannot do it, or if there are other threads. Landlock, which limits the writing, is left out on kernels without it
    (before 5.13).
    """
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        raise ConfigError(
            f"the process that reads untrusted files has {num_threads} threads before it drops its privileges, and may "
            "have 1; a library started the others when it was imported"
        )
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
    refused = sorted({*_REFUSED[machine].values(), *_REFUSED_ANYWHERE.values()})
    numbers = _NUMBERS[machine]
    by_argument = [
        *_if_called(_CLONE3, [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)]),
        *_if_called(numbers[_CLONE], _allow_only(0, _JUMP_IF_ANY_BIT, _CLONE_THREAD)),
        *_if_called(numbers[_TGKILL], _allow_only(0, _JUMP_IF_EQUAL, os.getpid())),
        *_if_called(numbers[_PRLIMIT], _allow_only(0, _JUMP_IF_EQUAL, 0)),  # the process itself
        *_if_called(numbers[_FCNTL], _refuse_only(1, _REFUSED_FCNTL)),
        *_if_called(numbers[_IOCTL], _refuse_only(1, (_TIOCSTI,))),
    ]
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_IF_AT_LEAST, len(refused) + 1, 0, _X32_BIT),
        *((_JUMP_IF_EQUAL, len(refused) - index, 0, number) for index, number in enumerate(refused)),
        (_JUMP_ALWAYS, 0, 0, 1),
        _REFUSE,
        *by_argument,
        (_RETURN, 0, 0, _ALLOW),
    ]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    program = _Program(len(code), packed)
    arguments = (_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(program))
    if library.syscall(numbers[_SECCOMP], *arguments) != 0:  # more than 0 is a thread that has other rights
        raise _refused("seccomp")


def _if_called(number: int, block: list[_Instruction]) -> list[_Instruction]:
    """Execute the block, which ends with a return, for one system call, whose number is loaded."""
    return [(_JUMP_IF_EQUAL, 0, len(block), number), *block]


def _allow_only(argument: int, jump: int, value: int) -> list[_Instruction]:
    return [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * argument), (jump, 0, 1, value), (_RETURN, 0, 0, _ALLOW), _REFUSE]


def _refuse_only(argument: int, values: tuple[int, ...]) -> list[_Instruction]:
    tests = [(_JUMP_IF_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * argument), *tests, (_RETURN, 0, 0, _ALLOW), _REFUSE]


def _forbid_writing_outside(library: ctypes.CDLL, writable: Path) -> None:
    version = library.syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        return  # the kernel has no Landlock, or it is turned off
    changes = sum(rights for since, rights in _CHANGES.items() if version >= since)
    attributes = ctypes.c_uint64(changes)
    ruleset = library.syscall(_LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        raise _refused("Landlock")
    directory = os.open(writable, os.O_PATH)
    try:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", changes & _ALLOWED_INSIDE, directory))
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
        f"the kernel refuses {what} ({reason}), without which the process that reads untrusted files cannot drop "
        "its privileges; convert them on another machine, or in a container that allows it"
    )
