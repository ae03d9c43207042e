"""The exact loader inside a Lightning Trainer: plain Lightning's run bit by bit, also over a checkpoint in the middle of an epoch."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_autopar.exact.data.loader import ExactLoader
from lightning_autopar.exact.data.pass_record import fit_progress

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")

BATCHES = 6


class Exact(SingleDeviceStrategy):
    """Lightning's strategy for one device, with exact loaders."""

    def __init__(self):
        super().__init__(device=torch.device("cpu"))
        self.loaders = []

    def process_dataloader(self, dataloader):
        trainer = self.lightning_module.trainer
        self.loaders.append(ExactLoader(dataloader, progress=fit_progress(trainer) if trainer.training else None))
        return self.loaders[-1]


class ExactFromAnEpochsEnd(Exact):
    """Also loads what Lightning leaves aside: the loaders' states of a checkpoint whose epoch was over."""

    def process_dataloader(self, dataloader):
        loader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer
        if trainer.training and (states := trainer.fit_loop._combined_loader_states_to_load):
            loader.load_state_dict(states[len(self.loaders) - 1])
        return loader


class Noisy(Dataset):
    """Augments in the main process."""

    def __init__(self):
        self.rows = torch.randn(6 * BATCHES - 2, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] + 0.1 * torch.randn(4)


class NoisyStream(IterableDataset):
    def __init__(self):
        self.rows = Noisy()

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


LOADERS = {
    "shuffle": lambda: DataLoader(TensorDataset(Noisy().rows), batch_size=6, shuffle=True),
    "augmented": lambda: DataLoader(Noisy(), batch_size=6, shuffle=True),
    "generator": lambda: DataLoader(Noisy(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(8)),
    "workers": lambda: DataLoader(TensorDataset(Noisy().rows), batch_size=6, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(NoisyStream(), batch_size=6),
    "two loaders": lambda: {
        "long": DataLoader(Noisy(), batch_size=6, shuffle=True),
        "short": DataLoader(TensorDataset(Noisy().rows[:10]), batch_size=5, shuffle=True),
    },
}


class Module(pl.LightningModule):
    def __init__(self, loader):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.loader = loader
        self.seen = []

    def training_step(self, batch, batch_idx):
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        x = torch.cat([part[0] if isinstance(part, (list, tuple)) else part for part in parts])
        self.seen.append((batch_idx, x.tolist()))
        return self.layers(x).square().mean()

    def validation_step(self, batch, batch_idx):
        torch.rand(1)
        self.log("val", self.layers(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)

    def train_dataloader(self):
        return LOADERS[self.loader]()

    def val_dataloader(self):
        return DataLoader(TensorDataset(Noisy().rows[:8]), batch_size=3)


def _fit(name, strategy, folder, *, ckpt=None, callbacks=(), seed=11, **settings):
    module = Module(name)
    torch.manual_seed(seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        num_sanity_val_steps=0,
        **settings,
    )
    trainer.fit(module, ckpt_path=ckpt)
    return module, torch.get_rng_state()


def _equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", LOADERS)
def test_run_is_plain_lightnings_bit_by_bit(name, tmp_path):
    plain, state = _fit(name, "auto", tmp_path)
    exact, exact_state = _fit(name, strategy := Exact(), tmp_path)
    assert strategy.loaders
    assert exact.seen == plain.seen
    assert _equal(plain, exact)
    assert torch.equal(state, exact_state)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("step", [8, 9, 11])
def test_resume_in_the_middle_of_an_epoch_is_the_uninterrupted_run(name, step, tmp_path):
    """Step 8 to 11 of 18: in the second epoch."""
    plain, state = _fit(name, "auto", tmp_path)
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    _fit(name, Exact(), tmp_path, callbacks=[save])
    resumed, resumed_state = _fit(name, Exact(), tmp_path, ckpt=tmp_path / f"step={step}.ckpt", seed=999)
    assert resumed.seen == plain.seen[step:]
    assert _equal(plain, resumed)
    assert torch.equal(state, resumed_state)


def test_resume_from_an_epochs_last_batch_does_not_skip_the_next_epoch(tmp_path):
    """Saved in on_train_batch_end of the epoch's last batch, where plain Lightning skips an epoch with a stateful loader."""
    plain, _ = _fit("shuffle", "auto", tmp_path, limit_val_batches=0)
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=BATCHES, save_top_k=-1)
    _fit("shuffle", Exact(), tmp_path, callbacks=[save], limit_val_batches=0)
    resumed, _ = _fit("shuffle", Exact(), tmp_path, ckpt=tmp_path / f"step={BATCHES}.ckpt", seed=999, limit_val_batches=0)
    assert resumed.seen == plain.seen[BATCHES:]
    assert _equal(plain, resumed)


def test_resume_after_an_epoch_cut_short_begins_the_next(tmp_path):
    plain, _ = _fit("augmented", "auto", tmp_path, limit_train_batches=4, limit_val_batches=0)
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = {"limit_train_batches": 4, "limit_val_batches": 0}
    _fit("augmented", Exact(), tmp_path, callbacks=[save], **settings)
    for step in (3, 4, 6):
        resumed, _ = _fit("augmented", Exact(), tmp_path, ckpt=tmp_path / f"step={step}.ckpt", seed=999, **settings)
        assert resumed.seen == plain.seen[step:]
        assert _equal(plain, resumed)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("save", [{"save_on_train_epoch_end": True}, {"monitor": "val", "save_on_train_epoch_end": False}])
def test_resume_after_an_epoch(name, save, tmp_path):
    plain, state = _fit(name, "auto", tmp_path)
    _fit(name, Exact(), tmp_path, callbacks=[ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **save)])
    resumed, resumed_state = _fit(name, ExactFromAnEpochsEnd(), tmp_path, ckpt=tmp_path / "step=12.ckpt", seed=999)
    assert [position for position, _ in resumed.seen] == list(range(BATCHES))
    if name == "stream" and "monitor" in save:
        return  # of a loader without a length, Lightning fetches a batch for the epoch that was over, drops it, and begins the next
    assert resumed.seen == plain.seen[12:]
    assert _equal(plain, resumed)
    assert torch.equal(state, resumed_state)


def test_resume_from_a_validation_inside_an_epoch(tmp_path):
    settings = {"val_check_interval": 3}
    plain, _ = _fit("shuffle", "auto", tmp_path, **settings)
    save = ModelCheckpoint(tmp_path, filename="{step}", monitor="val", save_top_k=-1)
    _fit("shuffle", Exact(), tmp_path, callbacks=[save], **settings)
    resumed, _ = _fit("shuffle", Exact(), tmp_path, ckpt=tmp_path / "step=9.ckpt", seed=999, **settings)
    assert resumed.seen == plain.seen[9:]
    assert _equal(plain, resumed)


def test_lightning_finds_the_predicted_samples_indices(tmp_path):
    """A prediction writer's batch indices are the rank's own, not those of the first batches."""
    found = {}

    class Writer(pl.callbacks.BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            found[batch_idx] = (batch_indices, batch[0].tolist())

    class SecondOfTwo(Exact):
        def process_dataloader(self, dataloader):
            return ExactLoader(dataloader, rank=1, world_size=2, whole_batches=True)

    class Predicts(Module):
        def predict_step(self, batch):
            return batch[0]

    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=SecondOfTwo(),
        logger=False,
        enable_progress_bar=False,
        callbacks=[Writer("batch")],
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    trainer.predict(Predicts("shuffle"), DataLoader(TensorDataset(torch.arange(11)), batch_size=2))
    assert found == {0: ([2, 3], [2, 3]), 1: ([6, 7], [6, 7]), 2: ([10], [10])}
