import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.llm.core.cells import Cells
from tests.fixtures.amounts import amount


class CellsMachine(RuleBasedStateMachine):
    """Against the plain truth: each sequence is a list of cells, and a cell is used while anybody has it."""

    @initialize()
    def begin(self) -> None:
        self.cells = Cells(10_000)
        self.truth: dict[int, list[int]] = {}
        self.next_cell = 0

    @rule(sequence=st.integers(0, 6), tokens=st.integers(1, 9))
    def extend(self, sequence: int, tokens: int) -> None:
        self.cells.extend(sequence, tokens)
        self.truth.setdefault(sequence, []).extend(range(self.next_cell, self.next_cell + tokens))
        self.next_cell += tokens

    @precondition(lambda self: self.truth)
    @rule(data=st.data(), into=st.integers(7, 12))
    def share(self, data: st.DataObject, into: int) -> None:
        source = data.draw(st.sampled_from(sorted(self.truth)))
        length = data.draw(st.integers(0, len(self.truth[source])))
        if into in self.truth:
            if length:
                with pytest.raises(ValueError, match="holds cells"):
                    self.cells.share(source, into, length)
            return
        self.cells.share(source, into, length)
        if length:
            self.truth[into] = self.truth[source][:length]

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.truth)))
        length = data.draw(st.integers(0, len(self.truth[sequence])))
        self.cells.cut(sequence, length)
        self.truth[sequence] = self.truth[sequence][:length]
        if not self.truth[sequence]:
            del self.truth[sequence]

    @invariant()
    def counts_are_exact(self) -> None:
        held = [cell for cells in self.truth.values() for cell in cells]
        assert self.cells.used == len(set(held))
        assert self.cells.free == 10_000 - len(set(held))
        for sequence in range(13):
            mine = self.truth.get(sequence, [])
            assert self.cells.length(sequence) == len(mine)
            assert self.cells.exclusive(sequence) == sum(held.count(cell) == 1 for cell in mine)


TestCells = CellsMachine.TestCase
TestCells.settings = settings(max_examples=amount(40, thorough=100), deadline=None)


def test_cutting_beyond_the_end_is_an_error() -> None:
    cells = Cells(10)
    cells.extend(0, 3)
    with pytest.raises(ValueError, match="has 3 tokens, not 4"):
        cells.cut(0, 4)


def test_a_sequence_that_holds_nothing_may_be_cut() -> None:
    cells = Cells(10)
    cells.cut(5, 0)
    assert cells.used == 0
