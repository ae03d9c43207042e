from dataclasses import replace

from lightning_autopar.memory.batch_scaling import longer, scaled
from lightning_autopar.memory.footprint import LayerFootprint, Moment
from lightning_autopar.memory.tape import Tape
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


def test_every_size_of_a_part_goes_along_but_that_of_its_weights() -> None:
    layer = LayerFootprint(
        fqn="",
        parameter_bytes=100,
        gradient_bytes=100,
        activation_bytes=100,
        fixed_bytes=20,
        output_bytes=8,
        forward_peak_bytes=120,
        forward_unsaved_bytes=60,
        backward_peak_bytes=70,
        flops=10,
        backward_flops=20,
        moved_bytes=300,
        backward_moved_bytes=500,
        parameter_rows=((5, 20, True),),
        buffer_bytes=4,
    )
    step = replace(footprint(blocks=1), outer=(layer, layer), moved_bytes=2000)
    double = scaled(step, 16)
    assert double.outer == 2 * (
        replace(
            layer,
            activation_bytes=180,
            output_bytes=16,
            forward_peak_bytes=220,
            forward_unsaved_bytes=100,
            backward_peak_bytes=120,
            flops=20,
            backward_flops=40,
            moved_bytes=500,
            backward_moved_bytes=800,
        ),
    )
    # What the optimizer moves stays: 2000 less the parts' 1600.
    assert double.moved_bytes == 400 + 2 * (500 + 800)
    assert scaled(step, 8) == step


def test_a_tape_keeps_its_events() -> None:
    tape = Tape()
    tape.add("allocate", 0, 100, "parameters")
    tape.add("allocate", 1, 30, "input")
    tape.add("leave", -1)
    tape.add("allocate", 2, 7, "activations")
    tape.add("allocate", 3, 10**12, "temporary")
    tape.add("allocate", 4, 50, "fixed")
    tape.add("free", 2, 0, "activations")
    step = replace(footprint(), tape=tape)
    half = scaled(step, 4).tape
    assert half is not None
    assert [event.size_bytes for event in half] == [100, 15, 0, 4, 10**12 // 2, 50, 0]
    assert [(event.action, event.storage, event.kind) for event in half] == [(event.action, event.storage, event.kind) for event in tape]
    assert scaled(step, 8).tape == tape
    many = longer(step, 4000.0001).tape  # whose sizes times the fraction's numerator have more than 64 bits
    assert many is not None
    assert [event.size_bytes for event in many] == [100, 120_001, 0, 28_001, 4000 * 10**12 + 10**8, 50, 0]
    assert [event.size_bytes for event in tape][1] == 30


def test_a_validation_grows_along_but_does_not_shrink() -> None:
    step = replace(footprint(), evaluation_bytes=80)
    assert [scaled(step, size).evaluation_bytes for size in (4, 8, 16)] == [80, 80, 160]
    assert scaled(footprint(), 16).evaluation_bytes is None
