"""No plan needs anything compiled, and nothing waits for somebody else's compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_autopar.strategies.zero.deepspeed_compat import import_deepspeed, refuse_build


@pytest.mark.parametrize("name", ["CPUAdamBuilder", "AsyncIOBuilder", "ShareMemCommBuilder"])
def test_a_lock_that_a_killed_build_left_holds_nobody_up(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    import_deepspeed("cpu")
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(OpBuilder, "jit_load", refuse_build)  # as in the processes of a ZeRO plan
    builder = get_accelerator().create_op_builder(name)
    lock = tmp_path / builder.name / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"DeepSpeed wants to compile its .*, which no plan needs"):
        builder.load()  # a wait for the lock has no end
    assert list(lock.parent.iterdir()) == [lock]
