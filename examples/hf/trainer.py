"""Fine-tune a causal language model of Hugging Face by transformers' own Trainer.

Nothing here knows of lightning_autopar or of Lightning. It runs by itself, and under the best plan that its Trainer can run:

    python examples/hf/trainer.py
    lightning-autopar plan --devices 8xH100-80GB examples/hf/trainer.py
    lightning-autopar run examples/hf/trainer.py
    lightning-autopar run --devices 2xcpu:2GiB examples/hf/trainer.py --batch 8
"""

import argparse
from pathlib import Path

import small
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments


def passages(texts: list[str], tokenizer, length: int) -> list[dict[str, list[int]]]:
    """The lines of the texts, a few together, of at most so many tokens each."""
    found = []
    for text in texts:
        lines = text.splitlines()
        for start in range(0, len(lines), 4):
            tokens = tokenizer("\n".join(lines[start : start + 4]), truncation=True, max_length=length)["input_ids"]
            found.append({"input_ids": tokens})
    return found


def main(arguments: list[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name on the hub; by default a small model is written first")
    parser.add_argument("--text", nargs="+", type=Path, help="text files to train on")
    parser.add_argument("--length", type=int, default=64, help="the most tokens of a passage")
    parser.add_argument("--batch", type=int, default=16, help="passages a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 mixed precision")
    parser.add_argument("--output", type=Path, default=Path("fine-tuned"), help="the folder to save in")
    options = parser.parse_args(arguments)

    torch.manual_seed(1)
    if options.model is None:
        options.model = str(options.output / "small")
        if not (options.output / "small" / "config.json").exists():
            small.write_causal_lm(options.output / "small")
    tokenizer = AutoTokenizer.from_pretrained(options.model, pad_token="</s>")
    texts = [path.read_text(encoding="utf-8") for path in options.text] if options.text else small.texts()[:10]

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=str(options.output),
            per_device_train_batch_size=options.batch,
            max_steps=options.steps,
            learning_rate=1e-3,
            bf16=options.bf16,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=passages(texts, tokenizer, options.length),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    return trainer


if __name__ == "__main__":
    main()
