from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from lightning_autopar.devices.host import host_cores, host_memory

PHYSICAL = (64_000, 48_000)


def write(root: Path, **files: str) -> None:
    """Files by path, ``__`` between folders and ``_`` kept: a fake ``/proc`` and ``/sys``."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def group(root: Path, folder: str, **files: object) -> None:
    """A cgroup's files; ``memory_max`` is ``memory.max``."""
    path = root / "sys/fs/cgroup" / folder
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (path / name.replace("_", ".", 1)).write_text(f"{value}\n")


def member(root: Path, *lines: str) -> None:
    write(root, proc__self__cgroup="".join(f"{line}\n" for line in lines))


def memory(root: Path) -> tuple[int, int]:
    return host_memory(root=root, physical=PHYSICAL)


def test_without_cgroups_it_is_the_machines(tmp_path: Path) -> None:
    assert memory(tmp_path) == PHYSICAL
    assert host_cores(root=tmp_path, available=6) == 6


def test_the_machine_itself() -> None:
    total, free = host_memory()
    assert 0 < free <= total <= psutil.virtual_memory().total
    assert 1 <= host_cores() <= (psutil.cpu_count() or 1)


def test_a_v2_limit(tmp_path: Path) -> None:
    member(tmp_path, "0::/job")
    group(tmp_path, "job", memory_max=10_000, memory_current=4_000, memory_stat="anon 1000\ninactive_file 1500\nactive_file 5")
    assert memory(tmp_path) == (10_000, 7_500)


def test_v2_without_a_limit(tmp_path: Path) -> None:
    member(tmp_path, "0::/job")
    group(tmp_path, "job", memory_max="max", memory_current=4_000)
    assert memory(tmp_path) == PHYSICAL


def test_the_throttling_limit_counts_too(tmp_path: Path) -> None:
    member(tmp_path, "0::/job")
    group(tmp_path, "job", memory_max="max", memory_high=9_000, memory_current=4_000)
    assert memory(tmp_path) == (9_000, 5_000)


def test_a_parents_limit_binds(tmp_path: Path) -> None:
    member(tmp_path, "0::/user/session/job")
    group(tmp_path, "user", memory_max=8_000, memory_current=7_500)
    group(tmp_path, "user/session", memory_max="max", memory_current=7_000)
    group(tmp_path, "user/session/job", memory_max=20_000, memory_current=100)
    assert memory(tmp_path) == (8_000, 500)


def test_in_a_container_the_mounts_root_is_the_own_group(tmp_path: Path) -> None:
    member(tmp_path, "0::/docker/0123abcd")
    group(tmp_path, "", memory_max=8_000, memory_current=1_000)
    assert memory(tmp_path) == (8_000, 7_000)


def test_a_v1_limit(tmp_path: Path) -> None:
    member(tmp_path, "4:memory:/job", "3:cpu,cpuacct:/job", "1:name=systemd:/job")
    group(tmp_path, "memory/job", memory_limit_in_bytes=10_000, memory_usage_in_bytes=6_000, memory_stat="total_inactive_file 500")
    group(tmp_path, "memory", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=50_000)
    assert memory(tmp_path) == (10_000, 4_500)


def test_a_v1_limit_of_a_group_that_a_container_does_not_see(tmp_path: Path) -> None:
    member(tmp_path, "4:memory:/docker/0123abcd")
    stat = "cache 10\nhierarchical_memory_limit 7000\ntotal_inactive_file 500"
    group(tmp_path, "memory", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=6_000, memory_stat=stat)
    assert memory(tmp_path) == (7_000, 1_500)


def test_beyond_the_limit_nothing_is_free(tmp_path: Path) -> None:
    member(tmp_path, "0::/job")
    group(tmp_path, "job", memory_max=1_000, memory_current=4_000)
    assert memory(tmp_path) == (1_000, 0)


def test_a_limit_beyond_the_machine_changes_nothing(tmp_path: Path) -> None:
    member(tmp_path, "0::/job")
    group(tmp_path, "job", memory_max=1_000_000, memory_current=4_000)
    assert memory(tmp_path) == PHYSICAL


@pytest.mark.parametrize(("quota", "expected"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("1600000 100000", 8)])
def test_a_v2_quota(tmp_path: Path, quota: str, expected: int) -> None:
    member(tmp_path, "0::/job")
    group(tmp_path, "job", cpu_max=quota)
    assert host_cores(root=tmp_path, available=8) == expected


@pytest.mark.parametrize(("quota", "expected"), [(300000, 3), (-1, 8)])
@pytest.mark.parametrize("folder", ["cpu,cpuacct/job", "cpu/job", "cpu"])
def test_a_v1_quota(tmp_path: Path, quota: int, expected: int, folder: str) -> None:
    member(tmp_path, "3:cpu,cpuacct:/job")
    group(tmp_path, folder, cpu_cfs_quota_us=quota, cpu_cfs_period_us=100000)
    assert host_cores(root=tmp_path, available=8) == expected


def test_the_narrowest_quota_binds(tmp_path: Path) -> None:
    member(tmp_path, "0::/user/job")
    group(tmp_path, "user", cpu_max="200000 100000")
    group(tmp_path, "user/job", cpu_max="400000 100000")
    assert host_cores(root=tmp_path, available=8) == 2
