import pytest

from libra.errors import InvariantError
from libra.weights.transfer_group import transfer_group


def ranks(group):
    return [list(group.ranks_of(instance)) for instance in group.num_workers_of]


@pytest.mark.case("T-B71")
def test_given_offsets_are_kept():
    group = transfer_group({"a": 1, "b": 2}, rank_offset_of={"a": 1, "b": 3})
    assert ranks(group) == [[1], [3, 4]]
    assert group.world_size == 5


@pytest.mark.case("T-B71")
def test_instances_of_every_size_have_their_ranks_in_a_row_behind_the_trainer():
    group = transfer_group({"a": 1, "b": 2, "c": 4})
    assert ranks(group) == [[1], [2, 3], [4, 5, 6, 7]]
    assert group.world_size == 1 + 1 + 2 + 4


@pytest.mark.case("T-B71")
@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ({"a": 1, "b": 2}, "rank 2 is a's and b's"),
        ({"a": 0, "b": 2}, "rank 0 is the trainer's and a's"),
        ({"a": 1}, "every instance needs a rank offset"),
    ],
)
def test_a_rank_is_nobody_elses(offsets, said):
    with pytest.raises(InvariantError, match=said):
        transfer_group({"a": 2, "b": 1}, rank_offset_of=offsets)


def test_an_instance_without_workers_is_refused():
    with pytest.raises(InvariantError, match="without workers"):
        transfer_group({"a": 0})


def test_a_group_of_nobody_is_the_trainer_alone():
    assert transfer_group({}).world_size == 1
