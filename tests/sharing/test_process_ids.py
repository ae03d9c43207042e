"""What the kernel says of a process, which may be somebody else's by now."""

from __future__ import annotations

import os
import signal

from lightning_autopar.sharing.process_ids import ignores, inner_pid, is_drivers, is_stopped, lives, owner_uid, pid_namespace, started_ticks


def test_what_the_kernel_says_of_a_process() -> None:
    me = os.getpid()
    assert lives(me, started_ticks(me))
    assert not lives(me, started_ticks(me) + 1)
    assert not lives(2**22 + 1, 0)
    assert not lives(0, 0)
    assert not lives(-1, 0)
    assert (owner_uid(me), owner_uid(2**22 + 1), started_ticks(2**22 + 1)) == (os.geteuid(), None, 0)
    assert pid_namespace().startswith("pid:")
    assert inner_pid(me) == me or not is_drivers(me), "of the host's own namespace it is the same"
    assert inner_pid(2**22 + 1) is None
    assert not is_stopped(me)
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        assert ignores(me, signal.SIGUSR2)
        assert not ignores(me, signal.SIGALRM)
    finally:
        signal.signal(signal.SIGUSR2, before)
