"""A scripted policy and an environment whose faults can be chosen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from termrl.agent.types import Message, Reply
from termrl.environment.protocol import Action, Environment, Observation, State
from termrl.verifier.verdict import HARNESS, Cause, Outcome, Verdict

PASSED = Verdict(outcome=Outcome.PASSED, raw_reward=1.0)
FAILED = Verdict.zero(Cause.TESTS_FAILED, raw_reward=0.0)


def reply(content: str, finish_reason: str = "stop", **fields: Any) -> Reply:
    message = fields.pop("message", {"role": "assistant", "content": content})
    return Reply(message=message, content=content, finish_reason=finish_reason, **fields)


class ScriptedPolicy:
    """Answers from a list (its last entry again and again); keeps what it was asked."""

    def __init__(self, *answers: str | Reply | Exception | Callable[[], Any]) -> None:
        self._answers = answers
        self.asked: list[list[Message]] = []
        self.max_tokens: list[int] = []
        self.seeds: list[int | None] = []

    async def chat(self, messages: list[Message], *, max_tokens: int, seed: int | None) -> Reply:
        self.asked.append(copy.deepcopy(messages))
        self.max_tokens.append(max_tokens)
        self.seeds.append(seed)
        answer = self._answers[min(len(self.asked), len(self._answers)) - 1]
        if callable(answer):
            answer = await answer()
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Reply) else reply(answer)


class FakeEnvironment(Environment):
    """Answers each exec from ``outputs`` by command (else by nothing), and evaluate with ``verdict``."""

    def __init__(
        self,
        *,
        verdict: Verdict | Observation | Exception = PASSED,
        outputs: dict[str, Observation | Exception | str] | None = None,
        reset: Observation | Exception | None = None,
        info: dict[str, Any] | None = None,
    ) -> None:
        self._verdict = verdict
        self._outputs = outputs or {}
        self._reset = reset
        self._info = {"command_timeout_s": 20.0, "agent_timeout_sec": None, **(info or {})}
        self.actions: list[Action] = []
        self.closed = 0

    @property
    def commands(self) -> list[str]:
        return [action.command for action in self.actions if action.action_type == "exec"]

    @property
    def evaluations(self) -> int:
        return sum(action.action_type == "evaluate" for action in self.actions)

    async def reset(self, task_id: str, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        if isinstance(self._reset, Exception):
            raise self._reset
        return self._reset or Observation(instruction=f"Do {task_id}.", task_id=task_id, reward=0.0, info=self._info)

    async def step(self, action: Action) -> Observation:
        self.actions.append(action)
        if action.action_type == "evaluate":
            if isinstance(self._verdict, Exception):
                raise self._verdict
            if isinstance(self._verdict, Observation):
                return self._verdict
            info = {"verdict": self._verdict.model_dump(mode="json"), "harness": HARNESS}
            return Observation(reward=self._verdict.reward, done=True, info=info)
        answer = self._outputs.get(action.command, "")
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Observation):
            return answer
        return Observation(output=answer, reward=0.0, info={"exit_code": 0, "duration_s": 0.5})

    def state(self) -> State:
        return State()

    async def close(self) -> None:
        self.closed += 1
