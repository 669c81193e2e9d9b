"""A quick tier of `make faults`: ranks killed at random moments."""

import pytest

from tests.faults import Fault, Workplace, inflict


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Workplace.make(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("number", [1, 3, 4, 5, 6, 7])
def test_a_killed_rank_costs_no_more_than_the_steps_since_the_last_checkpoint(place, number):
    inflict(Fault.draw(number, seed=1), place)
