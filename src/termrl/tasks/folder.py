"""What holds for the files of any task folder: safe links, readable text."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from termrl.errors import TaskError


def check_tree(root: Path) -> None:
    """Refuse a folder whose links leave it or form a cycle, and files that are no files.

    Args:
        root: the task folder, resolved.

    Raises:
        TaskError: names the offending path.
    """

    def visit(directory: Path, ancestors: tuple[Path, ...]) -> None:
        for path in sorted(directory.iterdir()):
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode):
                try:
                    target = path.resolve()
                except (OSError, RuntimeError):
                    raise TaskError(f"{path}: the link leads to itself") from None
                if not target.is_relative_to(root):
                    raise TaskError(
                        f"{path}: the link leaves the task folder ({path.readlink()})",
                        hint="put the file itself into the task",
                    )
                if target.is_dir():
                    if target in ancestors:
                        raise TaskError(f"{path}: the link leads back to a folder that contains it")
                    visit(target, (*ancestors, target))
            elif stat.S_ISDIR(mode):
                visit(path, (*ancestors, path))
            elif not stat.S_ISREG(mode):
                raise TaskError(f"{path}: neither a file, a folder nor a link (a pipe, socket or device)")

    visit(root, (root,))


def read_text(path: Path) -> str:
    """The text of a UTF-8 file with line ends as ``\\n`` and no byte order mark.

    Raises:
        TaskError: it is missing, not a file, or not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise TaskError(f"{path}: missing") from None
    except IsADirectoryError:
        raise TaskError(f"{path}: a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: not UTF-8 text (byte {error.start})") from None


def entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every entry below ``folder`` as (relative POSIX path, path), sorted, links not followed."""
    for path in sorted(folder.iterdir()):
        yield path.relative_to(folder).as_posix(), path
        if path.is_dir() and not path.is_symlink():
            for name, below in entries(path):
                yield f"{path.name}/{name}", below
