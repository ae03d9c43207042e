"""Weights of Hugging Face's files: mapped where they can be, else kept out of memory; shapes alone where another rank has the weights."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lightning_autopar import AutoParallelStrategy, Plan, load_pretrained
from lightning_autopar.state import pretrained
from lightning_autopar.state.pretrained import shapes_only, without_values
from lightning_autopar.strategies.preparation import confirmed_plan

MIB = 1024**2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tied Llama in several bf16 files, and a BERT without a head."""
    root = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(llama).to(torch.bfloat16).save_pretrained(root / "llama", max_shard_size="2MB")
    bert = BertConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(bert).save_pretrained(root / "bert")
    assert len(list((root / "llama").glob("*.safetensors"))) > 2
    return {"llama": root / "llama", "bert": root / "bert"}


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in (
        (dict(model.named_parameters()), dict(expected.named_parameters())),
        (dict(model.named_buffers()), dict(expected.named_buffers())),
    ):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype, name
            assert torch.equal(ours[name], value), name


CASES = [
    pytest.param(AutoModelForCausalLM, "llama", torch.float32, id="converted-and-tied"),
    pytest.param(AutoModelForCausalLM, "llama", torch.bfloat16, id="mapped"),
    pytest.param(AutoModelForSequenceClassification, "bert", torch.bfloat16, id="renamed-with-a-new-head"),
]


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["on-disk", "in-memory"])
@pytest.mark.parametrize(("model_class", "folder", "dtype"), CASES)
def test_it_is_what_from_pretrained_gives(
    folders: dict[str, Path], model_class: Any, folder: str, dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MEMORY_SHARE", share)
    torch.manual_seed(1)
    expected = model_class.from_pretrained(folders[folder], dtype=dtype)
    torch.manual_seed(1)
    model = load_pretrained(model_class, folders[folder], dtype=dtype)
    assert_same(model, expected)
    assert not model.training
    if folder == "llama":
        assert model.lm_head.weight is model.model.embed_tokens.weight


def anonymous_bytes() -> int:
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_weights_on_disk_take_no_memory_and_are_each_process_s_own(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load_pretrained(AutoModelForCausalLM, folders["llama"], dtype=torch.float32)  # whatever the first one imports
    before = anonymous_bytes()
    monkeypatch.setattr(pretrained, "MEMORY_SHARE", 0.0)
    model = load_pretrained(AutoModelForCausalLM, folders["llama"], dtype=torch.float32)
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert anonymous_bytes() - before < 0.25 * size_bytes
    weight = model.model.layers[0].mlp.up_proj.weight
    value = weight[0, 0].item()
    if (child := os.fork()) == 0:
        with torch.no_grad():
            weight[0].fill_(7.0)  # a row: a forked process can't run torch's threads
        os._exit(0 if weight[0, 0].item() == 7.0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert weight[0, 0].item() == value
    with torch.no_grad():
        weight.fill_(9.0)  # nor does a write reach the checkpoint
    assert load_pretrained(AutoModelForCausalLM, folders["llama"], dtype=torch.float32).model.layers[0].mlp.up_proj.weight[0, 0] == value


@pytest.mark.parametrize(("model_class", "folder", "dtype"), CASES)
def test_shapes_alone_are_those_of_what_would_be_loaded(
    folders: dict[str, Path], model_class: Any, folder: str, dtype: torch.dtype
) -> None:
    expected = model_class.from_pretrained(folders[folder], dtype=dtype)
    with shapes_only():
        model = model_class.from_pretrained(folders[folder], dtype=dtype)
        beside = nn.Linear(2, 2)
    assert beside.weight.is_meta
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    described = [
        {name: (tensor.shape, tensor.dtype) for name, tensor in (*each.named_parameters(), *each.named_buffers())}
        for each in (model, expected)
    ]
    assert described[0] == described[1]  # names that are tied have one entry
    assert not any(parameter.is_meta for parameter in model_class.from_pretrained(folders[folder]).parameters())


class Classifier(L.LightningModule):
    """Loads in ``configure_model``, as each rank does."""

    def __init__(self, folder: Path, load: Any, on_meta: bool = False) -> None:
        super().__init__()
        self.folder, self.load = folder, load
        if on_meta:
            with torch.device("meta"):
                self.model: Any = AutoModelForSequenceClassification.from_config(BertConfig.from_pretrained(folder, num_labels=3))
        else:
            self.model = None

    def configure_model(self) -> None:
        if self.model is None or next(self.model.parameters()).is_meta:
            self.model = self.load(AutoModelForSequenceClassification, self.folder, num_labels=3, dtype=torch.float32).train()

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch[0], labels=batch[1]).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def plainly(model_class: Any, folder: Path, **options: Any) -> PreTrainedModel:
    loaded: PreTrainedModel = model_class.from_pretrained(folder, **options)
    return loaded


def train(module: L.LightningModule, strategy: Any) -> L.Trainer:
    L.seed_everything(1)
    generator = torch.Generator().manual_seed(2)
    samples = [(torch.randint(0, 2048, (8,), generator=generator), index % 3) for index in range(8)]
    trainer = L.Trainer(
        strategy=strategy, max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(module, DataLoader(samples, batch_size=4))
    return trainer


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> tuple[Classifier, float]:
    module = Classifier(folders["bert"], plainly)
    return module, train(module, "auto").callback_metrics["loss"].item()


@pytest.mark.parametrize(
    ("engine", "load", "on_meta"),
    [
        ("ddp", load_pretrained, True),
        ("fsdp", plainly, False),
        ("fsdp", load_pretrained, True),
        ("pipeline", plainly, False),
        ("pipeline", load_pretrained, False),
        ("zero", load_pretrained, False),
    ],
)
def test_a_large_model_loads_in_configure_model_under_every_engine(
    folders: dict[str, Path], reference: tuple[Classifier, float], engine: str, load: Any, on_meta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmed_plan, "LARGE_BYTES", 1)
    devices = ("cpu:0", "cpu:1")
    pinned = Plan(engine="zero", devices=devices, zero_stage=3) if engine == "zero" else None
    strategy = AutoParallelStrategy(allow=[engine], plan=pinned, devices="2xcpu:2GiB", calibrate=False)
    module = Classifier(folders["bert"], load, on_meta)
    loss = train(module, strategy).callback_metrics["loss"].item()
    assert strategy.plan is not None
    assert strategy.plan.engine == engine
    assert loss == pytest.approx(reference[1], abs=1e-5)
    expected = reference[0].state_dict()
    assert set(module.state_dict()) == set(expected)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    assert torch.equal(module.model.bert.embeddings.position_ids, reference[0].model.bert.embeddings.position_ids)


class Unloaded(L.LightningModule):
    """On the meta device, with nobody to give it values."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = AutoModelForSequenceClassification.from_config(BertConfig.from_pretrained(folder, num_labels=3))

    training_step = Classifier.training_step
    configure_optimizers = Classifier.configure_optimizers


class NeverLoaded(Unloaded):
    def configure_model(self) -> None:
        """It could, but doesn't."""


@pytest.mark.filterwarnings("ignore:autopar")  # of what planning can't try without values
@pytest.mark.parametrize("module_class", [Unloaded, NeverLoaded])
def test_a_module_without_values_is_not_run(folders: dict[str, Path], module_class: Any) -> None:
    module = module_class(folders["bert"])
    name = without_values(module)
    assert name is not None
    with pytest.raises(ValueError, match=rf"'{name}' is on the meta device.*load_pretrained"):
        train(module, AutoParallelStrategy(allow=["fsdp"], devices="2xcpu:2GiB", calibrate=False))


class OwnScale(nn.Module):
    """Makes a parameter and nothing that could make its values again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def test_layers_that_can_reset_themselves_need_no_values() -> None:
    with torch.device("meta"):
        assert without_values(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))) is None
        assert without_values(nn.Sequential(nn.Linear(2, 2), OwnScale())) == "1.scale"
