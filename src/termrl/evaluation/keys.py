"""The key for an endpoint: from a variable or a file, and only for the host that it is for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from termrl.errors import ConfigError
from termrl.evaluation.config import PolicyConfig

OPENAI_HOST, OPENAI_VARIABLE = "api.openai.com", "OPENAI_API_KEY"

_MAX_BYTES = 16384


def api_key(policy: PolicyConfig, environ: Mapping[str, str]) -> str | None:
    """The key that goes to ``policy.base_url``.

    A variable or a file that the settings name is meant for that endpoint. ``OPENAI_API_KEY`` is taken by itself for
    OpenAI's own host alone; any other endpoint gets no key that was not named for it.

    Raises:
        ConfigError: what is named is not there, or is no key; the text never holds any of it.
    """
    if policy.base_url is None:
        return None
    if policy.api_key_env is not None:
        key, source = environ.get(policy.api_key_env, ""), f"${policy.api_key_env}"
        if not key.strip():
            raise ConfigError(f"policy.api_key_env: {source} is not set", hint="give the variable's name, not the key")
    elif policy.api_key_file is not None:
        key, source = _read(policy.api_key_file), str(policy.api_key_file)
    else:
        parts = urlsplit(policy.base_url)
        if parts.scheme != "https" or parts.hostname != OPENAI_HOST or not environ.get(OPENAI_VARIABLE):
            return None
        key, source = environ[OPENAI_VARIABLE], f"${OPENAI_VARIABLE}"
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{source}: not a key: one line of plain characters is expected")
    return key


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("ascii")
    except OSError as error:
        raise ConfigError(f"policy.api_key_file: {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"policy.api_key_file: {path}: not a key") from None
