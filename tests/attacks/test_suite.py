"""The whole suite against tasks of three kinds: no attack is paid, and the honest solution is, on every backend."""

from __future__ import annotations

import asyncio
import tempfile
from functools import cache
from pathlib import Path

import pytest

from termrl.attacks import ATTACKS, AttackResult, TaskProof, chosen, prove
from termrl.errors import ConfigError
from tests.attacks.backends import open_backend
from tests.attacks.kinds import IMAGE_KINDS, KINDS, attacks_on

# one test of a kind plays its whole suite
pytestmark = pytest.mark.timeout(600)

CASES = [(kind, attack.name) for kind in KINDS for attack in attacks_on(kind)]
# Those that hang the tests take all of the time that the tests have; the others may need it on a busy machine.
VERIFY_S = {kind: 8.0 if any(attack.hangs for attack in attacks_on(kind)) else 60.0 for kind in (*KINDS, *IMAGE_KINDS)}
USABLE = [attack.name for attack in attacks_on("shell") if not attack.spoils]


@cache
def proof_of(backend: str, kind: str, then_solve: bool = False) -> TaskProof:
    """The suite against a task of ``kind``, run once and for all tests."""

    async def run() -> TaskProof:
        with tempfile.TemporaryDirectory(prefix="termrl-test-") as folder:
            task = {**KINDS, **IMAGE_KINDS}[kind](Path(folder))
            async with open_backend(backend) as provider:
                (proof,) = await prove(
                    {task.id: task}, provider, attacks_on(kind), slots=8, verify_s=VERIFY_S[kind], then_solve=then_solve
                )
            assert provider.live == 0
        return proof

    return asyncio.run(run())


def result_of(proof: TaskProof, name: str) -> AttackResult:
    (result,) = [result for result in proof.results if result.attack.name == name]
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_an_untouched_task_gives_0_and_its_own_solution_1_without_a_signal(backend: str, kind: str) -> None:
    proof = proof_of(backend, kind)
    assert not proof.unfit, proof.unfit
    assert proof.oracle is not None and (proof.oracle.reward, proof.oracle.signals) == (1.0, {}), proof.oracle


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}-{name}" for kind, name in CASES])
def test_an_attack_scores_0_and_the_honest_solution_1(backend: str, kind: str, name: str) -> None:
    proof = proof_of(backend, kind)
    assert proof.oracle is not None and proof.oracle.reward == 1.0, proof.oracle
    result = result_of(proof, name)
    assert result.verdict is not None and result.verdict.reward == 0.0, result.as_json()


@pytest.mark.usefixtures("docker_required")
@pytest.mark.parametrize("name", [attack.name for attack in attacks_on("installed")])
def test_an_attack_on_a_system_with_its_own_pytest_scores_0(name: str) -> None:
    proof = proof_of("docker", "installed")
    assert proof.oracle is not None and (proof.oracle.reward, proof.oracle.signals) == (1.0, {}), proof.oracle
    result = result_of(proof, name)
    assert result.verdict is not None and result.verdict.reward == 0.0, result.as_json()


@pytest.mark.parametrize("name", USABLE)
def test_an_honest_solution_after_an_attack_still_scores_1(backend: str, name: str) -> None:
    result = result_of(proof_of(backend, "shell", True), name)
    assert result.verdict is not None and result.verdict.reward == 1.0, result.as_json()


def test_names_are_unique_and_each_attack_says_what_it_tries() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert all(attack.what and attack.turns for attack in ATTACKS)


def test_attacks_are_chosen_by_name_or_group_and_a_wrong_one_is_named() -> None:
    assert [attack.name for attack in chosen(["curlrc", "prewritten-reward"])] == ["prewritten-reward", "curlrc"]
    assert {attack.group for attack in chosen(["python"])} == {"python"}
    assert chosen([]) == ATTACKS
    with pytest.raises(ConfigError, match="curlrcc") as caught:
        chosen(["curlrcc"])
    assert "curlrc?" in (caught.value.hint or "")
