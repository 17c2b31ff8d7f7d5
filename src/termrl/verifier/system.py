"""Undoing what a policy changed of the system that tests run on, where a sandbox lets it change that.

Shells, basic programs, interpreters, the tools that tests download with, the loader and the libraries that the image
has are put back as the image has them. What the policy added stays, but for what would run inside other programs:
start-up modules of Python, plugins of pytest, compiled modules, libraries that come before the system's own. So an
honest installation of a package stands, and a replaced shell does not.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from termrl.errors import CommandError
from termrl.sandboxes.base import ChangedFiles, Sandbox
from termrl.verifier.signals import below

_BASIC_NAMES = """
[ apk apt apt-cache apt-config apt-get apt-key apt-mark ar arch awk b2sum base32 base64 basename bash busybox bzip2
cat chgrp chmod chown chroot cksum clear cmp comm cp csplit curl cut dash date dd df diff dir dirname dnf dpkg
dpkg-deb dpkg-query du echo egrep env expand expr factor false fgrep file find flock fold gawk getent getopt git gpg
gpgv grep groups gunzip gzip head hostname id install join jq kill ldconfig ldd less link ln logname ls lsof make
mawk md5sum microdnf mkdir mkfifo mktemp more mv nc netstat nice nl node nohup npm nproc npx numfmt od openssl paste
patch perl pgrep pidof pip pip3 pipx pkill pr printenv printf ps ptx pwd py.test pytest python python3 readlink
realpath rm rmdir rpm ruby run-parts script sed seq setsid sh sha1sum sha224sum sha256sum sha384sum sha512sum shred
shuf sleep sort split ss stat stdbuf strace stty su sudo sum sync tac tail tar tee test time timeout touch tr true
truncate tsort tty uname unexpand uniq unlink unshare unxz unzip uptime uv uvx vdir wait-for-it wc wget whereis
which who whoami xargs xxd xz yes yum zcat zip zstd
"""
_BASIC = frozenset(_BASIC_NAMES.split())
_BASIC_PATTERNS = ("python3.[0-9]*", "pip3.[0-9]*", "perl5*", "ld.so", "ldconfig.real", "ld-linux*")
_SYSTEM_FOLDERS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin")
_LIBRARY_FOLDERS = ("lib", "lib32", "lib64", "libx32", "libexec")
_ETC = (
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/nsswitch.conf",
    "/etc/ssl/openssl.cnf",
    "/etc/perl",
)
_ETC_PATTERNS = ("/etc/python3*", "/etc/python3*/*", "/etc/ld-musl-*.path")
_TOOL_PACKAGES = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "pip", "pytest.py", "_pytest.py", "pluggy.py"})
_TOOL_METADATA = re.compile(r"(?:pytest|pluggy|iniconfig)-[0-9].*\.(?:dist|egg)-info")
_HOOKS = frozenset({"sitecustomize", "usercustomize"})
_SITE = ("site-packages", "dist-packages")
_CACHE = "/etc/ld.so.cache"
# For sed: lines of a .pth file that are run, and the section that names plugins of pytest.
_START_CODE = r"/import[ \t]/d"
_PLUGINS = r"/^\[ *pytest11/,/^\[/{/^\[ *pytest11/d;/^\[/!d}"
_COMMAND_S = 60.0

# Only programs that were put back run here. A new cache of libraries counts if it leads to the same file for every
# name that the image's own cache knows.
_RENEW_CACHE = """\
type ldconfig >/dev/null 2>&1 || exit 0
read_cache() {
  local -n cache=$1
  local name rest key
  while read -r name rest; do
    [[ $rest = *" => "* ]] || continue
    key="$name ${rest%% =>*}"
    [ -n "${cache[$key]}" ] || cache[$key]=${rest##*=> }
  done <<<"$(ldconfig -p)"
}
declare -A before after
read_cache before
ldconfig -i 2>/dev/null || exit 3
read_cache after
for key in "${!before[@]}"; do [ "${before[$key]}" = "${after[$key]}" ] || exit 3; done
"""


@dataclass(frozen=True)
class Undone:
    """What was put back as the image has it, and what was taken away."""

    restored: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()


def is_basic(name: str) -> bool:
    """Whether tests of any task could run a program of this name."""
    return name in _BASIC or any(fnmatch.fnmatchcase(name, pattern) for pattern in _BASIC_PATTERNS)


@dataclass(frozen=True)
class System:
    """Where the programs, libraries and Python modules of a sandbox's system are.

    Attributes:
        folders: of programs.
        prefixes: above them, such as ``/usr``; the root is an empty text.
    """

    folders: frozenset[str]
    prefixes: frozenset[str]

    @classmethod
    def of(cls, search_path: str) -> System:
        """The system whose programs are found by ``search_path``."""
        folders = {folder.rstrip("/") for folder in search_path.split(":") if folder.startswith("/")}
        folders.update(_SYSTEM_FOLDERS)
        above = {posixpath.dirname(folder) for folder in folders if posixpath.basename(folder) in ("bin", "sbin")}
        return cls(frozenset(folders), frozenset(prefix.rstrip("/") for prefix in above))

    def libraries(self) -> list[str]:
        """The folders of libraries."""
        return [f"{prefix}/{name}" for prefix in sorted(self.prefixes) for name in _LIBRARY_FOLDERS]

    def in_python(self, path: str) -> tuple[str, ...] | None:
        """The parts of ``path`` below a folder of Python's modules; ``None`` if it is in none."""
        for library in self.libraries():
            if path.startswith(f"{library}/python3"):
                _, *parts = path[len(library) + 1 :].split("/")
                return tuple(parts)
        return None

    def wanted(self, changed: ChangedFiles) -> set[str]:
        """What of ``changed`` must be as the image has it."""
        roots = {*self.folders, *self.libraries(), *(prefix for prefix in self.prefixes if prefix)}
        wanted = set()
        for path in changed.paths:
            python = self.in_python(path)
            is_way = path in changed.links and any(below(root, path) for root in roots)
            if python is not None and not is_way:
                if path not in changed.folders:
                    compiled = path.endswith(".pyc")
                    wanted.add(path if compiled else self._package(path, python) or path)
            elif is_way or self._runs_with_everything(path):
                wanted.add(path)
        return wanted

    def _runs_with_everything(self, path: str) -> bool:
        folder, name = posixpath.split(path)
        if below(path, *_ETC) or any(fnmatch.fnmatchcase(path, pattern) for pattern in _ETC_PATTERNS):
            return True
        if folder in self.folders or below(path, "/etc/alternatives"):
            return is_basic(name)
        return below(path, *self.libraries()) and (".so" in name or name.startswith(("ld-", "gconv-modules")))

    def _package(self, path: str, parts: Sequence[str]) -> str | None:
        """The whole package to put back, if ``path`` is in one that tests run with."""
        for index, part in enumerate(parts[:-1]):
            if part in _SITE and parts[index + 1] in _TOOL_PACKAGES:
                return "/".join([*path.split("/")[: len(path.split("/")) - len(parts)], *parts[: index + 2]])
        return None

    def unwanted(self, path: str) -> bool:
        """Whether ``path``, which the image does not have, would run inside programs that tests run."""
        name = posixpath.basename(path)
        stem = name.removesuffix(".py")
        if name == "pyvenv.cfg":
            return posixpath.dirname(path) in {*self.folders, *self.prefixes}
        if "/glibc-hwcaps/" in path or ("/etc/ld-musl-" in path and name.endswith(".path")):
            return True
        if any(fnmatch.fnmatchcase(path, f"{library}/python3*.zip") for library in self.libraries()):
            return True
        parts = self.in_python(path)
        if parts is None:
            return below(path, "/etc") and stem in _HOOKS
        if name.endswith(".pyc") or stem in _HOOKS:
            return True
        first = next((index + 1 for index, part in enumerate(parts) if part in _SITE), 0)
        if len(parts) <= first:
            return False
        return parts[first] in _TOOL_PACKAGES or bool(_TOOL_METADATA.fullmatch(parts[first]))


async def undo(sandbox: Sandbox, changed: ChangedFiles) -> Undone:
    """Put back and take away what tests must not run on. The policy's processes must be gone.

    Raises:
        CommandError: the files of the sandbox cannot be changed.
        OSError: so it is.
        SandboxLostError: the sandbox died, or its image cannot be read.
    """
    if not sandbox.system_is_writable:
        return Undone()
    system = System.of(sandbox.search_path)
    wanted = system.wanted(changed)
    packages = [path for path in wanted if posixpath.basename(path) in _TOOL_PACKAGES]
    # A new folder is found by what is in it.
    files = [path for path in changed.paths if path not in changed.folders]
    new = [path for path in files if path not in wanted and system.unwanted(path)]
    if new or packages:
        await sandbox.remove([*new, *packages])
    restored = await sandbox.restore(sorted(wanted)) if wanted else frozenset[str]()
    added = [path for path in wanted - restored if system.unwanted(path)]
    if added:
        await sandbox.remove(added)
    await _disarm(sandbox, system, [path for path in changed.paths if path not in restored])
    if any(below(path, *_ETC[:3]) for path in changed.paths):
        await _renew_cache(sandbox)
    return Undone(restored, frozenset([*new, *added]))


async def _disarm(sandbox: Sandbox, system: System, paths: Iterable[str]) -> None:
    """Take the code out of new .pth files, and the plugins of pytest out of new packages."""
    python = [path for path in paths if system.in_python(path) is not None]
    start = [path for path in python if path.endswith(".pth")]
    plugins = [path for path in python if posixpath.basename(path) == "entry_points.txt"]
    script = ""
    for expression, files in ((_START_CODE, start), (_PLUGINS, plugins)):
        for begin in range(0, len(files), 500):
            some = " ".join(map(shlex.quote, files[begin : begin + 500]))
            script += f"sed -i {shlex.quote(expression)} -- {some}\n"
    if script:
        result = await sandbox.exec(script, timeout_s=_COMMAND_S, cwd="/", clean_env=True)
        if result.timed_out:
            raise CommandError("start-up files of Python cannot be read")


async def _renew_cache(sandbox: Sandbox) -> None:
    """Let libraries be found that the policy installed, unless some would come before the image's own."""
    result = await sandbox.exec(_RENEW_CACHE, timeout_s=_COMMAND_S, cwd="/", clean_env=True)
    if result.exit_code != 0:
        await sandbox.restore([_CACHE])
