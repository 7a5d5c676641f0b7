"""Landlock: a process gives up access to files, and to processes outside of its own domain.

Linux's Landlock lets any process restrict itself and those that it starts, for good. Nothing may be
opened below paths that no rule names; files that are already open stay so. Each version of its
interface (`abi`) can restrict more; what a kernel does not know stays permitted. Used by system
calls, since neither Python nor the C library has functions for them.
"""

import ctypes
import os
import stat
from collections.abc import Iterable
from glob import glob

LEAST_ABI = 3  # the first that forbids to truncate files
SIGNAL_ABI = 6
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
# Access rights, from linux/landlock.h.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_DEVICES = 1 << 6 | 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of rights by ABI
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_DEVICE = _READ_FILE | _WRITE_FILE | _READ_DIR | _IOCTL_DEV
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
# Programs, libraries and what they read about the machine. No configuration of services, which may
# contain passwords. /proc shows memory and environment of processes of the same domain only.
_SYSTEM = (
    "/usr/bin", "/usr/sbin", "/usr/lib*", "/usr/libexec", "/usr/share", "/usr/local/bin",
    "/usr/local/lib*", "/usr/local/share", "/usr/local/cuda*", "/bin", "/sbin", "/lib*", "/proc",
    "/sys", "/etc/ld.so.*", "/etc/localtime", "/etc/timezone", "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/pki/ca-trust", "/etc/ca-certificates",
    "/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/gai.conf", "/etc/nsswitch.conf",
    "/etc/passwd", "/etc/group", "/etc/protocols", "/etc/services", "/etc/mime.types",
    "/etc/alternatives", "/etc/fonts", "/etc/OpenCL", "/etc/vulkan",
)  # fmt: skip
_DEVICES = (
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/nvidia*",
    "/dev/dri", "/dev/kfd", "/dev/dxg",
)  # fmt: skip


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """The version of Landlock's interface in this kernel; 0 without Landlock."""
    found = ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, 0, _VERSION)
    return max(int(found), 0)


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process, which must have no_new_privs, to the system and these paths.

    `writable` paths may be read, too. Outside of them, from `SIGNAL_ABI` on, it may signal only
    what it has started. Raises `OSError`, also for a path that does not exist.
    """
    version = abi()
    rights = (1 << _RIGHTS.get(version, _RIGHTS[5])) - 1
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= SIGNAL_ABI else 0
    attributes = _Ruleset(rights, 0, scoped)
    size = ctypes.sizeof(attributes) if version >= SIGNAL_ABI else 8
    ruleset = _call(_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    try:
        for paths, access in ((_SYSTEM, _READ), (_DEVICES, _DEVICE)):
            for path in {found for pattern in paths for found in glob(pattern)}:
                _permit(ruleset, path, access & rights)
        for path in readable:
            _permit(ruleset, path, _READ & rights)
        for path in writable:
            _permit(ruleset, path, rights & ~_MAKE_DEVICES)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _permit(ruleset: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            access &= _OF_FILES
        rule = _PathBeneath(access, descriptor)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *given: object) -> int:
    result = int(ctypes.CDLL(None, use_errno=True).syscall(number, *given))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
