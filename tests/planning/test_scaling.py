from dataclasses import replace

from lightning_autopar.memory.footprint import Moment
from lightning_autopar.planning.scaling import scaled
from tests.fakes.values import MIB, footprint


def test_what_depends_on_the_batch_goes_in_proportion_and_the_rest_stays() -> None:
    step = footprint(temporary_bytes=1024 * MIB)
    half = scaled(step, 4)
    assert (half.batch_size, half.activation_bytes, half.input_bytes, half.flops) == (
        4,
        step.activation_bytes // 2,
        MIB // 2,
        step.flops // 2,
    )
    assert half.blocks[0].activation_bytes * 2 == step.blocks[0].activation_bytes
    assert (half.parameter_bytes, half.gradient_bytes, half.optimizer_bytes) == (
        step.parameter_bytes,
        step.gradient_bytes,
        step.optimizer_bytes,
    )
    assert half.temporary_bytes == 512 * MIB
    assert scaled(footprint(temporary_bytes=100 * MIB), 1).temporary_bytes == 100 * MIB
    assert scaled(step, 8) == step


def test_sizes_that_are_fixed_stay_and_moments_go_along() -> None:
    moment = Moment(phase="backward", gradient_bytes=8, activation_bytes=80, temporary_bytes=16, fixed_bytes=4)
    step = footprint(blocks=1, activation_bytes=100, moments=(moment,))
    step = replace(step, blocks=(replace(step.blocks[0], fixed_bytes=20, input_extra_bytes=8),))
    double = scaled(step, 16)
    assert double.activation_bytes == double.blocks[0].activation_bytes == 20 + 2 * 80
    assert double.blocks[0].input_extra_bytes == 16
    assert double.moments == (replace(moment, activation_bytes=160, temporary_bytes=32),)


def test_a_batch_without_a_batch_dimension_counts_as_one_sample() -> None:
    assert scaled(footprint(batch_size=0), 2).activation_bytes == 2 * footprint().activation_bytes
