"""``lightning-autopar run`` of the example with transformers' own Trainer: the losses of the unmodified script under every plan."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import ForkedScript, ended

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(280)

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLE = _ROOT / "examples" / "hf" / "trainer.py"
#: Twenty-two passages of unequal lengths: six steps of four, the last of an epoch with two.
_TEXT = "".join(f"def number_{line}(value):\n    return value{' + value' * (line * 7 % 11)}\n" for line in range(44))


class Runs:
    """The example's runs, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "text.txt").write_text(_TEXT, "utf-8")

    @functools.cache  # noqa: B019  # it lives as long as the tests
    def __call__(self, *options: str, second: bool = False) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any], str]:
        """Losses with their epochs, trained weights, the summary and what was said on stderr; without options, of the plain script."""
        output = self._folder / f"run-{len(list(self._folder.iterdir()))}"
        script = [str(_EXAMPLE), "--output", str(output), "--text", str(self._folder / "text.txt"), "--batch", "4", "--steps", "8"]
        how = ["-m", "lightning_autopar", "run", "--json", str(output) + ".json", *options] if options else []
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        environment = {**kept, "AUTOPAR_CACHE": "off", "AUTOPAR_LEDGER": "off", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        environment |= {} if second else {"CUDA_VISIBLE_DEVICES": ""}
        if options:
            done = subprocess.run([sys.executable, *how, *script], env=environment, capture_output=True, text=True, timeout=280)
            code, said = done.returncode, done.stderr
        else:
            code, said = ended(ForkedScript(_EXAMPLE, *script[1:], environment=environment, folder=self._folder))
        assert code == 0, said[-3000:]
        from safetensors.torch import load_file

        history = json.loads((output / "trainer_state.json").read_text("utf-8"))["log_history"]
        summary = json.loads(Path(f"{output}.json").read_text("utf-8")) if options else {}
        logged = [each[name] for each in history if "loss" in each for name in ("loss", "epoch")]
        return logged, load_file(output / "model.safetensors"), summary, said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("trainer"))


def _assert_same(ours: tuple[Any, ...], plain: tuple[Any, ...]) -> None:
    assert len(plain[0]) == 16
    assert ours[0] == pytest.approx(plain[0], rel=1e-5)
    assert ours[1].keys() >= plain[1].keys(), "after FSDP transformers saves a tied weight under both of its names"
    for name, value in plain[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def _settings_of(ours: tuple[Any, ...]) -> dict[str, Any]:
    trainer = ours[2]["trainers"][0]
    found: dict[str, Any] = trainer["settings"]
    return found


def test_in_parts_with_checkpointing_on_one_device(runs: Runs, tmp_path: Path) -> None:
    layers = [f"model.model.layers.{layer}" for layer in range(4)]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"engine": "single", "devices": ["cpu:0"], "micro_batches": 2, "recompute": layers}), "utf-8")
    ours = runs("--devices", "1xcpu:2GiB", "--plan", str(plan))
    _assert_same(ours, runs())
    assert _settings_of(ours) == {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "activation_checkpointing": True,
        "use_cpu": True,
    }
    assert (
        "  per_device_train_batch_size: 4 → 2\n  gradient_accumulation_steps: 1 → 2\n  activation_checkpointing: False → True\n" in ours[3]
    )


def test_on_two_devices_under_ddp(runs: Runs) -> None:
    ours = runs("--devices", "2xcpu:2GiB", "--allow", "ddp", "--exact")
    _assert_same(ours, runs())
    assert ours[2]["trainers"][0]["title"].startswith("ddp ×2")
    assert len(ours[2]["trainers"]) == 1
    settings = _settings_of(ours)
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 2
    assert "transformers' Trainer runs under ddp ×2" in ours[3]


@pytest.mark.slow
def test_on_two_devices_under_deepspeed(runs: Runs) -> None:
    pytest.importorskip("deepspeed")
    ours = runs("--devices", "2xcpu:2GiB", "--allow", "zero", "--exact")
    _assert_same(ours, runs())
    assert _settings_of(ours)["deepspeed"]["zero_optimization"]["stage"] in (1, 2, 3)


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_on_two_gpus_under_fsdp(runs: Runs) -> None:
    ours = runs("--devices", "2", "--allow", "fsdp", "--exact", second=True)
    plan = ours[2]["trainers"][0]["transformers"]["plan"]
    assert plan["engine"] == "fsdp"
    assert plan["shard"]
    # One process of the plain script would replicate the model over both GPUs: the step has twice the samples.
    assert _settings_of(ours)["per_device_train_batch_size"] * _settings_of(ours)["gradient_accumulation_steps"] == 4
    assert _settings_of(ours)["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]
    same = runs("--devices", "2", "--allow", "ddp", "--exact", second=True)
    _assert_same(ours, same)
