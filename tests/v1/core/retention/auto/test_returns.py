"""Coarse checkpoints are judged by what they give back for their memory."""

from vllm.v1.core.retention.auto.returns import Returns
from vllm.v1.core.retention.policy import ASKED_FOR, COARSE


def serve(returns: Returns, prompt: int, hit: int, kind: int | None) -> None:
    """One prompt that resumes behind ``hit`` tokens, and leaves two checkpoints."""
    returns.note_prompt(prompt)
    if hit:
        returns.note_hit(kind, hit)
    returns.note_made(ASKED_FOR)
    returns.note_made(COARSE)


def test_they_are_believed_in_until_enough_were_made() -> None:
    returns = Returns(2000.0)
    for number in range(64):
        assert not returns.has_coarse_failed, number
        serve(returns, 5000, 4000, ASKED_FOR)
    assert returns.has_coarse_failed


def test_where_hits_are_rare_a_few_of_them_pay() -> None:
    # 100 of 1,000 prompts of 12,000 tokens resume, half of them at coarse checkpoints:
    # 50 * 10,000 tokens for 1,000 * 2,000, against 1,000,000 for 15,000,000.
    returns = Returns(2000.0)
    for number in range(1000):
        hit = 0 if number % 10 else 10_000
        serve(returns, 12_000, hit, ASKED_FOR if number % 20 else COARSE)
    assert not returns.has_coarse_failed


def test_where_most_resume_elsewhere_a_few_do_not() -> None:
    # One of 20 resumes at a coarse one, all others where a prompt ended.
    returns = Returns(2000.0)
    for number in range(1000):
        serve(returns, 6000, 5000, ASKED_FOR if number % 20 else COARSE)
    assert returns.has_coarse_failed


def test_hits_of_what_nobody_counts_are_hits() -> None:
    returns = Returns(2000.0)
    for _ in range(100):
        serve(returns, 5000, 4000, None)
    assert returns.has_coarse_failed


def test_what_was_long_ago_is_forgotten() -> None:
    returns = Returns(2000.0)
    for _ in range(2000):
        serve(returns, 5000, 4000, ASKED_FOR)
    assert returns.has_coarse_failed
    for _ in range(4000):
        serve(returns, 5000, 4000, COARSE)
    assert not returns.has_coarse_failed
