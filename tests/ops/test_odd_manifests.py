"""`pillion inject` on odd manifests: right as kubectl reads them, or refused with a remedy."""

from __future__ import annotations

import pytest

from differences import OPTIONS, check_stream, inject
from odd_manifests import ALL, Odd


@pytest.mark.parametrize("odd", ALL, ids=lambda odd: odd.name)
def test_a_manifest_is_right_or_refused(odd: Odd) -> None:
    """A refused object stays as it is, beside others with their sidecars."""
    source = odd.text.encode(errors="surrogateescape")
    if inject(source, *OPTIONS, *odd.options).stdout:
        found, done = check_stream(source, *odd.options)
    else:
        found, done = 0, inject(source, *OPTIONS, *odd.options)
    said = done.stderr.decode()
    assert (found, done.returncode) == (odd.pods, 1 if odd.refused else 0), said
    assert odd.refused in said


def test_the_cases_are_many_and_have_names_of_their_own() -> None:
    """There are enough of both outcomes."""
    assert len({odd.name for odd in ALL}) == len(ALL) >= 100
    assert 20 <= sum(bool(odd.refused) for odd in ALL) <= len(ALL) - 60
