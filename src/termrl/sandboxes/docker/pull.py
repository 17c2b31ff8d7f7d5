"""Pulling an image: bounded tries with back-off, and errors that say what the registry said."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import docker
import docker.auth
import docker.errors
import requests.exceptions

from termrl.errors import ImageError, RateLimitError
from termrl.sandboxes.docker.image_settings import ImageSettings
from termrl.sandboxes.docker.references import split

CLOSING = "the sandboxes are being closed"

_CONNECT_S = 10.0
_MAX_BACKOFF_S = 60.0
_RATE_LIMIT = re.compile(r"toomanyrequests|too many requests|\b429\b|rate limit", re.IGNORECASE)
# What another try cannot change.
_FINAL = re.compile(
    r"manifest unknown|not found|access denied|unauthorized|authentication required|forbidden|no matching manifest"
    r"|invalid reference|no such image|does not exist|unsupported|no space left on device",
    re.IGNORECASE,
)


def is_rate_limit(said: str) -> bool:
    """Whether a registry's or a daemon's words are those of a rate limit."""
    return _RATE_LIMIT.search(said) is not None


def rate_limited(what: str, said: str) -> RateLimitError:
    """The error for an image that a registry does not give out for now."""
    return RateLimitError(
        f"{what}: the registry's rate limit is reached: {one_line(said)}",
        hint="log in (docker login), wait, or name a mirror's image in [images.aliases]",
    )


def pull(
    client: docker.DockerClient,
    reference: str,
    settings: ImageSettings,
    *,
    wait: Callable[[float], bool],
) -> None:
    """Pull ``reference`` into the daemon.

    Args:
        wait: waits so many seconds; true when the caller is closing, which ends the pull.

    Raises:
        RateLimitError: the registry's limit was met at the last try.
        ImageError: it could not be pulled, with the daemon's words; or the caller is closing.
    """
    deadline = time.monotonic() + settings.pull_timeout_s
    said = ""
    tries = 0
    for tries in range(1, settings.pull_attempts + 1):
        try:
            said = _try_pull(client, reference, settings, deadline=deadline, wait=wait)
        except requests.exceptions.RequestException as error:
            said = f"the daemon gave no sign for {settings.pull_stall_s:g} s" if _stalled(error) else str(error)
        if not said:
            return
        if _FINAL.search(said) and not is_rate_limit(said):
            break
        pause = min(settings.pull_backoff_s * 2 ** (tries - 1), _MAX_BACKOFF_S) * random.uniform(0.8, 1.2)
        if tries == settings.pull_attempts or time.monotonic() + pause >= deadline:
            break
        if wait(pause):
            raise ImageError(f"image {reference}: not pulled: {CLOSING}")
    what = f"image {reference} was not pulled" + (f" in {tries} tries" if tries > 1 else "")
    if is_rate_limit(said):
        raise rate_limited(what, said)
    raise ImageError(f"{what}: {one_line(said)}", hint=_hint(said, settings))


def _try_pull(
    client: docker.DockerClient,
    reference: str,
    settings: ImageSettings,
    *,
    deadline: float,
    wait: Callable[[float], bool],
) -> str:
    """One try; what went wrong, in the daemon's words, or an empty text."""
    repository, tag = split(reference)
    api = client.api
    params = {"fromImage": repository, "tag": tag}
    if settings.platform is not None:
        params["platform"] = settings.platform
    registry, _ = docker.auth.resolve_repository_name(repository)
    header = docker.auth.get_config_header(api, registry)
    with api.post(
        f"{api.base_url}/v{api.api_version}/images/create",
        params=params,
        headers={"X-Registry-Auth": header} if header else {},
        stream=True,
        timeout=(_CONNECT_S, settings.pull_stall_s),
    ) as response:
        if response.status_code >= 400:
            return _message(response.text)
        for event in _events(response):
            if "error" in event:
                return str(event["error"])
            if wait(0):
                raise ImageError(f"image {reference}: not pulled: {CLOSING}")
            if time.monotonic() > deadline:
                return f"stopped after {settings.pull_timeout_s:g} s"
    return ""


def _events(response: requests.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.strip():
            yield json.loads(line)


def _message(body: str) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.strip() or "no reason given"


def _stalled(error: requests.exceptions.RequestException) -> bool:
    return isinstance(error, requests.exceptions.ReadTimeout) or "timed out" in str(error).lower()


def _hint(said: str, settings: ImageSettings) -> str | None:
    lowered = said.lower()
    if "no matching manifest" in lowered:
        return "the image is for another architecture; [images] platform asks for one (needs emulation)"
    if "denied" in lowered or "unauthorized" in lowered or "authentication" in lowered:
        return "is the name right? a private image needs docker login"
    if "no space left" in lowered:
        return "free some of the daemon's disk: docker system df, docker image prune"
    if settings.pull_attempts > 1 and ("timeout" in lowered or "dial tcp" in lowered or "no such host" in lowered):
        return "does this machine reach the registry? an image that is here already can be named in [images.aliases]"
    return None


def one_line(said: str) -> str:
    """The daemon's words in one line of bounded length."""
    line = " ".join(said.split())
    return line if len(line) <= 400 else f"{line[:400]}…"
