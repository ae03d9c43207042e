"""Fine-tune an encoder of Hugging Face to classify texts: all of its weights, or LoRA adapters and the new head.

Nothing here knows of lightning_autopar but the Trainer's ``strategy="autopar"``: with ``--strategy auto`` it is plain Lightning. The texts
are functions of Python's standard library, the classes the packages that they come from. Without a model it writes a small one first.

    python examples/hf/sequence_classification.py
    python examples/hf/sequence_classification.py --model google-bert/bert-base-uncased --lora --precision bf16-mixed
    AUTOPAR_DEVICES="2xcpu:2GiB" python examples/hf/sequence_classification.py
"""

import argparse
import random
from pathlib import Path

import lightning as L
import small
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, get_linear_schedule_with_warmup


class Classifier(L.LightningModule):
    """A sequence classifier of Hugging Face."""

    def __init__(self, model, classes: int, learning_rate: float, steps: int) -> None:
        super().__init__()
        self.model = model
        self.learning_rate, self.steps = learning_rate, steps
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        output = self.model(**batch)
        self.accuracy(output.logits, batch["labels"])
        self.log("val_loss", output.loss, prog_bar=True)
        self.log("val_accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=0.01)
        schedule = get_linear_schedule_with_warmup(optimizer, self.steps // 10, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build(arguments: argparse.Namespace):
    """The model to train, with a new head, by the command line's wishes."""
    # Mixed precision keeps the weights it trains in 32 bits, whatever the files have.
    dtype = torch.bfloat16 if arguments.precision == "bf16-true" else torch.float32
    names = dict(enumerate(small.PACKAGES))
    model = AutoModelForSequenceClassification.from_pretrained(
        arguments.model, dtype=dtype, id2label=names, label2id={name: label for label, name in names.items()}
    )
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if arguments.lora:  # trains the head as well, and saves it with the adapters
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=8, lora_alpha=16))
    return model.train()  # from_pretrained gives a model that is to be used, not trained


def main(arguments: list[str] | None = None) -> Classifier:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name on the hub; by default a small model is written first")
    parser.add_argument("--lora", action="store_true", help="train adapters of low rank and the head, not the model's own weights")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed or bf16-true")
    parser.add_argument("--length", type=int, default=128, help="the most tokens of a text")
    parser.add_argument("--batch", type=int, default=32, help="texts a step, over all devices")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--output", type=Path, default=Path("classifier"), help="the folder to save in")
    parser.add_argument("--strategy", default="autopar", help="any of Lightning's, to compare")
    parser.add_argument("--devices", default="auto", help="Lightning's devices: auto, a number, or a list such as 0,2")
    options = parser.parse_args(arguments)

    L.seed_everything(1)
    if options.model is None:
        options.model = str(options.output / "small")
        small.write_encoder(Path(options.model))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [{**tokenizer(text, truncation=True, max_length=options.length), "labels": label} for text, label in small.functions()]
    random.shuffle(texts)
    held_out = len(texts) // 10
    collator = DataCollatorWithPadding(tokenizer)  # to the longest text of a batch

    model = Classifier(build(options), len(small.PACKAGES), options.learning_rate, options.steps)
    trainer = L.Trainer(
        strategy=options.strategy,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.steps,
        val_check_interval=max(1, options.steps // 2),
        check_val_every_n_epoch=None,  # by steps, whatever an epoch is
        limit_val_batches=8,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        model,
        DataLoader(texts[held_out:], batch_size=options.batch, shuffle=True, drop_last=True, collate_fn=collator),
        DataLoader(texts[:held_out], batch_size=options.batch, collate_fn=collator),
    )

    if trainer.is_global_zero:  # under torchrun the others have nothing to save
        model.model.save_pretrained(options.output)  # with LoRA the adapters and the head alone
        tokenizer.save_pretrained(options.output)
        figures = {name: value.item() for name, value in trainer.callback_metrics.items()}
        print(f"\nvalidation accuracy {figures['val_accuracy']:.1%}, saved in {options.output}")
    return model


if __name__ == "__main__":
    main()
