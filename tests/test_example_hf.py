"""The Hugging Face examples train the same model under every engine, save it for ``from_pretrained``, and are planned for in seconds."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.plan_8b import planned
from lightning_autopar import AutoParallelStrategy

# transformers 5.23 renames what peft calls, and what transformers 4 has under the old name alone
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

FOLDER = Path(__file__).parents[1] / "examples" / "hf"
SEVERAL = ["ddp", "fsdp", "pipeline", "zero"]
COMMON = ["--steps=2", "--batch=8", "--length=24"]
FULL, ADAPTERS = [*COMMON], [*COMMON, "--lora", "--gradient-checkpointing"]
#: On an idle machine of this project a plan takes some 11 seconds; the bound leaves room for slower ones.
PLAN_CPU_SECONDS, PLAN_BYTES = 30, 2 * 1024**3


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in ("small", "causal_lm", "sequence_classification")}
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def models(scripts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    scripts["small"].write_causal_lm(folder / "causal_lm", width=64, layers=3)
    scripts["small"].write_encoder(folder / "sequence_classification", width=64, layers=3)
    return {name: folder / name for name in ("causal_lm", "sequence_classification")}


class Runner:
    """Runs the examples' ``main`` under one engine, each combination once."""

    def __init__(self, scripts: dict[str, Any], models: dict[str, Path], folder: Path) -> None:
        self.scripts, self.models, self.folder = scripts, models, folder
        (folder / "one.txt").write_text("def add(first, second):\n    return first + second\n" * 60, encoding="utf-8")
        (folder / "two.txt").write_text("class Adder:\n    def __call__(self, value):\n        return value + self.value\n" * 9, "utf-8")
        self._texts = scripts["small"].functions()[::25]

    @functools.cache  # noqa: B019  # it lives as long as the tests
    def __call__(self, script: str, engine: str, options: tuple[str, ...]) -> tuple[Any, Path]:
        output = self.folder / f"{script}-{engine}-{'-'.join(options)}"
        arguments = [f"--model={self.models[script]}", f"--output={output}", *options]
        quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
        if engine == "plain":
            arguments.append("--strategy=auto")  # the one word
        else:
            quiet["strategy"] = AutoParallelStrategy(allow=[engine], devices="2xcpu:2GiB", calibrate=False)
        if script == "causal_lm":
            arguments += ["--text", str(self.folder / "one.txt"), str(self.folder / "two.txt")]
        with pytest.MonkeyPatch.context() as patch:
            trainer = L.Trainer
            patch.setattr(L, "Trainer", lambda **given: trainer(**{**given, **quiet}))
            patch.setattr(self.scripts["small"], "functions", lambda: self._texts)
            module = self.scripts[script].main(arguments)
        if engine != "plain":
            assert module.trainer.strategy.plan.engine == engine
        return module, output


@pytest.fixture(scope="module")
def run(scripts: dict[str, Any], models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(scripts, models, tmp_path_factory.mktemp("runs"))


def figures(module: Any) -> dict[str, float]:
    return {name: value.item() for name, value in module.trainer.callback_metrics.items()}


def assert_same_run(module: Any, plain: Any) -> None:
    assert figures(module) == pytest.approx(figures(plain), abs=1e-5)
    ours, theirs = module.state_dict(), plain.state_dict()
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["causal_lm", "sequence_classification"])
def test_the_examples_do_not_import_the_package(name: str) -> None:
    nodes = list(ast.walk(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported = plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "lightning" in imported
    assert not [each for each in imported if each.startswith("lightning_autopar")]


@pytest.mark.parametrize("engine", ["single", *SEVERAL])
def test_a_causal_model_is_the_same_under_every_engine_and_loads_again(run: Runner, engine: str) -> None:
    module, output = run("causal_lm", engine, tuple(FULL))
    assert_same_run(module, run("causal_lm", "plain", tuple(FULL))[0])
    loaded = AutoModelForCausalLM.from_pretrained(output)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in module.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    prompt = AutoTokenizer.from_pretrained(output)("def ", return_tensors="pt")
    samples = [model.eval().generate(**prompt, max_new_tokens=8, do_sample=False) for model in (loaded, module.model)]
    assert torch.equal(*samples)


@pytest.mark.parametrize("engine", SEVERAL)
def test_adapters_are_the_same_under_every_engine_and_load_again(run: Runner, models: dict[str, Path], engine: str) -> None:
    module, output = run("causal_lm", engine, tuple(ADAPTERS))
    assert_same_run(module, run("causal_lm", "plain", tuple(ADAPTERS))[0])
    assert not (output / "model.safetensors").exists()
    base = AutoModelForCausalLM.from_pretrained(models["causal_lm"])
    tokens = torch.arange(3, 27)[None]
    untrained = base(input_ids=tokens, labels=tokens).loss
    loss = PeftModel.from_pretrained(base, output).eval()(input_ids=tokens, labels=tokens).loss
    assert loss.item() == pytest.approx(module.model.eval()(input_ids=tokens, labels=tokens).loss.item(), abs=1e-6)
    assert abs(loss - untrained) > 1e-6


@pytest.mark.parametrize("engine", ["ddp", "pipeline"])
def test_a_classifier_is_the_same_and_loads_again(run: Runner, engine: str) -> None:
    module, output = run("sequence_classification", engine, tuple(FULL))
    plain = run("sequence_classification", "plain", tuple(FULL))[0]
    assert_same_run(module, plain)
    assert 0 < figures(module)["val_accuracy"] < 1
    loaded = AutoModelForSequenceClassification.from_pretrained(output)
    assert loaded.config.id2label[0] == "asyncio"
    tokens = torch.arange(5, 25)[None]
    assert torch.equal(loaded(input_ids=tokens).logits, module.model.eval()(input_ids=tokens).logits)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_trains_under_shards(run: Runner, precision: str) -> None:
    module, output = run("causal_lm", "fsdp", (*ADAPTERS, f"--precision={precision}"))
    plain = run("causal_lm", "plain", tuple(ADAPTERS))[0]
    assert figures(module) == pytest.approx(figures(plain), rel=0.01)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert module.model.get_base_model().lm_head.weight.dtype == dtype
    assert (output / "adapter_model.safetensors").exists()


def test_an_8b_model_is_planned_for_in_seconds_and_little_memory(tmp_path: Path) -> None:
    found = planned(tmp_path)
    report = found["report"]
    assert report["footprint"]["parameters"] == 8_030_261_248
    assert report["candidates"][report["best"]]["fits"]
    assert 100 * 1024**2 < found["peak_bytes"] < PLAN_BYTES
    assert found["cpu_seconds"] < PLAN_CPU_SECONDS
