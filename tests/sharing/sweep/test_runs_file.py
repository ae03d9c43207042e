"""A sweep as it is written down: what each form comes to, and what can't be."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from lightning_autopar.sharing.sweep.runs_file import named, read_sweep, sweep_of


def listed(tmp_path: Path, text: str, name: str = "grid.yaml") -> Path:
    (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path / name


def test_every_form_of_a_run(tmp_path: Path) -> None:
    sweep = read_sweep(
        listed(
            tmp_path,
            """
            devices: 2xcpu:4GiB
            retries: 1
            env: {SEED: 1, COLOUR: red}
            runs:
              - train.py --lr 0.1
              - {command: "python3 train.py --lr 0.3", name: lr03, priority: 5, env: {SEED: 2}, cwd: there}
              - command: "--allow ddp train.py --lr {lr} --width {width} --json '{}'"
                matrix: {lr: [0.1, 0.3], width: [64, 128]}
            """,
        )
    )
    assert (sweep.name, sweep.devices, sweep.retries, len(sweep.runs)) == ("grid", "2xcpu:4GiB", 1, 6)
    first, second, *grid = sweep.runs
    assert (first.name, first.words) == ("train-lr-0.1", ("train.py", "--lr", "0.1"))
    assert first.env == {"SEED": "1", "COLOUR": "red"}
    assert (second.name, second.words, second.priority, second.cwd) == ("lr03", ("train.py", "--lr", "0.3"), 5, "there")
    assert second.env == {"SEED": "2", "COLOUR": "red"}
    assert [run.name for run in grid] == ["lr0.1-width64", "lr0.1-width128", "lr0.3-width64", "lr0.3-width128"]
    assert grid[2].words == ("--allow", "ddp", "train.py", "--lr", "0.3", "--width", "64", "--json", "{}")


def test_a_text_file_has_a_command_a_line(tmp_path: Path) -> None:
    sweep = read_sweep(listed(tmp_path, "# mine\ntrain.py --lr 0.1\n\nlightning-autopar run train.py --lr 0.1\n", "two runs.txt"))
    assert sweep.name == "two-runs"
    assert [(run.name, run.words) for run in sweep.runs] == [
        ("train-lr-0.1", ("train.py", "--lr", "0.1")),
        ("train-lr-0.1-2", ("train.py", "--lr", "0.1")),
    ]


def test_a_name_in_a_matrix_is_made_each_ones_own() -> None:
    assert named(sweep_of(["a.py"]), "mine").name == "mine"
    with pytest.raises(ValueError, match="names files"):
        named(sweep_of(["a.py"]), "../mine")


def test_named_matrices(tmp_path: Path) -> None:
    path = listed(
        tmp_path, "runs: [{command: 'a.py {x}', name: a, matrix: {x: [1, 2]}}, {command: 'b.py {x}', name: 'b{x}', matrix: {x: [1, 2]}}]"
    )
    assert [run.name for run in read_sweep(path).runs] == ["a-x1", "a-x2", "b1", "b2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runs: []", "'runs' must be a list of at least one"),
        ("3", "no mapping with the key 'runs'"),
        ("runs: [a.py]\nrun: 3", "unknown key 'run'"),
        ("runs: [{command: a.py, prio: 3}]", "run 1 has the unknown key 'prio'"),
        ("runs: [{name: a}]", "must be a command, or a mapping with a 'command'"),
        ("runs: [{command: a.py, priority: high}]", "'priority' of run 1 is 'high'"),
        ("runs: [{command: a.py, priority: 101}]", "from -100 to 100"),
        ("runs: [{command: a.py, matrix: {lr: [1]}}]", r"has no \{lr\}"),
        ("runs: [{command: 'a.py {lr}', matrix: {lr: 1}}]", "must give each name a list"),
        ("runs: [{command: a.py, name: x}, {command: b.py, name: x}]", "two runs have the name 'x'"),
        ("runs: [{command: a.py, name: ../x}]", "it names files"),
        ("runs: [{command: a.py, env: [1]}]", "'env' of run 1"),
        ('runs: ["a.py \'x"]', "can't be split into words"),
        ("runs: ['python']", "is empty"),
        ("runs: [a.py]\nretries: -1", "'retries' is -1"),
        ("runs: [train.py --lr {lr: 1", "is no YAML"),
    ],
)
def test_what_cant_be_is_said_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        read_sweep(listed(tmp_path, text))
    assert "grid.yaml" in str(error.value)


def test_a_file_that_isnt_there_is_said() -> None:
    with pytest.raises(ValueError, match=r"'nowhere\.yaml' can't be read"):
        read_sweep("nowhere.yaml")
