"""Memory that states of checkpoints are taken into."""

import io
from threading import Event

import pytest
import torch

from libra.trainer import host_memory
from libra.trainer.host_memory import HostMemory, with_own_storage

SHAPES = {
    (3, 5): torch.bfloat16,
    (): torch.int64,
    (0, 4): torch.float32,
    (7,): torch.float32,
    (1 << 20,): torch.uint8,
}


def test_tensors_keep_their_values_and_lie_apart():
    arena = HostMemory().take()
    originals = [torch.randn(shape).to(dtype) for shape, dtype in SHAPES.items()]
    copies = [arena.copy_of(original) for original in originals]
    for copy, original in zip(copies, originals, strict=True):
        assert copy.dtype == original.dtype
        assert torch.equal(copy, original)
        assert copy.data_ptr() % copy.itemsize == 0


def test_a_state_is_a_copy_that_later_steps_do_not_change():
    parameter = torch.ones(8, requires_grad=True)
    copy = HostMemory().take().copy_of(parameter)
    with torch.no_grad():
        parameter.zero_()
    assert copy.tolist() == [1.0] * 8
    assert not copy.requires_grad


def test_the_next_state_has_the_memory_of_the_one_before():
    memory = HostMemory()
    arena = memory.take()
    before = [arena.empty((1000,), torch.float32).data_ptr() for _ in range(20)]
    num_bytes = arena.num_bytes
    arena.give_back()
    again = memory.take()
    assert [again.empty((1000,), torch.float32).data_ptr() for _ in range(20)] == before
    assert again.num_bytes == num_bytes


def test_two_states_that_wait_have_memory_of_their_own_and_one_of_them_is_kept():
    memory = HostMemory()
    first, second = memory.take(), memory.take()
    one, other = first.copy_of(torch.zeros(4)), second.copy_of(torch.ones(4))
    assert one.tolist() == [0.0] * 4
    first.give_back()
    second.give_back()
    assert memory.take() is first
    assert memory.take() is not second
    assert other.tolist() == [1.0] * 4


def test_what_was_prepared_is_what_the_next_state_gets_without_growing():
    memory = HostMemory()
    memory.prepare(10_001)
    arena = memory.take()
    size = arena.num_bytes
    assert 10_001 <= size < 10_005
    arena.empty((10_000,), torch.uint8)
    assert arena.num_bytes == size


def test_a_state_waits_for_memory_that_is_being_prepared(monkeypatch):
    begun, may_end = Event(), Event()
    real = host_memory.touched

    def slow(count):
        begun.set()
        assert may_end.wait(10)
        return real(count)

    monkeypatch.setattr(host_memory, "touched", slow)
    memory = HostMemory()
    memory.prepare(4096)
    assert begun.wait(10)
    assert memory._free is None
    may_end.set()
    assert memory.take().num_bytes == 4096


@pytest.mark.parametrize("prepared", [0, 100])
def test_memory_that_is_too_small_grows(prepared):
    memory = HostMemory()
    if prepared:
        memory.prepare(prepared)
    arena = memory.take()
    tensors = [arena.copy_of(torch.full((n,), float(n))) for n in (10, 100, 1000, 20)]
    assert [int(it[-1]) for it in tensors] == [10, 100, 1000, 20]


def test_an_arena_knows_its_tensors_and_their_parts():
    arena = HostMemory().take()
    tensor = arena.empty((4, 6), torch.float32)
    assert arena.has(tensor)
    assert arena.has(tensor[2:])
    assert arena.has(tensor.chunk(2)[1])
    assert not arena.has(torch.empty(4, 6))
    assert not arena.has(torch.empty(4, 6, device="meta"))


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)])
def test_a_part_is_written_without_the_rest(part):
    whole = torch.arange(4 * 300, dtype=torch.float32).reshape(4, 300).to(torch.bfloat16)
    tensor = with_own_storage(whole[part])
    assert tensor.untyped_storage().size() == tensor.numel() * 2
    assert tensor.data_ptr() == whole[part].data_ptr()
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file), whole[part])


def test_a_number_can_be_written():
    assert with_own_storage(torch.tensor(3.5)).item() == 3.5
