import pytest

from libra.errors import SiteError, ungrouped


def test_the_first_error_of_ours_is_raised_in_place_of_its_group():
    cause, noise = SiteError("the disk is full"), ValueError("noise")
    cause.__cause__ = OSError(28, "no space")
    with pytest.raises(SiteError, match="the disk is full") as raised, ungrouped():
        raise ExceptionGroup("tasks", [noise, ExceptionGroup("inner", [cause])])
    assert raised.value is cause
    assert isinstance(raised.value.__cause__, OSError), "its own cause stays"
    assert raised.value.__notes__ == ["and besides: ValueError: noise"]


def test_an_error_that_is_no_group_passes_as_it_is():
    with pytest.raises(ValueError, match="alone") as raised, ungrouped():
        raise ValueError("alone")
    assert not hasattr(raised.value, "__notes__")


def test_nothing_is_raised_when_nothing_was():
    with ungrouped():
        pass
