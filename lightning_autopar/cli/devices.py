"""``lightning-autopar devices`` and ``calibrate``: which devices there are, who uses them, what a plan would see, and how fast they are.

It prints measured rates of products, memory and collectives. It neither measures nor predicts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from lightning_autopar.cli.arguments import add_devices
from lightning_autopar.cli.device_users import DeviceUser, users_of
from lightning_autopar.cli.spinner import progress
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Device, Inventory, device_label, usable
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.ledger import is_leased, live, without_leased
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.sharing.runs.requests import everyones_runs
from lightning_autopar.text import format_bytes, format_seconds, printable
from lightning_autopar.timing.measured_curves import Calibration, Curve, load_calibration
from lightning_autopar.timing.measured_rates import device_key, group_key
from lightning_autopar.timing.rates import COLLECTIVES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: The smallest dimension of the matrices whose rate is shown: the widest that was measured.
_SMALLEST = 512
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What a device reaches; None where it wasn't measured.

    Args:
        flops_per_second: in large products of fp32 matrices.
        bytes_per_second: in large additions.
        issue_seconds: for issuing one operation in a forward.
    """

    flops_per_second: float | None
    bytes_per_second: float | None
    issue_seconds: float | None

    def __str__(self) -> str:
        words = []
        if self.flops_per_second is not None:
            words.append(f"{self.flops_per_second / 1e9:.3g} GFLOP/s")
        if self.bytes_per_second is not None:
            words.append(f"{format_bytes(self.bytes_per_second)}/s")
        if self.issue_seconds is not None:
            words.append(f"{format_seconds(self.issue_seconds)} an operation")
        return ", ".join(words)


def speeds(calibration: Calibration, device: Device) -> Speeds:
    """The measured speeds of a device."""
    key = device_key(device)
    product, added, issue = (
        _curve(calibration, key, *which) for which in ((f"matmul/{_SMALLEST}", "fp32"), ("add", "fp32"), ("issue/forward", ""))
    )
    flops = None
    if product is not None:
        wide = product.sizes[-1]
        flops = 2 * _SMALLEST * wide * wide / product.seconds[-1]
    return Speeds(
        flops_per_second=flops,
        bytes_per_second=None if added is None else added.sizes[-1] / added.seconds[-1],
        issue_seconds=None if issue is None else issue.seconds[0],
    )


def collective_lines(calibration: Calibration, inventory: Inventory) -> Iterator[str]:
    """A line for each collective between devices of this host: its latency, and its rate in large messages."""
    here = [device for device in inventory.devices if device.kind != "catalogue" and device.node == 0]
    for count in range(2, len(here) + 1):
        for collective in COLLECTIVES:
            curve = calibration.curves.get((group_key(here[:count], inventory), collective, ""), {}).get(count)
            if curve is not None:
                large = max(curve.sizes[-1], _LARGE_BYTES)
                rate = format_bytes(large / curve.at(large))
                yield f"  {collective} of {count} ranks: {format_seconds(curve.seconds[0])}, {rate}/s in large messages"


def _curve(calibration: Calibration, subject: str, thing: str, dtype: str) -> Curve | None:
    by_ranks = calibration.curves.get((subject, thing, dtype), {})
    return by_ranks[min(by_ranks)] if by_ranks else None


_DONE, _FAILED = 0, 2
_BAR = 20
#: The share of utilisation from which on it is coloured.
_BUSY, _FULL = 0.5, 0.9
_DEVICES_EXAMPLES = """\
examples:
  lightning-autopar devices                             who is on what, what is free, what a plan would see
  lightning-autopar devices --devices 2xcpu:4GiB        what a spec means on this host
  lightning-autopar devices --json                      for a program to read
  watch -n 2 lightning-autopar devices                  again and again

"a plan sees" is the free memory less what other runs have leased and not taken yet, less the margin of 5 % that the strategy leaves
unused (memory_margin).

exit codes: 0 listed, 2 the devices can't be read, or the spec is malformed
"""
_CALIBRATE_EXAMPLES = """\
examples:
  lightning-autopar calibrate                           measure what is here
  lightning-autopar calibrate --devices 4xcpu:2GiB      measure the host in four parts
  lightning-autopar calibrate --json                    every figure, for a program to read

exit codes: 0 measured and kept, 2 nothing could be measured
"""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``devices`` and ``calibrate`` to the command line's commands."""
    for name, what, examples in (
        ("devices", "list the devices, who is on them, what is free and what a plan would see", _DEVICES_EXAMPLES),
        ("calibrate", "measure now how fast the devices are, alone and together, and keep the result", _CALIBRATE_EXAMPLES),
    ):
        command = commands.add_parser(name, help=what, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_devices(command, "2xcpu:4GiB")
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def show_devices(spec: str | None, *, as_json: bool) -> int:
    """``lightning-autopar devices``; returns the exit code.

    Raises:
        ValueError: if the spec is malformed.
    """
    with progress() as show:
        show("asking for the devices")
        inventory = probe(spec, accelerator=accelerator_here())
        calibration = load_calibration(inventory)
    there, leases = everyones_runs(), live()
    left = without_leased(inventory, leases)
    if as_json:
        found = inventory.to_dict()
        for device, seen, words in zip(inventory.devices, left.devices, found["devices"], strict=True):
            words["plan_bytes"] = _plan_bytes(seen, left)
            words["leases"] = [
                {"run": printable(lease.run), "user": user_name(lease.uid), "pid": lease.pid, "bytes": lease.bytes[device.id]}
                for lease in _leases_on(device, leases)
            ]
            words["users"] = [asdict(user) for user in users_of(device, there)]
            words["rates"] = asdict(speeds(calibration, device))
        print(json.dumps({**found, "measured": calibration.day or None}, indent=2))
    else:
        _print_devices(inventory, calibration, {device.id: users_of(device, there) for device in inventory.devices}, leases)
    return _DONE


def calibrate_devices(spec: str | None, *, as_json: bool) -> int:
    """``lightning-autopar calibrate``; returns the exit code.

    Raises:
        ValueError: if the spec is malformed, or can only be planned for.
    """
    with contextlib.redirect_stdout(sys.stderr), progress() as show:
        show("importing torch")
        from lightning_autopar.strategies.calibration.calibration import calibrate

        inventory = probe(spec, accelerator=accelerator_here())
        if all(device.kind == "catalogue" for device in inventory.devices):
            raise ValueError("there is nothing here to measure: catalogue devices can be planned for only; leave --devices out")
        print("autopar measures how fast the devices are", file=sys.stderr)  # which ends the spinner: calibration has a bar of its own
        calibration = calibrate(inventory, again=True).calibration
    if as_json:
        print(json.dumps(calibration.to_dict(), indent=2))
    else:
        _print_devices(inventory, calibration, {}, [])
    return _DONE if calibration else _FAILED


def accelerator_here() -> Literal["cuda", "cpu"]:
    """Whether there is a GPU that torch can use; without NVML and a driver's library there is none, and torch isn't imported."""
    from lightning_autopar.devices import nvml

    try:
        return "cuda" if nvml.read_devices()[0] else "cpu"
    except nvml.NvmlUnavailable:
        if ctypes.util.find_library("cuda") is None:
            return "cpu"
    from lightning_autopar._lightning import num_cuda_devices

    return "cuda" if num_cuda_devices() else "cpu"


def _plan_bytes(device: Device, inventory: Inventory) -> int:
    """The bytes of a device that a plan may use, with the strategy's default margin; 0 if nothing new should run there."""
    return Constraints().budget_bytes(device) if device in usable(inventory).devices else 0


def _leases_on(device: Device, leases: Sequence[Lease]) -> list[Lease]:
    return [lease for lease in leases if is_leased(device) and lease.bytes.get(device.id)]


# -- for people ------------------------------------------------------------------------------------------------------------------------


def _print_devices(inventory: Inventory, calibration: Calibration, users: dict[str, Sequence[DeviceUser]], leases: Sequence[Lease]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False)
    for title in ("device", "", "used", "of", "busy", "a plan sees"):
        table.add_column(title, justify="left" if title in ("device", "") else "right", no_wrap=True)
    left = without_leased(inventory, leases)
    for device in inventory.devices:
        used_bytes = device.total_bytes - device.free_bytes
        busy = "" if device.utilization is None else f"{device.utilization:.0%}"
        seen = format_bytes(_plan_bytes(left.device(device.id), left))
        table.add_row(
            Text(device_label(device), style="bold"),
            _bar(used_bytes / device.total_bytes, console),
            *map(Text, (format_bytes(used_bytes), format_bytes(device.total_bytes), busy, seen)),
        )
    console.print(table)
    if inventory.node_host_bytes:
        from lightning_autopar.report.table import host_words

        console.print(Text.assemble(("host memory ", "bold"), host_words(inventory)))
    else:
        host_used = inventory.host_total_bytes - inventory.host_free_bytes
        cores = f", {inventory.host_threads} cores" if inventory.host_threads else ""
        console.print(
            Text.assemble(
                ("host memory ", "bold"),
                _bar(host_used / inventory.host_total_bytes, console),
                f" {format_bytes(host_used)} of {format_bytes(inventory.host_total_bytes)} used{cores}",
            )
        )
    for detail in _details(inventory, users, leases):
        # A long command is cut only on a terminal.
        console.print(detail, no_wrap=True, overflow="ellipsis" if console.is_terminal else "ignore", crop=console.is_terminal)
    told = {device.name: str(speeds(calibration, device)) for device in inventory.devices}
    rates = [*(f"  {name}: {words}" for name, words in told.items() if words), *collective_lines(calibration, inventory)]
    for line in (*([f"measured on {calibration.day}:"] if rates else []), *rates, *inventory.notes):
        console.print(Text(line))


def _details(inventory: Inventory, users: dict[str, Sequence[DeviceUser]], leases: Sequence[Lease]) -> Iterator[Text]:
    """Each device's name, errors, processes and leases."""
    from rich.text import Text

    for device in inventory.devices:
        if device.kind == "catalogue":
            continue  # its name says what it is, and nobody is on it
        label = device_label(device)
        about = [device.name, *([device.id] if device.id != label else [])]
        about += [f"{device.threads} {'core' if device.threads == 1 else 'cores'}"] if device.threads else []
        about += [f"{device.slowdown:.3g} times slower than by itself"] if device.slowdown > 1 else []
        yield Text.assemble((label, "bold"), "  ", ", ".join(about))
        if device.error is not None:
            yield Text(f"  {device.error}: no plan uses it", style="red")
        for user in users.get(device.id, ()):
            yield Text(f"  {user.line()}")
        for lease in _leases_on(device, leases):
            whose = f"{printable(lease.run)} of {user_name(lease.uid)}"
            yield Text(f"  {lease.pid:>8}  {format_bytes(lease.bytes[device.id]):>9}  promised to {whose}")


def _bar(share: float, console: Console) -> Text:
    """A bar of how full something is, in block characters if the terminal's encoding has them."""
    from rich.text import Text

    full, empty = ("█", "░") if console.encoding.lower().startswith("utf") else ("#", ".")
    share = min(1.0, max(0.0, share))
    count = round(share * _BAR) if share in (0.0, 1.0) else min(_BAR - 1, max(1, round(share * _BAR)))
    style = "red" if share >= _FULL else "yellow" if share >= _BUSY else "green"
    return Text.assemble((full * count, style), (empty * (_BAR - count), "dim"))
