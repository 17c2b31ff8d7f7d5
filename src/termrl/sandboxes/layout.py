"""What a sandbox's file system holds and how bubblewrap is told to make it.

``/`` is one tmpfs of the sandbox's storage size. What the agent must not be able to replace is a mount of its own,
because a mount point can be neither removed nor renamed: ``/usr`` and the folders that are links into it on the
host, ``/etc`` (a filtered copy), an empty ``/etc/ld.so.preload``, ``/logs`` (so that a full disk cannot keep a reward
from being written) and ``/tests`` (a host folder, read-only, empty until the verify window).
"""

from __future__ import annotations

import os
from pathlib import Path

from termrl.sandboxes import archive
from termrl.sandboxes.base import DEFAULT_PATH
from termrl.sandboxes.stage import INSIDE, Stage

BASE_ENV = {
    "PATH": DEFAULT_PATH,
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "DEBIAN_FRONTEND": "noninteractive",
}

_MIB = 1 << 20
_ETC_MB = 16
_LOGS_MB = 16
_SHM_MB = 64

_ETC_MADE = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n",
    "hostname": "sandbox\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n",
    "shells": "/bin/sh\n/bin/bash\n",
    "fstab": "",
}
_ETC_COPIED = (
    "bash.bashrc",
    "bashrc",
    "profile",
    "inputrc",
    "localtime",
    "timezone",
    "os-release",
    "lsb-release",
    "debian_version",
    "redhat-release",
    "ld.so.conf",
    "ld.so.conf.d",
    "login.defs",
    "mime.types",
    "magic",
    "protocols",
    "services",
    "ca-certificates.conf",
    "locale.alias",
)
_ETC_BOUND = ("alternatives", "ssl/certs", "ca-certificates", "pki/tls/certs", "pki/ca-trust", "ld.so.cache")


def host_userland_missing() -> str | None:
    """What a host lacks for its own programs to be used, or ``None``."""
    for program in ("/bin/bash", "/usr/bin/env"):
        if not os.access(program, os.X_OK):
            return f"{program} is missing on this machine"
    return None


def bwrap_arguments(stage: Stage, tests: Path, empty: Path, *, storage_mb: int, label: str) -> list[str]:
    """The command line that starts one sandbox, its resident being the first process.

    Args:
        tests: the host folder that is seen, read-only, as /tests.
        empty: an empty host file.
        label: put on the first process's command line, where a sweep finds it.
    """
    args = [str(stage.bwrap)]
    args += ["--unshare-user", "--uid", "0", "--gid", "0", "--disable-userns"]
    args += ["--unshare-pid", "--as-pid-1", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    args += ["--hostname", "sandbox", "--seccomp", "4"]
    args += ["--new-session", "--die-with-parent", "--cap-drop", "ALL", "--clearenv"]
    args += [*_sized(storage_mb, "/"), "--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        folder = Path("/", name)
        if folder.is_dir():
            args += ["--ro-bind", str(folder.resolve()), str(folder)]
    args += [*_sized(_ETC_MB, "/etc"), *_sized(_LOGS_MB, "/logs")]
    for name in _ETC_BOUND:
        if Path("/etc", name).exists():
            args += ["--ro-bind", str(Path("/etc", name).resolve()), f"/etc/{name}"]
    args += ["--ro-bind", str(empty), "/etc/ld.so.preload"]
    args += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--perms", "1777"]
    args += [*_sized(min(_SHM_MB, storage_mb), "/dev/shm"), "--remount-ro", "/dev"]
    args += ["--ro-bind", str(tests), "/tests", "--ro-bind", str(stage.folder), INSIDE, "--chdir", "/", "--"]
    return [*args, *stage.argv(INSIDE, "resident"), label]


def etc_archive() -> int:
    """A descriptor of a stream with the filtered /etc: made files, and copies of what holds no secret."""
    out = os.memfd_create("etc", os.MFD_CLOEXEC)
    now = int(Path("/etc").stat().st_mtime_ns)
    archive.write_record(out, b"d", 0o755, now, b"")
    for name, text in _ETC_MADE.items():
        archive.write_record(out, b"f", 0o644, now, name.encode(), text.encode())
    for name in _ETC_COPIED:
        path = Path("/etc", name)
        if path.is_dir():
            archive.write_record(out, b"d", 0o755, now, name.encode())
            for entry in sorted(path.iterdir()):
                _copy(out, entry, f"{name}/{entry.name}", now)
        else:
            _copy(out, path, name, now)
    return out


def _copy(out: int, path: Path, name: str, mtime_ns: int) -> None:
    """A regular file that everyone may read, or a link to below /usr; anything else is left out."""
    try:
        if path.is_symlink():
            if str(path.resolve()).startswith("/usr/"):
                target = os.fsencode(path.resolve())
                archive.write_record(out, b"l", 0o777, mtime_ns, name.encode(), target)
        elif path.is_file() and path.stat().st_mode & 0o004:
            archive.write_record(out, b"f", 0o644, mtime_ns, name.encode(), path.read_bytes())
    except OSError:
        return


def _sized(megabytes: int, path: str) -> list[str]:
    return ["--size", str(megabytes * _MIB), "--tmpfs", path]
