"""Fine-tune a causal language model of Hugging Face: all of its weights, or LoRA adapters.

Nothing here knows of lightning_autopar but the Trainer's ``strategy="autopar"``: with ``--strategy auto`` it is plain Lightning. Without a
model it writes a small one first; the texts are Python's own sources unless others are given.

    python examples/hf/causal_lm.py
    python examples/hf/causal_lm.py --lora --gradient-checkpointing --precision bf16-mixed
    python examples/hf/causal_lm.py --model meta-llama/Llama-3.1-8B --text notes/*.txt --precision bf16-true
    AUTOPAR_DEVICES="2xcpu:2GiB" python examples/hf/causal_lm.py
    lightning-autopar plan --devices 8xH100-80GB examples/hf/causal_lm.py --model examples/hf/llama-8b --config-only --precision bf16-true
"""

import argparse
from pathlib import Path

import lightning as L
import small
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup


class CausalLM(L.LightningModule):
    """A causal language model of Hugging Face that learns to continue texts."""

    def __init__(self, model, learning_rate: float, steps: int) -> None:
        super().__init__()
        self.model = model
        self.learning_rate, self.steps = learning_rate, steps

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss = self.model(**batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        self.log("val_loss", self.model(**batch, use_cache=False).loss, prog_bar=True)

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=0.01)
        schedule = get_linear_schedule_with_warmup(optimizer, self.steps // 10, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build(arguments: argparse.Namespace):
    """The model to train, by the command line's wishes."""
    # Mixed precision keeps the weights it trains in 32 bits, whatever the files have.
    dtype = torch.bfloat16 if arguments.precision == "bf16-true" else torch.float32
    if arguments.config_only:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if arguments.lora:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=8, lora_alpha=16))
    return model.train()  # from_pretrained gives a model that is to be used, not trained


def passages(texts: list[str], tokenizer, length: int) -> list[dict[str, Tensor]]:
    """The texts, one after the other, as passages of so many tokens."""
    tokens = torch.tensor([token for text in texts for token in tokenizer(text, verbose=False)["input_ids"]])
    return [{"input_ids": passage, "labels": passage} for passage in tokens[: len(tokens) // length * length].split(length)]


def main(arguments: list[str] | None = None) -> CausalLM:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name on the hub; by default a small model is written first")
    parser.add_argument("--config-only", action="store_true", help="shapes without weights: to plan for the model, not to train it")
    parser.add_argument("--lora", action="store_true", help="train adapters of low rank, not the model's own weights")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed or bf16-true")
    parser.add_argument("--text", nargs="+", type=Path, help="text files to train on")
    parser.add_argument("--length", type=int, default=64, help="tokens of a passage")
    parser.add_argument("--batch", type=int, default=16, help="passages a step, over all devices")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("fine-tuned"), help="the folder to save in")
    parser.add_argument("--strategy", default="autopar", help="any of Lightning's, to compare")
    parser.add_argument("--devices", default="auto", help="Lightning's devices: auto, a number, or a list such as 0,2")
    options = parser.parse_args(arguments)

    L.seed_everything(1)
    if options.model is None:
        options.model = str(options.output / "small")
        small.write_causal_lm(Path(options.model))
    # A plan asks for the shapes of batches alone, which any tokenizer gives.
    tokenizer = small.causal_tokenizer() if options.config_only else AutoTokenizer.from_pretrained(options.model)
    texts = [path.read_text(encoding="utf-8") for path in options.text] if options.text else small.texts()
    train = passages(texts[:-1], tokenizer, options.length)
    validation = passages(texts[-1:], tokenizer, options.length)

    model = CausalLM(build(options), options.learning_rate, options.steps)
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
        DataLoader(train, batch_size=options.batch, shuffle=True, drop_last=True),
        DataLoader(validation, batch_size=options.batch),
    )

    if trainer.is_global_zero:  # under torchrun the others have nothing to save
        model.model.save_pretrained(options.output)  # with LoRA the adapters alone
        tokenizer.save_pretrained(options.output)
        prompt = tokenizer("def ", return_tensors="pt")
        sample = model.model.eval().generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        print(f"\nvalidation loss {trainer.callback_metrics['val_loss']:.3f}, saved in {options.output}\n")
        print(tokenizer.decode(sample[0], skip_special_tokens=True))
    return model


if __name__ == "__main__":
    main()
