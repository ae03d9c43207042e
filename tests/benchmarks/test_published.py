"""The benchmark over published runs: rows of each type are built and predicted, and none of them brings it down."""

import copy
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import published  # noqa: E402
from rows.foretold import _ALL_KERNELS_BYTES  # noqa: E402
from rows.hardware import host_slowness, inventory  # noqa: E402
from rows.pictures import picture  # noqa: E402
from rows.planned import has_first_flash, host_waits, narrow_products  # noqa: E402
from rows.question import transformer  # noqa: E402
from rows.row import Fields, NotBuilt, number, whole  # noqa: E402
from rows.score import kendall, summarise  # noqa: E402
from rows.whole_stages import stage_activations  # noqa: E402

from lightning_autopar.memory.cuda_overhead import context_bytes  # noqa: E402
from lightning_autopar.memory.footprint import Footprint, LayerFootprint  # noqa: E402
from lightning_autopar.memory.tape import MARKS  # noqa: E402
from lightning_autopar.plans import Plan  # noqa: E402


@pytest.fixture(scope="module")
def rows():
    return json.loads((BENCHMARKS / "rows" / "rows.json").read_text(encoding="utf-8"))


def small(row, **changes):
    """The row with a model of a few seconds' work."""
    row = copy.deepcopy(row)
    arch = row["arch"]
    if arch["type"].split()[0] in ("decoder", "encoder", "vit"):
        arch |= {"n_layers": 2, "hidden": 128, "n_heads": 4, "n_kv_heads": 4, "ffn": 256}
        arch.pop("head_dim", None)
    if arch.get("vocab"):
        arch["vocab"] = min(arch["vocab"], 512)
    if (arch.get("seq_len") or 0) > 64 and "patch" not in arch:
        arch["seq_len"] = 64
    return row | changes


def one(rows, name):
    return next(row for row in rows if row["id"] == name)


@pytest.mark.parametrize(
    "name",
    [
        "litgpt-hub-01",
        "litgpt-hub-02",
        "torchtune-l32-ac",
        "torchtune-l32-8bit",
        "torchtune-l32-qlora",
        "torchao-vith-5",
        "qwen-38",
        "hf-bert-ga4-gc-fp16-adafactor",
        "fsdpqlora-12",
        "torchao-nocompile-04",
        "swiftex-14b-z3",
        "ds-squad-32-32-pt",
        "hfblog-gpt2xl-2",
        "jz1b3-04",
    ],
)
def test_a_row_is_predicted(rows, name):
    (result,) = published.run([small(one(rows, name))])
    assert result["built"], (result["reason"], result.get("detail"))
    assert result["predicted"]["memory_gib"] > 0
    assert result["predicted"]["step_seconds"] > 0
    assert result["predicted"]["bytes"]["allocated"] > 0


def test_missing_fields_are_assumed_or_a_reason(rows):
    row = small(one(rows, "litgpt-hub-01"))
    without = []
    for name in row:
        for value in (None, "something else"):
            without.append({**row, name: value} if name != "arch" else {**row, "arch": {"type": "decoder"}})
    without += [{key: value for key, value in row.items() if key != name} for name in row]
    without += [{**row, "arch": {**row["arch"], name: None}} for name in row["arch"]]
    without.append({})
    groups, unbuilt = published.grouped(without)
    assert sum(map(len, groups)) + len(unbuilt) == len(without)
    assert all(result["reason"] for result in unbuilt.values())
    told = [assumed for group in groups for _, (_, _, _, assumed) in group]
    assert any(told), "something was assumed"


def test_a_row_of_odd_values_brings_nothing_down(rows):
    row = small(one(rows, "litgpt-hub-01"))
    odd = [
        {**row, "gpu_model": "abacus"},
        {**row, "tp": 2},
        {**row, "n_gpus": 0, "dp": -1},
        {**row, "precision": "none", "derived": None, "measured": "much"},
        {**row, "arch": {**row["arch"], "n_heads": 5}},
        {**row, "trainable": "dora r8"},
        {**row, "optimizer": "Lion"},
    ]
    results = published.run(odd)
    assert len(results) == len(odd)
    summary = summarise(results)
    assert summary["rows"] == len(odd)
    assert sum(summary["not_built"].values()) == sum(not result["built"] for result in results)
    assert results[0]["reason"] == "no GPU 'abacus' in the catalogue"
    assert results[1]["reason"] == "no plan with tp 2"


def test_most_transformers_can_be_built(rows):
    groups, unbuilt = published.grouped(rows)
    transformers = [index for index, row in enumerate(rows) if Fields(row).kind in ("decoder", "encoder", "vit", "encoder-decoder")]
    assert sum(index not in unbuilt for index in transformers) >= 0.85 * len(transformers)
    assert len({index for group in groups for index, _ in group} | set(unbuilt)) == len(rows)


def events(tape):
    """What happens, by size instead of by name."""
    sizes = {}
    for event in tape:
        if event.action in ("allocate", "resize"):
            sizes[event.storage] = event.size_bytes
        yield event.action, event.kind, event.storage if event.action in MARKS else sizes[event.storage]


@pytest.mark.parametrize(
    ("vocab", "changes"),
    [
        (512, {}),  # the optimizer goes over all parameters at once
        (512, {"optimizer": "AdamW (torch 1.13)", "framework": "torch 1.13", "precision": {"params": "fp32", "compute": "fp16 autocast"}}),
        # Embedding and head are larger than three blocks.
        (2048, {"activation_checkpointing": "full", "framework": "fsdp_qlora", "precision": {"params": "bf16", "compute": "bf16"}}),
    ],
)
def test_a_taller_model_is_what_its_trace_gives(rows, vocab, changes):
    from rows.question import question
    from rows.tracing import Footprints

    row = small(one(rows, "gpt2h100-b8"), **changes)
    row["arch"] |= {"n_layers": 12, "vocab": vocab, "tied_embeddings": vocab == 512}
    asked = question(Fields(row))
    footprints = Footprints(None, "")
    extended, traced = footprints.of(asked, whole=False), footprints.of(asked, whole=True)
    assert len(extended.blocks) == len(traced.blocks) == 12
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "flops", "moved_bytes"):
        assert getattr(extended, name) == getattr(traced, name), name
    fullest = [max(moment.total_bytes for moment in one.moments) for one in (extended, traced)]
    assert fullest[0] == pytest.approx(fullest[1], rel=0.01)
    counts = [sum(work.count for work in one.optimizer_work) for one in (extended, traced)]
    assert counts[0] == counts[1]
    assert list(events(extended.tape)) == list(events(traced.tape))


def test_blocks_that_differ_have_no_taller_tape():
    from rows.tapes import taller_tape

    from lightning_autopar.memory.tape import Tape

    def tape(*sizes):
        made = Tape()
        made.add("leave", -1)
        for index, size in enumerate(sizes):
            made.add("forward", index)
            made.add("allocate", index, size, "activations")
            made.add("leave", index)
        made.add("return", len(sizes))
        for index in reversed(range(len(sizes))):
            made.add("backward", index)
            made.add("free", index, 0, "activations")
            made.add("return", index)
        made.add("optimizer", -1)
        return made

    assert list(events(taller_tape(tape(4, 4, 4, 4), tape(4, 4, 4), 4, 6))) == list(events(tape(*[4] * 6)))
    with pytest.raises(ValueError, match="different storages"):
        taller_tape(tape(4, 5, 4, 4), tape(4, 5, 4), 4, 6)
    with pytest.raises(ValueError, match="plain one"):
        taller_tape(tape(4, 4, 4), tape(4, 4, 4), 4, 6)


def test_a_pipeline_is_cut_by_what_its_library_balances():
    from types import SimpleNamespace

    from rows.planned import _balanced, _even

    blocks = [SimpleNamespace(flops=1, backward_flops=2)] * 8
    outer = [SimpleNamespace(flops=0, backward_flops=0)] * 8 + [SimpleNamespace(flops=4, backward_flops=8)]
    assert _even(8, 2) == [4]
    assert _balanced(SimpleNamespace(blocks=blocks, outer=outer), 2) == [6]  # the head weighs as much as four blocks
    assert _balanced(SimpleNamespace(blocks=blocks, outer=[]), 4) == [2, 4, 6]


@pytest.mark.parametrize(
    ("said", "count", "kinds"),
    [
        ("not stated (A100 pair)", 2, {"nvlink"}),
        ("not stated", 8, {"nvlink"}),
        ("NVLink", 2, {"nvlink"}),
        ("no NVLink, PCIe 4.0", 4, {"p2p"}),
    ],
)
def test_links_that_no_row_names_are_those_of_the_model(said, count, kinds):
    fields = Fields({"gpu_model": "A100-40GB", "n_gpus": count, "gpus_per_node": count, "nodes": 1, "interconnect": said})
    assert {link.kind for link in inventory(fields).links} == kinds
    assert any("linked" in sentence for sentence in fields.assumptions) == ("not stated" in said)


def test_a_desktops_memory_is_slower_than_a_servers():
    assert host_slowness(Fields({"interconnect": "PCIe 4.0 x16, DDR4 host (Ryzen 5600)"})) == 5
    assert host_slowness(Fields({"interconnect": "NVLink"})) == 1


def test_pictures_are_laid_out_as_their_library_does(rows):
    amp = one(rows, "dle-resnet50v1.5-A100-80GB-1-mixed")
    assert picture(Fields(amp)).channels_last
    assert not picture(Fields(amp | {"precision": amp["precision"] | {"compute": "tf32"}})).channels_last
    assert picture(Fields(one(rows, "timm-nhwc-resnet50"))).channels_last
    assert not picture(Fields(one(rows, "timm-nchw-resnet152-oom"))).channels_last


def test_only_what_a_trace_depends_on_is_in_its_key():
    from rows.tracing import sources

    names = set(sources())
    assert {"lightning_autopar.memory.trace.tape_recorder", "lightning_autopar.memory.work.work", "rows.fused", "rows.transformer"} <= names
    assert not {"lightning_autopar.planning.plan_bytes", "rows.foretold", "rows.taller"} & names


def test_scores():
    assert kendall([1, 2, 3], [10, 20, 30]) == 1
    assert kendall([1, 2, 3], [3, 2, 1]) == -1
    assert kendall([1, 1], [1, 2]) is None
    assert whole("24+24") == 24
    assert number("about 1.5 GB") == 1.5
    with pytest.raises(NotBuilt, match="no plan with tp 2"):
        published.layout(Fields({"tp": 2}))


@pytest.mark.parametrize(
    ("attention", "framework", "first"),
    [
        ("flash", "Composer / pytorch 2.1 image", True),
        ("flash", "Composer / pytorch 2.3 image", False),
        ("flash-attn 2", "HF Trainer, torch 2.0", False),
        ("math", "torch 1.13", False),
        ("flash", "HF Trainer", False),
    ],
)
def test_fused_attention_is_as_old_as_its_torch(attention, framework, first):
    fields = Fields({"attention": attention, "framework": framework})
    assert has_first_flash(fields) is first
    assert bool(fields.assumptions) is first


def test_products_of_few_bits_are_faster_and_kept_as_their_policy_knows_them(rows):
    known = one(rows, "torchao-nocompile-04")

    def fields(compute):
        return Fields(known | {"precision": known["precision"] | {"compute": compute}})

    assert [narrow_products(fields(name)) for name in ("bf16", "rowwise with bfloat16 all-gather", "NVFP4 (bf16 tail)")] == [
        "",
        "fp8",
        "fp4",
    ]
    assert [transformer(fields(name)).recompute for name in ("bf16", "float8", "nvfp4")] == ["operations", "operations", "attention"]
    wide, narrow = published.run([small(known), small(known, precision=known["precision"] | {"compute": "nvfp4"})])
    assert narrow["predicted"]["bytes"]["activations"] < wide["predicted"]["bytes"]["activations"]


@pytest.mark.parametrize(
    ("framework", "old", "all_kernels"),
    [
        ("HF trainer 4.17, torch 1.10", True, True),
        ("torch 1.13", True, False),
        ("Megatron-LM v1.1.5", True, True),
        ("NeMo, Megatron-Bridge", False, False),
        ("torchtitan (FSDP2)", False, False),
    ],
)
def test_what_is_old_is_read_off_the_framework(framework, old, all_kernels):
    fields = Fields({"framework": framework})
    assert (fields.is_old, fields.loads_all_kernels) == (old, all_kernels)


def test_gradients_that_stay_lie_where_activations_were(rows):
    kept = one(rows, "hf-bert-vanilla")
    (result,) = published.run([small(kept)])
    (freed,) = published.run([small(kept, framework="HF trainer, torch 2.4")])
    assert result["predicted"]["bytes"]["rounding"] > 0
    assert result["predicted"]["bytes"]["context"] - freed["predicted"]["bytes"]["context"] == 688 << 20


def test_all_kernels_take_more_on_ampere_which_needs_cuda_11(rows):
    kept = one(rows, "hf-bert-vanilla")
    frameworks = ("HF trainer, torch 1.10", "HF trainer, torch 2.4")
    found = published.run([small(kept, gpu_model="A100-40GB", gpu_memory_gib=40, framework=name) for name in frameworks])
    older, newer = (result["predicted"]["bytes"]["context"] for result in found)
    assert older - newer == 1188 << 20


def test_gpt2_has_its_own_gelu_in_transformers(rows):
    gpt2 = one(rows, "hf-gpt2-ddp-nvlink")
    assert transformer(Fields(gpt2)).act == "new gelu"
    assert transformer(Fields(gpt2 | {"framework": "Composer"})).act == "gelu"
    assert transformer(Fields(one(rows, "hf-bert-vanilla"))).act == "gelu"
    assert published.run([small(gpt2)])[0]["built"]


def test_bingberts_gelu_keeps_three_tensors(rows):
    from rows.question import question
    from rows.tracing import Footprints

    scripted = small(one(rows, "ds-squad-32-32-pt"))
    asked = [question(Fields(scripted | {"framework": name})) for name in (scripted["framework"], "apex-style PyTorch")]
    ours, torchs = (Footprints(None, "").of(each, whole=True).blocks[0].activation_bytes for each in asked)
    assert ours - torchs == 2 * 32 * 64 * 256 * 2  # two more


def test_a_norm_in_one_kernel_is_read_off_the_row(rows):
    assert transformer(Fields(one(rows, "torchtitan-old-07"))).norm == "fused"
    assert transformer(Fields(one(rows, "torchtitan-old-06"))).norm == "hf"


def test_under_apex_each_backward_is_followed_by_passes_over_the_masters_gradients(rows):
    apex = one(rows, "ds-squad-16-4-pt")
    assert apex["grad_accum"] > 1
    with_masters, without = published.run([small(apex), small(apex, framework="plain PyTorch (BingBertSquad), torch 1.4")])
    assert with_masters["predicted"]["seconds"]["optimizer"] > without["predicted"]["seconds"]["optimizer"]
    # A gradient in fp32 beside each in 16 bits, from the first micro-batch to the update.
    held, kept = (result["predicted"]["bytes"]["gradients"] for result in (with_masters, without))
    assert held == 3 * kept > 0
    once, other = published.run(
        [small(apex, grad_accum=1, global_batch=4), small(apex, framework="plain PyTorch (BingBertSquad), torch 1.4", grad_accum=1)]
    )
    assert once["predicted"]["bytes"]["gradients"] == other["predicted"]["bytes"]["gradients"]


@pytest.mark.parametrize(
    ("framework", "waits"),
    [
        ("apex-style PyTorch (BingBertSquad)", "both"),
        ("plain PyTorch, apex O2", "backward"),
        ("HF Trainer (Jan-2022), torch eager", "backward"),
        ("ms-swift (HF Trainer + DeepSpeed)", "backward"),
        ("HF Trainer 4.2 + DeepSpeed", ""),
        ("HF Trainer 4.10", ""),
        ("HF Trainer 4.11", "backward"),
        ("HF Trainer run_clm.py, torch 1.8 nightly, DDP", ""),
        ("plain PyTorch", ""),
    ],
)
def test_who_reads_a_number_in_each_micro_batch_is_read_off_the_framework(framework, waits):
    assert host_waits(Fields({"framework": framework, "precision": {"params": "fp16 + fp32 master"}})) == waits
    assert host_waits(Fields({"framework": "Megatron-DeepSpeed", "optimizer": "Adam (apex FusedAdam)"})) == ""
    if "apex" in framework:
        assert host_waits(Fields({"framework": framework, "precision": {"params": "fp32"}})) == ""


def test_a_host_that_waits_cant_run_ahead(rows):
    waiting = one(rows, "hf-bert-adafactor")
    frameworks = ("HF Trainer 4.17, torch 1.10", "HF Trainer 4.2, torch 1.10")
    late, early = (result["predicted"]["seconds"] for result in published.run([waiting | {"framework": name} for name in frameworks]))
    # Adafactor's many small operations can't be issued while the device is at its backward.
    assert late["overhead"] > early["overhead"] == 0
    assert late["step"] - early["step"] == pytest.approx(late["overhead"])


def test_stages_that_are_checkpointed_whole_keep_inputs_of_all_micro_batches_and_all_of_one():
    blocks = tuple(LayerFootprint(fqn=str(index), input_bytes=4 << index, activation_bytes=64 << index) for index in range(4))
    outer = tuple(LayerFootprint(fqn="", activation_bytes=2**16 << index) for index in range(5))
    sizes = ("parameter", "gradient", "optimizer", "activation", "temporary", "buffer", "input")
    totals = {f"{name}_bytes": 0 for name in sizes}
    footprint = Footprint(parameters=0, trainable_parameters=0, batch_size=2, flops=0, blocks=blocks, outer=outer, **totals)
    plan = Plan(engine="pipeline", devices=("a", "b"), cuts=("2",), schedule="1f1b", micro_batches=2, recompute=("0", "1", "2", "3"))
    first = 64 + 8 + 128 + 2**16 * (1 + 2 + 4)
    second = 256 + 32 + 512 + 2**16 * (8 + 16)
    assert stage_activations(footprint, plan) == (first // 2, second // 2 + 2 * (16 // 2))


def test_gpipes_stages_hold_less_than_blocks_that_no_stage_recomputes(rows):
    (result,) = published.run([one(rows, "torchgpipe-unet-speed-pipeline-8")])
    assert result["predicted"]["fits"]
    assert result["predicted"]["bytes"]["context"] == context_bytes("P40") + _ALL_KERNELS_BYTES  # one process, without NCCL


def test_what_is_saved_outside_of_recomputed_blocks_goes_to_the_host_too(rows):
    offloading = small(one(rows, "aws-fsdp-llama31"))
    offloading["arch"]["vocab"] = 512
    wider = copy.deepcopy(offloading)
    wider["arch"]["vocab"] = 4096
    less, more = (result["predicted"]["seconds"]["offload"] for result in published.run([offloading, wider]))
    assert more > less > 0
