"""``lightning_autopar.plan``: planning without a Trainer."""

from __future__ import annotations

import json
import random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lightning_autopar
from lightning_autopar import NothingFits, Plan


class Net(pl.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch), batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_a_cluster_that_is_not_here_is_planned_for() -> None:
    module, batch = Net(), torch.randn(32, 64)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    names = set(vars(module))
    states = torch.get_rng_state(), random.getstate()
    report = lightning_autopar.plan(module, batch=batch, devices="8xH100-80GB", precision="bf16-mixed")
    assert isinstance(report.best, Plan)
    assert str(report.best.title()) in str(report)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in weights.items())
    assert set(vars(module)) == names
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert not torch.cuda.is_initialized()


def test_the_json_has_the_shape_that_the_design_gives() -> None:
    report = lightning_autopar.plan(Net(), batch=torch.randn(32, 64), devices="2xcpu:1GiB")
    found = json.loads(report.to_json())
    assert {"inventory", "footprint", "best", "candidates"} <= set(found)
    assert {"id", "kind", "free_bytes", "total_bytes"} <= set(found["inventory"]["devices"][0])
    assert {"parameters", "bytes", "flops", "assumptions"} <= set(found["footprint"])
    assert {"parameters", "gradients", "optimizer", "activations", "temporary"} <= set(found["footprint"]["bytes"])
    assert found["footprint"]["parameters"] == sum(parameter.numel() for parameter in Net().parameters())
    best = found["candidates"][found["best"]]
    assert {"plan", "fits", "reason", "bytes", "seconds"} <= set(best)
    assert best["fits"]
    assert best["reason"] is None
    assert Plan.from_dict(best["plan"]) == report.best
    assert {"parameters", "allocated", "reserved"} <= set(best["bytes"][best["plan"]["devices"][0]])
    assert {"compute", "step"} <= set(best["seconds"])
    assert all(candidate["fits"] or candidate["reason"] for candidate in found["candidates"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": "8xNothing"}, "no device 'Nothing'"),
        ({"precision": "8-bit"}, "unknown precision '8-bit'"),
        ({"allow": ["fsdq"]}, "did you mean 'fsdp'"),
        ({"memory_limit": "lots"}, "'lots'"),
        ({"memory_margin": 2.0}, "memory_margin=2.0"),
        ({"objective": "fun"}, "objective='fun'"),
        ({"pinned": Plan(engine="ddp", devices=("cpu:0", "cpu:9"))}, "cpu:9"),
    ],
)
def test_a_bad_argument_is_told(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        lightning_autopar.plan(Net(), **{"batch": torch.randn(4, 64), "devices": "2xcpu:1GiB", **arguments})
    assert words in str(caught.value)


def test_what_does_not_fit_is_told_with_the_table() -> None:
    with pytest.raises(NothingFits) as caught:
        lightning_autopar.plan(Net(width=1024), batch=torch.randn(4, 1024), devices="2xcpu:2MiB")
    assert caught.value.report.best is None
    assert "fsdp" in str(caught.value)


def test_a_pinned_plan_is_predicted_alone() -> None:
    pinned = Plan(engine="ddp", devices=("cpu:0", "cpu:1"))
    report = lightning_autopar.plan(Net(), batch=torch.randn(4, 64), devices="2xcpu:1GiB", pinned=pinned)
    assert [candidate.plan.engine for candidate in report.candidates] == ["ddp"]
    assert report.best is not None
    assert report.best.devices == pinned.devices
