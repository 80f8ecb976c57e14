import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.weights.retention import deletable_versions


def test_only_the_newest_versions_are_kept_when_nobody_needs_others():
    assert deletable_versions([3, 1, 2, 4], keep_last=2, pinned=[], in_use=[]) == (1, 2)


@pytest.mark.case("R-B82")
@pytest.mark.case("T-B70")
def test_a_version_that_a_server_or_an_open_batch_reads_is_kept():
    deletable = deletable_versions(range(1, 9), keep_last=2, pinned=[5], in_use=[2, 8])
    assert deletable == (1, 3, 4, 6)


def test_keeping_nothing_is_refused():
    with pytest.raises(ValueError, match="keep_last is 0"):
        deletable_versions([1], keep_last=0, pinned=[], in_use=[])


versions = st.frozensets(st.integers(0, 30))


@given(versions, st.integers(1, 5), versions, versions)
def test_nothing_needed_is_ever_deleted_and_everything_else_is(
    published, keep_last, pinned, in_use
):
    deletable = deletable_versions(published, keep_last=keep_last, pinned=pinned, in_use=in_use)
    kept = published - set(deletable)
    assert not set(deletable) & (pinned | in_use)
    newest = set(sorted(published)[-keep_last:])
    assert newest <= kept
    assert kept == published & (newest | pinned | in_use)
