"""What an older tbench2 server lacks, supplied by ordinary commands: the workdir, bounds, and scoring by test.sh.

Such a server runs commands in its own folder, loses exit codes, ends no command that runs too long, waits for every
background process and scores by bare pytest. Each command is therefore wrapped in a script that changes to the workdir
first, bounds time and output, and frames status and output between marker lines. The script holds no single quote, in
which these servers wrap it again.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import secrets
from dataclasses import dataclass
from typing import Any

from termrl.environment.protocol import Action, Observation
from termrl.errors import CommandError
from termrl.sandboxes.base import DEFAULT_OUTPUT_LIMIT
from termrl.sandboxes.output import render
from termrl.verifier.bootstrap import bootstrap_failure
from termrl.verifier.reward import RewardFormatError, parse_reward_json, parse_reward_txt
from termrl.verifier.verdict import Cause, Verdict

COMMAND_TIMEOUT_S = 20.0
CHECK_S = 30.0
TESTS_FOUND = "tests found"

_MAX_SCRIPT_BYTES = 120 * 1024  # one argument of a program may be 128 KiB
_KILLED = (124, 137)
_EXTRA_S = 15.0
_TAIL_CHARS = 8 * 1024
_REWARDS = {"reward.json": parse_reward_json, "reward.txt": parse_reward_txt}


@dataclass(frozen=True)
class Ran:
    """What a wrapped command did. ``exit_code`` is ``None`` where the server cut it before it could say."""

    output: str
    truncated_bytes: int
    exit_code: int | None
    timed_out: bool
    duration_s: float


def wrapped(command: str, *, workdir: str, timeout_s: float, marker: str) -> str:
    """The script that runs ``command`` with bash in ``workdir`` (empty: where it is) for so many seconds.

    Raises:
        CommandError: the command is longer than such a server can run.
    """
    encoded = base64.b64encode(command.encode("utf-8", "surrogateescape")).decode("ascii")
    half = DEFAULT_OUTPUT_LIMIT // 2
    script = f"""\
{_change_to(workdir)}termrl_out=$(mktemp) || exit 125
termrl_run=$(echo {encoded} | base64 -d)
(exec timeout -s KILL {math.ceil(timeout_s)} bash -c "$termrl_run" </dev/null >"$termrl_out" 2>&1)
termrl_status=$?
termrl_size=$(($(wc -c <"$termrl_out")))
termrl_half() {{ "$1" -c "$2" <"$termrl_out" | base64 | tr -d "\\n"; }}
termrl_head=$termrl_size termrl_tail=0
if [ "$termrl_size" -gt {2 * half} ]; then termrl_head={half} termrl_tail={half}; fi
echo
echo "{marker} ran $termrl_status $termrl_size"
echo "{marker} head $(termrl_half head "$termrl_head")"
echo "{marker} tail $(termrl_half tail "$termrl_tail")"
echo "{marker} end"
rm -f "$termrl_out"
"""
    if len(script) > _MAX_SCRIPT_BYTES:
        raise CommandError(f"a command of {len(command)} characters is too long for this environment server")
    return script


def in_workdir(command: str, workdir: str) -> str:
    """``command`` with the change to ``workdir`` before it, for one that runs in the background."""
    return _change_to(workdir) + command


def read(text: str, *, marker: str, timeout_s: float, duration_s: float) -> Ran:
    """What :func:`wrapped` printed; text without its marks is that of a command that was cut off."""
    found = re.search(
        rf"^{marker} ran (\d+) (\d+)\r?\n{marker} head ([\w+/=]*)\r?\n{marker} tail ([\w+/=]*)\r?\n{marker} end\r?$",
        text,
        re.MULTILINE | re.ASCII,
    )
    try:
        if found is None:
            raise ValueError
        head, tail = (base64.b64decode(part, validate=True) for part in found.group(3, 4))
        total = max(int(found[2]), len(head) + len(tail))
    except (ValueError, binascii.Error):
        return Ran(text, 0, None, duration_s >= timeout_s, duration_s)
    output, truncated = render(head, tail, total)
    status = int(found[1])
    timed_out = status in _KILLED and duration_s >= timeout_s
    return Ran(output, truncated, None if timed_out else status, timed_out, duration_s)


class LegacyShell:
    """Commands on servers that are not ours, and scoring on older ones.

    Args:
        workdir: where commands and tests run; empty leaves it to the server.
        tests_src: the folder on the server that holds test.sh; only needed to score.
    """

    def __init__(self, *, workdir: str = "", tests_src: str = "") -> None:
        self._workdir = workdir
        self._tests_src = tests_src

    def command(self, action: Action, timeout_s: float) -> tuple[Action, str]:
        """The exec to send for a blocking exec, and the marker to read its answer by.

        Raises:
            CommandError: the command is too long.
        """
        if "\0" in action.command:
            raise CommandError("the command holds a NUL byte")
        marker = _marker()
        script = wrapped(action.command, workdir=self._workdir, timeout_s=timeout_s, marker=marker)
        return action.model_copy(update={"command": script, "wait_seconds": timeout_s + _EXTRA_S}), marker

    def background(self, action: Action) -> Action:
        """The exec to send for one that does not block."""
        return action.model_copy(update={"command": in_workdir(action.command, self._workdir)})

    def observed(self, answer: Observation, ran: Ran, timeout_s: float) -> Observation:
        """``answer`` as an environment of ours would have given it."""
        info = {
            "exit_code": ran.exit_code,
            "timed_out": ran.timed_out,
            "truncated_bytes": ran.truncated_bytes,
            "duration_s": ran.duration_s,
        }
        error = answer.error
        if ran.timed_out:
            error = f"the command timed out after {timeout_s:g} s and was killed"
        elif ran.exit_code is None:
            error = error or "the command was cut off by the environment server"
        fields = {"output": ran.output, "error": error, "success": not error, "info": {**answer.info, **info}}
        return answer.model_copy(update={**fields, "reward": 0.0})

    def check(self) -> tuple[Action, str]:
        """An exec that prints :data:`TESTS_FOUND` if commands run in the workdir and the tests are in their place."""
        return self.command(Action(command=f'[ -f {self._tests_src}/test.sh ] && printf "{TESTS_FOUND}"'), CHECK_S)

    def scoring(self, budget_s: float) -> tuple[Action, str, str]:
        """The exec that scores, the marker of the exec, and that of the two lines which say what the tests said.

        It removes tests and rewards that stand there, stages the tests, and runs them for ``budget_s`` seconds.
        """
        marker = _marker()
        script = f"""\
rm -rf /tests /logs/verifier
mkdir -p /tests /logs/verifier && rm -f /logs/verifier/reward.txt /logs/verifier/reward.json
for reward in /logs/verifier/reward.txt /logs/verifier/reward.json; do
  if [ -e "$reward" ] || [ -L "$reward" ]; then echo "$reward cannot be removed"; exit 1; fi
done
cp -R {self._tests_src}/. /tests/ || exit
timeout -s KILL {math.ceil(budget_s)} bash /tests/test.sh
status=$?
found=none
for name in reward.txt reward.json; do [ -f "/logs/verifier/$name" ] && found=$name; done
printf "\\n%s exit %s\\n" {marker} "$status"
printf "%s %s %s\\n" {marker} "$found" "$(head -c 4097 "/logs/verifier/$found" 2>/dev/null | base64 | tr -d "\\n")"
rm -rf /tests /logs/verifier
"""
        action, outer = self.command(Action(command=script), budget_s + _EXTRA_S)
        return action, outer, marker

    @staticmethod
    def verdict(ran: Ran, marker: str, budget_s: float) -> Verdict:
        """What the scoring exec said: no mark, no reward or one that is no number in [0, 1] is no verdict."""
        lines = re.findall(rf"^{marker} (\S+) ?(.*?)\r?$", ran.output, re.MULTILINE)
        output = re.split(rf"\n{marker} ", ran.output, maxsplit=1)[0]
        evidence: dict[str, Any] = {
            "output_tail": output[-_TAIL_CHARS:],
            "duration_s": ran.duration_s,
            "integrity": "exposed",
        }
        if ran.timed_out:
            return Verdict.missing(Cause.VERIFIER_TIMEOUT, f"the tests did not end in {budget_s:g} s", **evidence)
        if ran.exit_code is None:
            why = f"the environment server cut the scoring off after {ran.duration_s:.0f} s"
            return Verdict.missing(Cause.VERIFIER_CRASH, why, **evidence)
        if len(lines) != 2 or lines[0][0] != "exit" or not lines[0][1].isdecimal():
            return Verdict.missing(Cause.VERIFIER_CRASH, "the scoring did not come to its end", **evidence)
        (_, status), (name, encoded) = lines
        evidence["exit_code"] = int(status)
        if int(status) in _KILLED and ran.duration_s >= budget_s:
            return Verdict.missing(Cause.VERIFIER_TIMEOUT, f"the tests did not end in {budget_s:g} s", **evidence)
        parse = _REWARDS.get(name)
        if parse is None:
            download = bootstrap_failure(output)
            if download is not None:
                return Verdict.missing(Cause.BOOTSTRAP_FAILED, download, **evidence)
            return Verdict.missing(Cause.VERIFIER_CRASH, f"the tests wrote no reward (exit {status})", **evidence)
        try:
            return Verdict.scored(parse(base64.b64decode(encoded, validate=True)), **evidence)
        except (RewardFormatError, binascii.Error) as error:
            return Verdict.missing(Cause.BAD_REWARD, str(error), **evidence)


def _marker() -> str:
    return f"termrl-{secrets.token_hex(12)}"


def _change_to(workdir: str) -> str:
    return f"cd {workdir} || exit 125\n" if workdir else ""
