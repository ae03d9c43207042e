"""What `make test` leaves to `make test-slow`, and which test of `make test` keeps its promise covered.

Many tests cross a promise with every engine. What several engines share (one code path, another engine class around it) is tried by
`make test` under one engine of each kind where kinds differ: **replicated** (ddp), **sharded** (fsdp, zero), **staged** (pipeline), and on
one device. Each pairing is somewhere: the rest of the cross is run by `make test-slow`, and the whole matrix by `make conformance`.

The table is checked: a case that isn't there any more and a covering test that doesn't exist are errors (`tests/test_later.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pytest


class Part(NamedTuple):
    """What of a test `make test` has.

    Args:
        cases: a regular expression of the cases' names that `make test` runs; ``NONE`` leaves all of them to `make test-slow`.
        covered: the tests of `make test` that keep what the others show; ``HERE`` where the cases that stay do.
    """

    cases: str
    covered: tuple[str, ...]


NONE, HERE = "", "the cases that stay"
#: What a run has collected before it leaves anything out: each test's name and case.
COLLECTED = pytest.StashKey[list[tuple[str, str]]]()
_ALTERNATIVE = re.compile(r"\|(?![^(]*\))")
_CELLS = "tests/conformance/test_conformance.py::test_feature"
_RESUMES = "tests/state/test_checkpoint.py::test_going_on_in_the_middle_of_an_epoch_is_the_uninterrupted_run"
_SNAPSHOTS = "tests/state/test_snapshot.py::test_going_on_from_a_snapshot_is_the_uninterrupted_run"
_ZERO = "tests/conformance/test_conformance.py::test_module"
_CHAOS = "tests/chaos/test_chaos.py::test_every_engine_is_entered_and_left"
_RESULTS = "tests/strategies/test_results.py::test_a_script_sees_after_fit_what_it_sees_after_plain_lightning"

LATER: Mapping[str, Part] = {
    # Going on from a file: each engine writes and reads once at each kind of moment; each pair of engines once between the two files.
    _RESUMES: Part(
        "3-single-ddp|5-ddp-fsdp|8-fsdp-single|5-fsdp-fsdp|8-pipeline-fsdp|3-pipeline-pipeline|8-ddp-pipeline", (_SNAPSHOTS, _CHAOS)
    ),
    _SNAPSHOTS: Part(
        "3-ddp-single|5-fsdp-ddp|3-single-fsdp|5-ddp-ddp|3-pipeline-single|5-pipeline-pipeline|3-fsdp-pipeline", (_RESUMES, _CHAOS)
    ),
    "tests/state/test_checkpoint.py::test_going_on_at_the_end_of_an_epoch_is_the_uninterrupted_run": Part(
        "plain-plain|plain-ddp|plain-fsdp|single-plain|ddp-plain|fsdp-plain|ddp-fsdp|pipeline-plain|plain-pipeline", (_RESUMES,)
    ),
    "tests/state/test_checkpoint.py::test_validations_epoch_means_and_plateaus_are_those_of_the_uninterrupted_run": Part(
        "6-single|7-ddp|9-fsdp|10-ddp|10-fsdp|7-pipeline", (HERE,)
    ),
    "tests/state/test_checkpoint.py::test_weights_alone_can_be_saved_and_loaded": Part("fsdp|pipeline", (HERE, _CELLS)),
    "tests/state/test_checkpoint.py::test_the_users_plugin_reads_and_writes": Part("ddp|pipeline", (HERE,)),
    "tests/state/test_checkpoint.py::test_weights_only_refuses_what_plain_refuses": Part("ddp", (HERE,)),
    "tests/state/test_snapshot.py::test_a_snapshots_weights_can_be_validated": Part("fsdp|pipeline", (HERE,)),
    "tests/state/test_snapshot.py::test_two_optimizers_go_on": Part("ddp-fsdp", (HERE, _SNAPSHOTS)),
    "tests/conformance/test_checkpoints.py::test_going_on_under_another_engine_is_the_uninterrupted_run": Part(
        "gpt-plain-(fsdp|pipeline)|gpt-ddp-(plain|pipeline)|gpt-fsdp-ddp|gpt-pipeline-(plain|fsdp)|resnet-(plain-ddp|fsdp-plain)|gpt-zero-3-.*",
        (HERE, _RESUMES),
    ),
    # The handover of results: one engine that copies, one that shards; what is staged is the conformance cells'.
    "tests/strategies/test_results.py::test_schedulers_and_momentum_come_back": Part(
        "onecycle-fsdp|plateau-ddp|lambda-single", (HERE, _CELLS)
    ),
    "tests/strategies/test_results.py::test_a_scheduler_that_cannot_be_pickled_is_named_as_left_behind": Part("ddp", (HERE,)),
    "tests/strategies/test_results.py::test_two_optimizers_come_back_and_the_modules_own_reference_with_them": Part(
        "fsdp", (HERE, _RESULTS)
    ),
    "tests/strategies/test_results.py::test_weights_of_bf16_true_come_back_in_bf16": Part("plain|fsdp", (HERE, _CELLS)),
    "tests/strategies/test_results.py::test_a_second_fit_goes_on_as_under_plain_lightning": Part("fsdp", (HERE, _CELLS)),
    "tests/strategies/test_results.py::test_a_loaders_own_generator_and_the_global_ones_go_on": Part("ddp", (HERE, _RESULTS)),
    "tests/strategies/test_results.py::test_what_has_no_pickle_costs_nothing_but_itself": Part("True-fsdp|False-ddp", (HERE,)),
    "tests/strategies/test_results.py::test_callbacks_of_the_module_are_the_trainers_afterwards": Part("ddp", (HERE,)),
    # Options of the trainer: each under one engine here, and under others as a cell.
    "tests/strategies/test_launcher.py::test_metrics_counters_and_weights_are_plain_lightnings": Part(
        "plain,limits,no_sanity-fsdp|fast_dev_run,overfit,barebones-ddp|profiler,max_time,timer-single|early,rich-ddp", (HERE, _CELLS)
    ),
    "tests/strategies/test_launcher.py::test_fit_evaluate_the_best_and_fit_on": Part("fsdp", (HERE, _CELLS)),
    "tests/strategies/test_launcher.py::test_predictions_of_any_form_in_order": Part("dict-fsdp|tuple-ddp|none-ddp|scalar-single", (HERE,)),
    "tests/strategies/test_launcher.py::test_predictions_of_several_loaders": Part("1.0-ddp|0.5-fsdp|2-single", (HERE,)),
    "tests/strategies/test_fsdp.py::test_trainer_options": Part("options[0235]-.*", (HERE, _CELLS)),
    "tests/strategies/test_fsdp.py::test_tied_weights_recomputation_and_both_ways_of_resharding": Part(
        "recompute0-True|recompute1-False", (HERE,)
    ),
    "tests/strategies/test_fsdp_offload.py::test_offloaded_shards_are_one_devices_run": Part("False-1|True-2", (HERE, _CELLS)),
    "tests/strategies/test_generation.py::test_a_workers_exception_is_raised_with_its_traceback": Part(
        "ddp-(training_step|setup)|fsdp-(validation_step|on_fit_start)", (HERE,)
    ),
    "tests/strategies/test_generation.py::test_an_interruption_ends_all_ranks_at_the_same_batch": Part(
        "single-ctrl-c|ddp-sigterm|fsdp-ctrl-c", (HERE,)
    ),
    # Batches, draws, logged values: what a rank sees doesn't depend on how weights lie.
    "tests/strategies/test_batches.py::test_a_batch_of_any_kind": Part(
        "tensordict-.*|checked-single-2|packed-single-2|(mapping|dataclass|namedtuple|lists|packed)-ddp-1|attributes-pipeline-1|checked-fsdp-1",
        (HERE, "tests/state/test_rows.py"),
    ),
    "tests/strategies/test_loading.py::test_ranks_have_rows_of_the_whole_batch": Part(
        ".*-ddp-1|padded-single-2|padded-fsdp-1|padded in the validation-pipeline-1", (HERE,)
    ),
    "tests/strategies/test_exactness.py::test_random_draws_in_the_data_are_those_of_one_device": Part("single-2|ddp-2|fsdp-0", (HERE,)),
    "tests/strategies/test_exactness.py::test_random_draws_in_a_transfer_hook_are_those_of_one_device": Part("ddp", (HERE,)),
    "tests/strategies/test_metric_losses.py::test_ranks_train_on_the_whole_batch": Part("ddp-.*|fsdp-Collected", (HERE,)),
    "tests/strategies/test_metric_losses.py::test_parts_train_on_their_own_value": Part("single-.*|ddp-Collected", (HERE,)),
    "tests/strategies/test_micro.py::test_the_run_is_that_of_whole_batches": Part(
        "single-plain|ddp-accumulated, clipped|fsdp-plain", (HERE,)
    ),
    "tests/strategies/test_micro.py::test_with_blocks_recomputed_and_more_parts_than_samples": Part("ddp|fsdp", (HERE,)),
    "tests/strategies/test_micro.py::test_what_is_logged_is_of_the_whole_batch": Part("single|fsdp", (HERE,)),
    "tests/strategies/test_micro.py::test_hooks_run_once_a_batch_and_find_its_gradients": Part(
        "single-AfterBackward|ddp-Watching", (HERE,)
    ),
    "tests/strategies/test_micro.py::test_a_zero_grad_of_the_users_own_has_the_last_word": Part("ddp", (HERE,)),
    "tests/strategies/test_micro.py::test_parameters_without_a_gradient_keep_none": Part("ddp|fsdp", (HERE,)),
    "tests/strategies/test_micro.py::test_several_loaders": Part("ddp", (HERE,)),
    "tests/strategies/test_written.py::test_what_is_written_is_kept_on_shards": Part(
        "Exchanging-units0-True|InPlace-units1-False|Normed-units2-True", (HERE,)
    ),
    "tests/strategies/test_written.py::test_what_is_written_is_kept_in_partitions": Part("Exchanging-2|Averaged-3", (HERE,)),
    "tests/strategies/test_measure.py::test_the_peak_is_what_was_predicted": Part("mlp-ddp|gpt-single|gpt-fsdp", (HERE,)),
    "tests/strategies/test_zero_files.py::test_a_run_goes_on_under_another_plan": Part(
        "zero-3 on three-step=3.ckpt-single|zero-2 on three, offloaded-snapshot-fsdp|fsdp-snapshot-zero-3 on three"
        "|single-step=3.ckpt-zero-3 on one, offloaded",
        (HERE, _CHAOS),
    ),
    "tests/strategies/test_pipeline_faults.py::test_a_stages_exception_is_the_users_own": Part(
        "1-backward-1f1b|0-backward-gpipe|1-validation-1f1b", (HERE,)
    ),
    "tests/strategies/test_pipeline_faults.py::test_a_killed_worker_holds_up_nobody": Part("1-forward|2-backward", (HERE,)),
    "tests/strategies/test_pipeline_memory.py::test_no_worker_ever_holds_all_of_a_model": Part("True", (HERE,)),
    "tests/strategies/staged/test_replicas.py::test_replicas_compute_what_one_device_does": Part(
        "whole-interleaved_1f1b|sharded-gpipe|sharded-1f1b", (HERE,)
    ),
    "tests/strategies/test_metric_losses.py::test_partitions_train_on_a_metric": Part("2-Part|3-Missing", (HERE,)),
    "tests/strategies/test_module_kinds.py::test_empty_tensors_nan_buffers_and_shared_layers": Part("fsdp|zero|pipeline", (HERE,)),
    "tests/strategies/test_module_kinds.py::test_an_optimizer_that_was_made_before": Part("fsdp|pipeline", (HERE,)),
    "tests/strategies/test_module_kinds.py::test_outputs_by_a_gradient_and_blocks_in_place": Part("ddp-Forces|zero-InPlace", (HERE,)),
    "tests/strategies/test_micro.py::test_only_one_parts_activations_are_held": Part("single-4|fsdp-2", (HERE,)),
    "tests/strategies/test_measure.py::test_what_holds_the_peak": Part("single-3|fsdp-1", (HERE,)),
    "tests/strategies/test_pipeline_draws.py::test_dropout_is_one_devices": Part(
        "pipeline 3 stages, .*|pipeline 4 stages, interleaved_1f1b .*recompute.*|pipeline 2 stages, 1f1b .*2 replicas.*", (HERE,)
    ),
    "tests/strategies/test_pipeline_hybrid.py::test_two_pipelines_are_one_devices_run": Part(
        "1f1b-accumulated-clipped|interleaved_1f1b-sharded", (HERE, "tests/conformance/test_conformance.py::test_plan")
    ),
    "tests/strategies/test_step_collectives.py::test_all_that_a_step_logs_goes_by_one_collective": Part(
        "ddp uneven, in parts|pipeline", (HERE,)
    ),
    "tests/strategies/test_step_collectives.py::test_a_step_that_logs_nothing_begins_none": Part("fsdp in parts", (HERE,)),
    "tests/strategies/test_shares.py::test_uneven_shares_are_one_devices_run": Part("fsdp-shares1|ddp-shares2", (HERE,)),
    "tests/strategies/test_shares.py::test_a_validation_loader_with_an_iteration_of_its_own": Part("ddp", (HERE,)),
    "tests/strategies/test_hybrid.py::test_snapshots_and_checkpoints_travel_between_hybrid_flat_and_no_shards": Part(
        NONE, (_SNAPSHOTS, "tests/conformance/test_conformance.py::test_plan", "tests/strategies/test_zero_files.py")
    ),
    "tests/strategies/test_pipeline.py::test_every_rank_sees_one_devices_run": Part("pipeline [34] stages.*", (HERE,)),
    "tests/strategies/test_pipeline_logs.py::test_every_rank_has_what_plain_lightning_logs": Part("pipeline 2 .*|pipeline 4 .*", (HERE,)),
    "tests/strategies/test_logged_stages.py::test_everything_logged_is_what_one_device_logs": Part("interleaved|two replicas", (HERE,)),
    "tests/strategies/test_logged.py::test_everything_logged_is_what_one_device_logs": Part("ragged|empty rank", (HERE,)),
    "tests/strategies/test_metric_losses.py::test_stages_train_on_a_metric": Part("Composed-2|Collected-2|Missing-1", (HERE,)),
    "tests/strategies/test_zero.py::test_training_is_plain_lightnings": Part(
        "zero-1 .*|zero-2 .*2-0|zero-2 .*offload optimizer-|zero-3 .*2, offload.*", (HERE, _ZERO)
    ),
    "tests/strategies/test_zero.py::test_precisions": Part("under0.*|under3.*", (HERE,)),
    "tests/strategies/test_rehearse_zero.py::test_what_runs_is_not_refused_and_stays_as_it_was": Part("zero-2 .*|zero-3", (HERE, _ZERO)),
    "tests/strategies/test_rehearse_zero.py::test_what_is_written_is_kept": Part("2-Normed|3-Exchanging", (HERE,)),
    "tests/strategies/test_written.py::test_a_module_too_large_to_rehearse_trains_as_under_plain_lightning": Part("zero", (HERE,)),
    "tests/strategies/test_external.py::test_a_rerun_that_fails_ends_everything": Part(
        NONE,
        (
            "tests/strategies/test_external.py::test_a_process_of_slurms_that_is_stopped_ends_the_others",
            "tests/strategies/test_peer_watch.py",
        ),
    ),
    "tests/memory/test_tracing.py::test_a_fault_at_any_operation_ends_in_a_flagged_plan": Part(
        "(RuntimeError|KeyError)-1|(MemoryError|RecursionError)-17|(AssertionError|SystemExit)-60", (HERE,)
    ),
    "tests/callbacks/test_loggers.py::test_the_plan_is_among_the_hyperparameters_and_nothing_among_the_metrics": Part(
        "None-single|7-ddp", (HERE,)
    ),
    # Processes that exist already: each kind of start once.
    "tests/strategies/test_external.py::test_the_script_is_run_again_where_cuda_is_initialised": Part(
        NONE, ("tests/strategies/test_external.py::test_a_rerun_has_had_the_earlier_runs_when_it_joins",)
    ),
    "tests/strategies/test_waits.py::test_a_rank_that_is_lost_in_a_step_ends_the_run_by_a_sentence": Part(
        "stopped-(ddp|pipeline)-cpu|killed-(fsdp|zero)-cpu|.*-gpu", (HERE, "tests/chaos/test_chaos_faults.py")
    ),
    # A benchmark or a script from end to end, whose parts have tests of their own.
    "tests/test_memory_cpu.py::test_predictions_are_within_the_gate": Part(
        NONE, ("tests/memory/test_trace.py::test_peak_is_that_of_the_real_step", "tests/memory/test_usage.py::test_usage")
    ),
    "tests/test_memory_cpu.py::test_what_is_measured_is_true": Part(
        NONE, ("tests/memory/test_trace.py::test_peak_is_that_of_the_real_step",)
    ),
    "tests/test_memory_cpu.py::test_rivals_predict_the_same_jobs": Part(
        NONE, ("tests/memory/test_trace.py::test_peak_is_that_of_the_real_step",)
    ),
    "tests/memory/test_sharded.py::test_real_ranks": Part(
        NONE, ("tests/strategies/test_measure.py::test_the_peak_is_what_was_predicted", "tests/memory/test_sharded.py")
    ),
    "tests/test_pipeline_zoo.py::test_gradients_in_stages": Part(
        NONE, ("tests/strategies/staged/test_staged_replay.py::test_stages_give_the_whole_steps_loss_and_gradients",)
    ),
    "tests/test_cli_sweep.py::test_a_sweep_from_its_file_to_its_result": Part(
        NONE, ("tests/strategies/sweeping/test_sweep_controller.py", "tests/strategies/sweeping/test_sweep_listed.py")
    ),
    "tests/test_example_hf.py::test_an_8b_model_is_planned_for_in_seconds_and_little_memory": Part(
        NONE, ("tests/memory/test_tracing.py::test_a_billion_parameters_take_seconds_and_no_memory", "tests/state/test_pretrained.py")
    ),
    "tests/test_example_hf.py::test_a_causal_model_is_the_same_under_every_engine_and_loads_again": Part(
        "fsdp|pipeline", (HERE, "tests/state/test_pretrained.py")
    ),
    "tests/test_example_hf.py::test_adapters_are_the_same_under_every_engine_and_load_again": Part("ddp|zero", (HERE,)),
    "tests/test_example_hf.py::test_a_classifier_is_the_same_and_loads_again": Part("ddp", (HERE,)),
    "tests/scenario/test_scenario.py::test_everybody_gets_through": Part(
        NONE,
        (
            "tests/strategies/test_waiting.py",
            "tests/strategies/test_leasing.py",
            "tests/ledger/test_ledger.py",
            "tests/memory/test_turn.py",
        ),
    ),
}


def left_to_later(function: str, case: str) -> bool:
    """Whether `make test` leaves this case of a test (``path::name``) to `make test-slow`."""
    part = LATER.get(function)
    return part is not None and re.fullmatch(part.cases or "(?!)", case) is None


def without_a_case(cases: Iterable[tuple[str, str]]) -> list[str]:
    """Of these tests with all of their cases, the entries of the table that leave nothing out or name a case that isn't there."""
    found: dict[str, list[str]] = {}
    for function, case in cases:
        if function in LATER:
            found.setdefault(function, []).append(case)
    return [
        name
        for name, some in found.items()
        if not any(left_to_later(name, case) for case in some)
        or not all(any(re.fullmatch(each, case) for case in some) for each in _ALTERNATIVE.split(LATER[name].cases) if each)
    ]
