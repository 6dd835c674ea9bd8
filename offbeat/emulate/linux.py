"""Linux system calls that Python 3.11 lacks; failures raise OSError.

As a program, `python -I -S linux.py PID NAMESPACES PROGRAM…`, it starts a rank's program inside its host (`enter`). It
imports nothing of Offbeat and little else, so that a rank starts in milliseconds.
"""

import ctypes
import os
import signal
import sys
from functools import cache

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15


def call(function: str, *arguments: object) -> None:
    """Calls the C library: `unshare` makes namespaces, `setns` enters the one of an open /proc/<pid>/ns file."""
    if getattr(_libc(), function)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")


def prctl(option: int, value: int | bytes) -> None:
    """Changes an attribute of this process, such as the name that ps shows (15 characters of it)."""
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    zero = ctypes.c_ulong(0)
    call("prctl", option, argument, zero, zero, zero)


def die_with(parent: int) -> None:
    """Kills this process as soon as the thread that forked it ends; ends it now if the parent is already gone."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def enter_user_namespace() -> None:
    """Moves this process into a user namespace in which it may build networks; user and group stay what they are."""
    user, group = os.geteuid(), os.getegid()
    call("unshare", CLONE_NEWUSER)
    for name, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as stream:
            stream.write(content)


def enter(pid: str, names: str, *argv: str) -> None:
    """Joins the named namespaces of a process and becomes a program in them."""
    folder = os.getcwd()
    for namespace in [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names.split(",")]:
        call("setns", namespace, 0)
    # Entering a mount namespace leads to its root.
    os.chdir(folder)
    # What Python ignores, or a shell that started it in the background, must not reach the program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(argv[0], argv)


def replace_hosts_file(content: str) -> None:
    """Gives the calling process's new mount namespace an /etc/hosts of its own.

    The text lives in a memory file system that is mounted over /tmp only while the file is bound, so that nothing of it
    is ever on disk.
    """
    call("mount", b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)
    call("mount", b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(0), b"size=64k")
    try:
        with open("/tmp/hosts", "w") as stream:
            stream.write(content)
        call("mount", b"/tmp/hosts", b"/etc/hosts", None, ctypes.c_ulong(_MS_BIND), None)
    finally:
        call("umount2", b"/tmp", _MNT_DETACH)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    enter(*sys.argv[1:])
