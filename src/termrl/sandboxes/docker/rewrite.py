"""The Dockerfile that is really built: other base images, and an extra certificate authority for its RUN steps.

The task's own Dockerfile stays as it is; what is changed goes into a temporary one. The certificates are there only
while a step runs (a mount, and variables that a build alone has), so the image is the same with and without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from termrl.tasks.dockerfile import assigned, fill_variables, instructions

CA_SECRET = "termrl-ca"
APT_SECRET = "termrl-apt"
# In /dev, which a build's container has of its own: a mount elsewhere leaves an empty file behind in the image.
CA_FILE = "/dev/termrl-ca.pem"
APT_FILE = "/dev/termrl-apt.conf"
APT_CONFIG = f'Acquire::https::CaInfo "{CA_FILE}";\n'

_CA_VARIABLES = {
    "SSL_CERT_FILE": CA_FILE,
    "CURL_CA_BUNDLE": CA_FILE,
    "REQUESTS_CA_BUNDLE": CA_FILE,
    "PIP_CERT": CA_FILE,
    "GIT_SSL_CAINFO": CA_FILE,
    "NODE_EXTRA_CA_CERTS": CA_FILE,
    "APT_CONFIG": APT_FILE,
}
_MOUNTS = "".join(
    f" --mount=type=secret,id={name},target={target},mode=0444"
    for name, target in ((CA_SECRET, CA_FILE), (APT_SECRET, APT_FILE))
)
_FROM_FLAG = re.compile(r"(?<=from=)[^\s,\\]+")
_RUN = re.compile(r"^(\s*RUN)(?=\s|\\|$)", re.IGNORECASE)


def rewrite(text: str, *, alias: Callable[[str], str], ca: bool) -> tuple[str, tuple[str, ...]]:
    """Put aliases in the place of images, and with ``ca`` let RUN steps see the extra certificates.

    Args:
        text: a Dockerfile.
        alias: the image to use where another is named.
        ca: whether the secrets :data:`CA_SECRET` and :data:`APT_SECRET` will be there.

    Returns:
        The new text (the same where there is nothing to change) and the images that were put into it.
    """
    lines = text.split("\n")
    variables: dict[str, str] = {}
    stages: set[str] = set()
    used: list[str] = []
    in_stage = False

    def image(named: str) -> str:
        filled = fill_variables(named.strip("\"'"), variables)
        if filled.lower() in stages or filled.isdigit() or filled == "scratch" or "$" in filled:
            return named
        target = alias(filled)
        if target == filled:
            return named
        used.append(target)
        return target

    for instruction in instructions(text):
        words = instruction.rest.split()
        if instruction.word == "ARG" and not in_stage:
            variables.update(assigned(instruction.rest, variables))
        elif instruction.word == "FROM":
            in_stage = True
            flags = [word for word in words if word.startswith("--")]
            names = words[len(flags) :]
            if not names:
                continue
            base = image(names[0])
            if len(names) == 3:
                stages.add(names[2].lower())
            if base == names[0] and not ca:
                continue
            line = " ".join(["FROM", *flags, base, *names[1:]])
            if ca:
                line += "".join(f"\nARG {name}={value}" for name, value in _CA_VARIABLES.items())
            _replace(lines, instruction.start, instruction.end, line)
        elif instruction.word in ("COPY", "ADD", "RUN"):
            # Only a leading flag can name an image; a command's own words stay as they are.
            for at in range(instruction.start, instruction.end):
                flagged = instruction.word != "RUN" or "--mount=" in lines[at]
                if flagged and "from=" in lines[at]:
                    lines[at] = _FROM_FLAG.sub(lambda found: image(found[0]), lines[at])
            if ca and instruction.word == "RUN":
                lines[instruction.start] = _RUN.sub(rf"\g<1>{_MOUNTS}", lines[instruction.start])
    return "\n".join(lines), tuple(dict.fromkeys(used))


def has_heredoc(text: str) -> bool:
    """Whether a Dockerfile holds a heredoc, which older builders do not know."""
    return any(instruction.heredoc for instruction in instructions(text))


def _replace(lines: list[str], start: int, end: int, line: str) -> None:
    """One line in the place of several, without moving those that follow."""
    lines[start] = line
    for at in range(start + 1, end):
        lines[at] = ""
