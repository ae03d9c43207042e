"""``lightning-autopar plan`` of scripts that use transformers' own Trainer, and what such a Trainer can't be given."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_autopar.cli import main, run

pytest.importorskip("transformers")

_SCRIPT = """
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
small = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)

def lm():
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=4, **small))

def texts(count=24):
    rows = [torch.randint(0, 64, (16,)) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]

def arguments(**more):
    quiet = dict(output_dir="out", max_steps=6, report_to="none", disable_tqdm=True)
    return TrainingArguments(**{**quiet, "per_device_train_batch_size": 8, **more})

class Iterable(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from texts()

class Own(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        self.mean = outputs.logits.float().mean().item()
        return (loss, outputs) if return_outputs else loss

class Loop(Trainer):
    def _inner_training_loop(self, *args, **kwargs):
        return None

class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, labels=None):
        return {"loss": (self.layer(x) - labels).square().mean()}

def pairs():
    return [{"x": torch.randn(4), "labels": torch.randn(4)} for _ in range(24)]

def bert():
    return BertForSequenceClassification(BertConfig(num_labels=3, **small))

def classes():
    return [{**each, "labels": torch.tensor(number % 3)} for number, each in enumerate(texts())]
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _plan(folder: Path, body: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    path = folder / "train.py"
    path.write_text(f"{_SCRIPT}\n{body}\nraise AssertionError('it went on')\n", "utf-8")
    assert main(["plan", "--json", "--devices", "2xcpu:2GiB", *options, str(path)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _refused(folder: Path, body: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    path = folder / "train.py"
    path.write_text(f"{_SCRIPT}\n{body}\n", "utf-8")
    assert main(["plan", *(options or ("--devices", "2xcpu:2GiB")), str(path)]) == 2
    return capsys.readouterr().err


def _fitting(report: dict[str, Any]) -> dict[tuple[str, int, bool], dict[str, Any]]:
    """The plans that fit, by engine, accumulation and whether layers are recomputed."""
    return {
        (each["plan"]["engine"], each["plan"]["micro_batches"], bool(each["plan"]["recompute"])): each
        for each in report["candidates"]
        if each["fits"]
    }


def _reason(report: dict[str, Any], engine: str) -> str:
    return next(each["reason"] for each in report["candidates"] if each["plan"]["engine"] == engine and not each["fits"])


def test_a_trainers_plans_are_shown_and_nothing_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _plan(
        tmp_path, "Trainer(model=lm(), args=arguments(save_strategy='steps', save_steps=1), train_dataset=texts()).train()", capsys
    )
    assert found["function"] == "train"
    assert found["run"]["batches"] == 6
    assert found["footprint"]["batch_size"] == 8
    fitting = _fitting(found)
    assert {("single", 1, False), ("ddp", 1, False), ("single", 2, False), ("single", 1, True), ("ddp", 1, True)} <= set(fitting)
    assert {plan["plan"]["engine"] for plan in fitting.values()} == {"single", "ddp"}
    recomputing = fitting["single", 1, True]
    assert recomputing["plan"]["recompute"] == ["model.model.layers.0", "model.model.layers.1"]
    assert recomputing["needs_bytes"]["cpu:0"] < fitting["single", 1, False]["needs_bytes"]["cpu:0"]
    assert _reason(found, "pipeline") == "transformers' Trainer has no pipelines"
    assert "on CPU devices accelerate would run DDP instead" in _reason(found, "fsdp")
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert logging.getLogger("lightning.pytorch").level == logging.INFO  # as Lightning sets it, in a process that goes on


def test_devices_that_are_not_here_get_sharded_plans_whatever_precision_the_script_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "Trainer(model=lm(), args=arguments(fp16=True, tf32=True), train_dataset=texts()).train()"
    found = _plan(tmp_path, body, capsys, "--devices", "4xA100-40GB")
    assert found["precision"] == "16-mixed"
    assert {"single", "ddp", "fsdp"} == {engine for engine, _, _ in _fitting(found)}
    worlds = {len(each["plan"]["devices"]) for each in found["candidates"] if each["fits"]}
    assert worlds == {1, 2, 4}, "three devices don't share 8 samples evenly"


def test_accelerates_variable_for_mixed_precision_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    body = "Trainer(model=lm(), args=arguments(), train_dataset=texts()).train()"
    assert _plan(tmp_path, body, capsys, "--allow", "single")["precision"] == "bf16-mixed"


def test_an_evaluations_batches_are_not_split_over_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluates = "eval_strategy='steps', eval_steps=2, per_device_eval_batch_size=64"
    body = f"Trainer(model=lm(), args=arguments({evaluates}), train_dataset=texts(), eval_dataset=texts(64)).train()"
    fitting = _fitting(_plan(tmp_path, body, capsys))
    alone, two = (next(iter(fitting[engine, 1, False]["bytes"].values())) for engine in ("single", "ddp"))
    assert two["allocated"] >= alone["allocated"] - 4096, "each device evaluates batches of 64, whatever its part of a training batch is"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("Own(model=lm(), args=arguments(), train_dataset=texts()).train()", "Own has a training_step of its own: the prediction is of"),
        ("Trainer(model=lm(), args=arguments(neftune_noise_alpha=5), train_dataset=texts()).train()", "neftune_noise_alpha=5: the noise"),
        ("Trainer(model=lm(), args=arguments(), train_dataset=texts(25)).train()", "fills up an epoch's last batch with 7 of its first"),
        ("Trainer(model=lm(), args=arguments(), train_dataset=Iterable()).train()", "the dataset doesn't say its length"),
        ("Trainer(model=Linear(), args=arguments(), train_dataset=pairs()).train()", "transformers takes the mean over the parts"),
    ],
)
def test_what_a_reader_should_know_stands_beside_the_plans(
    body: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in " ".join(_fitting(_plan(tmp_path, body, capsys))["ddp", 1, False]["notes"])


@pytest.mark.parametrize(
    ("samples", "more", "engines"),
    [
        (25, "", {"single"}),
        (23, "", {"single", "ddp"}),
        (24, "", {"single", "ddp"}),
        (24, ", eval_dataset=texts(7)", {"single"}),
        (24, ", eval_dataset=texts(16)", {"single", "ddp"}),
    ],
)
def test_under_exact_such_plans_are_left_out(
    samples: int, more: str, engines: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = f"Trainer(model=lm(), args=arguments(), train_dataset=texts({samples}){more}).train()"
    assert {engine for engine, _, _ in _fitting(_plan(tmp_path, body, capsys, "--exact"))} == engines


def test_run_says_with_its_settings_what_the_plan_takes_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood in a note of the report alone that an epoch's last batch has other samples."""
    monkeypatch.setattr(run, "relaunch", lambda *_: sys.exit(0))
    path = tmp_path / "train.py"
    path.write_text(f"{_SCRIPT}\nTrainer(model=lm(), args=arguments(), train_dataset=texts(25)).train()\n", "utf-8")
    assert main(["run", "--devices", "2xcpu:2GiB", "--allow", "ddp", str(path)]) == 0
    settings = capsys.readouterr().err.split("its TrainingArguments are changed:")[1]
    assert "  not as in the script: accelerate fills up an epoch's last batch with 7 of its first samples" in settings
    assert "; --exact excludes such plans" in settings


@pytest.mark.parametrize(
    ("model", "accumulation", "weighs", "says"),
    [
        ("model=Linear(), train_dataset=pairs()[:23]", 1, True, False),
        ("model=Linear(), train_dataset=pairs()[:23]", 2, False, True),
        ("model=lm(), train_dataset=texts(23)", 1, False, False),
    ],
)
def test_parts_weigh_by_their_samples_where_transformers_counts_each_equally(
    model: str,
    accumulation: int,
    weighs: bool,
    says: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: list[Any] = []
    monkeypatch.setattr(run, "relaunch", lambda found, _: settings.append(found) or sys.exit(0))
    path, batch = tmp_path / "train.py", f"per_device_train_batch_size={8 // accumulation}, gradient_accumulation_steps={accumulation}"
    path.write_text(f"{_SCRIPT}\nTrainer({model}, args=arguments({batch})).train()\n", "utf-8")
    assert main(["run", "--devices", "2xcpu:2GiB", "--allow", "ddp", str(path)]) == 0
    assert settings[0].weighed is weighs
    assert ("transformers counts each part equally" in capsys.readouterr().err.split("TrainingArguments are changed:")[1]) is says


def test_a_compute_loss_func_without_labels_is_not_accumulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers takes what it gives for a loss that was divided, so that gradients would grow with the number of parts."""
    body = """
def made(outputs, labels, num_items_in_batch=None):
    return outputs["loss"]
data = [{"x": each["x"], "target": each["labels"]} for each in pairs()]
class Targets(Linear):
    def forward(self, x, target):
        return super().forward(x, target)
Trainer(model=Targets(), args=arguments(label_names=["target"]), train_dataset=data, compute_loss_func=made).train()
"""
    assert {parts for _, parts, _ in _fitting(_plan(tmp_path, body, capsys))} == {1}


@pytest.mark.parametrize(("config", "samples"), [("{'split_batches': True}", 24), ("{'even_batches': False}", 25)])
def test_loaders_that_several_devices_cannot_share_stay_on_one(
    config: str, samples: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each device would take a part of what is meant for one; or one device would have no last batch, and the others wait for it."""
    body = f"Trainer(model=lm(), args=arguments(accelerator_config={config}), train_dataset=texts({samples})).train()"
    assert {engine for engine, _, _ in _fitting(_plan(tmp_path, body, capsys))} == {"single"}


def test_a_model_that_ignores_the_number_of_items_is_neither_split_nor_accumulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers takes its loss for one that is divided already, so that gradients would be too large by the number of parts."""
    made = "model=bert(), args=arguments(per_device_train_batch_size=4, gradient_accumulation_steps=2), train_dataset=classes()"
    found = _plan(tmp_path, f"Trainer({made}).train()", capsys)
    assert {(engine, parts) for engine, parts, _ in _fitting(found)} == {("single", 2)}, "as the script says, and nothing else"
    words = "BertForSequenceClassification is handed num_items_in_batch, but its loss doesn't depend on it"
    assert [note for note in _fitting(found)["single", 2, False]["notes"] if "draws" in note or "splitting" in note] == []
    told = f"the script's own gradient_accumulation_steps=2: {words}: transformers would make the gradients larger by the number of parts; "
    assert any(note.startswith(told) for note in _fitting(found)["single", 2, False]["notes"])
    assert [each["reason"] for each in found["candidates"] if each["plan"]["micro_batches"] == 2 and not each["fits"]] == []
    assert _reason(found, "ddp").startswith(words)
    assert _reason(found, "ddp").endswith("; accepts_loss_kwargs=False on the model mends that")
    mended = f"model = bert()\nmodel.accepts_loss_kwargs = False\nTrainer({made.replace('bert()', 'model')}).train()"
    assert ("ddp", 1) in {(engine, parts) for engine, parts, _ in _fitting(_plan(tmp_path, mended, capsys))}


def test_a_collator_that_lays_all_samples_in_one_row_has_their_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat = "lambda rows: {name: torch.cat([row[name] for row in rows])[None] for name in ('input_ids', 'labels')}"
    body = f"Trainer(model=lm(), args=arguments(), train_dataset=texts(), data_collator={flat}).train()"
    footprint = _plan(tmp_path, body, capsys)["footprint"]
    assert footprint["batch_size"] == 8
    assert footprint["bytes"]["input"] == 2 * 8 * 16 * 8


def test_the_scripts_own_settings_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "Trainer(model=lm(), args=arguments({}), train_dataset=texts()).train()"
    plain = _fitting(_plan(tmp_path, body.format(""), capsys))
    kept = _fitting(_plan(tmp_path, body.format("activation_checkpointing=True"), capsys))
    assert not [key for key in kept if key[2]], "checkpointing is on in all of them"
    assert kept["single", 1, False]["needs_bytes"]["cpu:0"] < plain["single", 1, False]["needs_bytes"]["cpu:0"]
    dropped = _fitting(_plan(tmp_path, body.format("dataloader_drop_last=True, max_steps=20").replace("texts()", "texts(23)"), capsys))
    assert {(engine, parts) for engine, parts, _ in dropped} == {("single", 1), ("ddp", 1)}, "others would drop fewer samples"


def test_the_scripts_own_optimizer_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "model = lm()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    body += "Trainer(model=model, args=arguments(), train_dataset=texts(), optimizers=(optimizer, None)).train()"
    assert _plan(tmp_path, body, capsys)["footprint"]["bytes"]["optimizer"] == 0
    adafactor = _plan(tmp_path, "Trainer(model=lm(), args=arguments(optim='adafactor'), train_dataset=texts()).train()", capsys)
    assert adafactor["footprint"]["bytes"]["activations"] > 0, "its step runs the closure under no_grad"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("arguments(fsdp=True)", "the script sets fsdp=True in TrainingArguments, but how the model is sharded is what"),
        ("arguments(deepspeed={'zero_optimization': {'stage': 2}})", "but how the model is partitioned is what lightning-autopar chooses"),
        ("Loop(model=lm(), args=arguments(), train_dataset=texts()).train()", "Loop has a _inner_training_loop of its own"),
        ("Trainer(model=lm(), args=arguments()).train()", "Trainer has no train_dataset"),
        ("arguments()", "or train of transformers'"),
    ],
)
def test_what_cannot_be_planned_for_gets_a_sentence(body: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in " ".join(_refused(tmp_path, body, capsys).split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--devices", "2xcpu:2GiB", "--batch", "per_device"), "--batch per_device doesn't work for transformers' Trainer"),
        (("--devices", "2xA100-40GB"), "the script sets use_cpu=True, but the devices to plan for are GPUs"),
    ],
)
def test_options_that_a_trainer_cannot_have(
    options: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "Trainer(model=lm(), args=arguments(use_cpu=True), train_dataset=texts()).train()"
    assert says in " ".join(_refused(tmp_path, body, capsys, *options).split())


def test_a_launchers_process_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    body = "Trainer(model=lm(), args=arguments(), train_dataset=texts()).train()"
    assert "a launcher has started this process (TORCHELASTIC_RUN_ID is set)" in " ".join(_refused(tmp_path, body, capsys).split())


def test_an_evaluation_before_training_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that wants to know how good the model is beforehand; its metrics go through arithmetic and transformers' own printing."""
    body = """
import math

class Never(Trainer):
    def prediction_step(self, *args, **kwargs):
        raise AssertionError("it evaluated")

trainer = Never(model=lm(), args=arguments(), train_dataset=texts(), eval_dataset=texts())
metrics = trainer.evaluate()
assert math.isnan(math.exp(metrics["eval_loss"]))
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
trainer.train()
"""
    results = tmp_path / "out" / "eval_results.json"
    results.parent.mkdir()
    results.write_text("of an earlier run")
    assert _plan(tmp_path, body, capsys)["function"] == "train"
    assert results.read_text() == "of an earlier run"


def test_a_trainer_with_arguments_and_a_loss_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As TRL's SFTTrainer and SFTConfig are made: subclasses with fields, a dataset and a collator of their own."""
    body = """
from dataclasses import dataclass, field

@dataclass
class OwnConfig(TrainingArguments):
    max_length: int | None = field(default=8)
    dataset_text_field: str = field(default="text")

    def __post_init__(self):
        self.bf16 = False if self.bf16 is None else self.bf16
        super().__post_init__()
        assert self.max_length == 8

class Tuner(Trainer):
    _tag_names = ["own"]

    def __init__(self, model, args, train_dataset):
        rows = [{"input_ids": row["input_ids"][: args.max_length]} for row in train_dataset]
        super().__init__(model=model, args=args, train_dataset=rows, data_collator=self.collate)
        self.tokens = 0

    @staticmethod
    def collate(rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        self.tokens += inputs["attention_mask"].sum().item()
        return (loss, outputs) if return_outputs else loss

quiet = dict(output_dir="out", max_steps=6, report_to="none", disable_tqdm=True, per_device_train_batch_size=8)
Tuner(lm(), OwnConfig(**quiet), texts()).train()
"""
    found = _plan(tmp_path, body, capsys)
    assert found["footprint"]["batch_size"] == 8
    assert {engine for engine, _, _ in _fitting(found)} >= {"single", "ddp"}
