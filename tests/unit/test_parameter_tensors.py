"""What is kept of a flat buffer that comes in pieces."""

import pytest
import torch

from libra.trainer.parameter_tensors import ParameterTensors, host_tensor

RANGES = [(70, 100), (0, 10), (16, 64)]
SIZE = 110


@pytest.mark.parametrize("piece", [1, 7, 16, 54, SIZE])
def test_parameters_come_together_from_pieces_of_any_size(piece):
    flat = torch.arange(SIZE, dtype=torch.float32)
    parameters = ParameterTensors(RANGES, host_tensor)
    for begin in range(0, SIZE, piece):
        parameters.write(begin, flat[begin : begin + piece])
    for begin, end in RANGES:
        assert torch.equal(parameters[begin:end], flat[begin:end])


def test_each_parameter_has_a_storage_of_its_own():
    parameters = ParameterTensors(RANGES, host_tensor)
    sizes = [parameters[begin:end].untyped_storage().size() for begin, end in RANGES]
    assert sizes == [4 * (end - begin) for begin, end in RANGES]


def test_what_is_not_a_whole_parameter_is_not_there():
    with pytest.raises(KeyError):
        ParameterTensors(RANGES, host_tensor)[0:9]
