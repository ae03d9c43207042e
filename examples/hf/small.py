"""Small models of Hugging Face's format and texts to train them on, made from what every machine with Python has.

The two examples use this where they are given no model: nothing has to be downloaded. What it writes is what the hub has: ``config.json``,
weights as safetensors in several files with their index, and a fast tokenizer.
"""

import ast
import os
import textwrap
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STANDARD_LIBRARY = Path(os.__file__).parent
#: The packages that the sequence classifier tells apart.
PACKAGES = ("asyncio", "email", "tkinter", "unittest")
VOCABULARY = 1024


def texts() -> list[str]:
    """Python's own sources, those at the top of its standard library."""
    return [path.read_text(encoding="utf-8") for path in sorted(STANDARD_LIBRARY.glob("[a-f]*.py"))]


def functions() -> list[tuple[str, int]]:
    """Functions of some of Python's packages, each with the number of its package."""
    found = []
    for label, package in enumerate(PACKAGES):
        for path in sorted((STANDARD_LIBRARY / package).glob("*.py")):
            source = path.read_text(encoding="utf-8")
            lines = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef):
                    found.append((textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])), label))
    return found


def causal_tokenizer() -> PreTrainedTokenizerFast:
    """One that begins each text by ``<s>``."""
    return _trained(texts()[:20], whole="<s> $A", special=["<s>", "</s>", "<unk>"], bos_token="<s>", eos_token="</s>")


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """One that pads, and puts each text between ``[CLS]`` and ``[SEP]``."""
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return _trained(texts()[:20], whole="[CLS] $A [SEP]", special=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], **names)


def write_causal_lm(folder: Path, *, width: int = 128, layers: int = 4) -> None:
    """A Llama of a million parameters, untrained, whose output layer is its embedding."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1MB")
    causal_tokenizer().save_pretrained(folder)


def write_encoder(folder: Path, *, width: int = 128, layers: int = 4) -> None:
    """A BERT without a head, as one that is to be fine-tuned; untrained."""
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder, max_shard_size="1MB")
    encoder_tokenizer().save_pretrained(folder)


def _trained(corpus: list[str], *, whole: str, special: list[str], **names: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in special]
    tokenizer.post_processor = processors.TemplateProcessing(single=whole, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
