"""testkit.answers: two answers are alike up to a close decision."""

from __future__ import annotations

from testkit.answers import alike

RIGHT = {"tokens": [5, 6], "logprobs": [{"5": -1.0, "7": -1.06, "8": -2.0}, {"6": -0.5, "9": -0.9}]}


def test_only_a_close_decision_may_end_otherwise() -> None:
    """Tokens behind it belong to another text; a token less likely, or not among the candidates, is wrong."""
    assert alike({"tokens": [5, 6]}, RIGHT)
    assert alike({"tokens": [7, 1]}, RIGHT)
    assert not alike({"tokens": [8, 6]}, RIGHT)
    assert not alike({"tokens": [5, 9]}, RIGHT)
    assert not alike({"tokens": [4, 6]}, RIGHT)
