import pytest

from libra.errors import ChildError, ConfigError, DataError, LearningStoppedError, SiteError
from libra_supervisor.app.ending import Outcome, outcome_of


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError, 2), (DataError, 2), (ChildError, 4), (SiteError, 5), (LearningStoppedError, 6)],
)
def test_an_error_of_ours_ends_the_run_with_its_code_and_its_words(error, code):
    assert outcome_of(error("why")) == Outcome(code, "why")


@pytest.mark.case("T-B62")
def test_the_first_error_of_ours_in_nested_groups_is_the_outcome():
    nested = ExceptionGroup(
        "tasks", [ValueError("noise"), ExceptionGroup("inner", [SiteError("the disk is full")])]
    )
    assert outcome_of(nested) == Outcome(5, "the disk is full")


def test_any_other_error_is_a_bug_and_names_itself():
    assert outcome_of(ExceptionGroup("tasks", [KeyError("x")])) == Outcome(
        70, "a bug in Libra: KeyError: 'x'"
    )


def test_an_interrupt_that_escaped_is_130():
    group = BaseExceptionGroup("tasks", [KeyboardInterrupt()])
    assert outcome_of(group).exit_code == 130
