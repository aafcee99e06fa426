"""Each mutant can still be made. (By hand: whether each is caught; see mutants.py.)"""

from __future__ import annotations

import pytest

from mutants import MUTANTS, REPOSITORY, SOURCE, Mutant
from test_model import TALES


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_mutant_can_be_made(mutant: Mutant) -> None:
    source = SOURCE.read_text()
    broken = mutant.apply(source)
    assert broken != source
    compile(broken, "serversync.py", "exec")
    assert not mutant.story or mutant.story in TALES
    assert mutant.story or mutant.tests
    for path, _, name in (each.partition("::") for each in mutant.tests):
        assert f"def {name}" in (REPOSITORY / path).read_text()
