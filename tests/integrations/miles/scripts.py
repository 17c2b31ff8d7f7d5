"""A policy that follows a script, behind the real session server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenizers import Tokenizer

from termrl.capture.upstreams import FinishReason, GenerateRequest, GenerateResult
from tests.capture.fakes import FakeUpstream

MAKE_APPLE = "```bash\nmkdir apple\n```"
LOOK = "```bash\nls\n```"
DONE = "TASK_COMPLETE"


class ScriptedUpstream(FakeUpstream):
    """Gives each session the same replies, turn by turn; the last one again and again.

    A reply is text, text with a finish reason, or an exception.
    """

    def __init__(
        self, tokenizer: Tokenizer, script: Sequence[str | tuple[str, FinishReason] | Exception], **options: int
    ) -> None:
        super().__init__(tokenizer, **options)
        self._script = script
        self._turns: Counter[str] = Counter()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        turn = self._turns[request.session_id]
        self._turns[request.session_id] += 1
        reply = self._script[min(turn, len(self._script) - 1)]
        self.finish = reply[1] if isinstance(reply, tuple) else None
        self.replies = [reply[0] if isinstance(reply, tuple) else reply]
        return await super().generate(request)
