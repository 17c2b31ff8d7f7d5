"""What a policy session gives to a trainer: :class:`Segment`, exact token for token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """One unbroken token sequence of a policy session (several when the session branched).

    The four lists have the same length: one entry a token, prompt and completion together.

    Attributes:
        session_id: the policy session that it comes from.
        token_ids: vocabulary ids, exactly those the engine was given and sampled.
        loss_mask: 1 on tokens that the policy sampled, 0 elsewhere.
        logprobs: natural-log probability under the sampling distribution where sampled, 0.0 elsewhere.
        policy_versions: the weights' version that sampled the token, -1 where not sampled.
        temperature: the sampling temperature of every sampled token in it.
        turns: number of generated turns in it.
    """

    session_id: str
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    temperature: float
    turns: int

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if not (len(self.loss_mask) == len(self.logprobs) == len(self.policy_versions) == n):
            raise ValueError("token_ids, loss_mask, logprobs and policy_versions must have one length")

    @property
    def sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(self.loss_mask)
