"""Set up a Python environment with torch's CUDA build on stub libraries: no GPU, no driver and none of NVIDIA's libraries.

    python tests/nullgpu/environment.py .venv-cuda
    python tests/nullgpu/environment.py build/venv-2.11 --torch 2.11.0

Versions are those of constraints.txt. Whatever index pip is set up with is asked; only a folder of local wheels (find-links) is left out,
as it may hold torch's CPU build. Running it again installs what has changed and builds the stubs anew.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
#: They hold the few headers that the stubs and the extension need, 2.5 MB.
HEADER_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-nvml-dev")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="of the virtual environment")
    parser.add_argument("--torch", help="version of torch; by default that of constraints.txt")
    options = parser.parse_args()
    folder = options.folder.absolute()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (PROJECT / "constraints.txt").read_text(), re.M))
    version = options.torch or pins["torch"]
    if not (folder / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install(folder, version, {name: pin for name, pin in pins.items() if name != "torch"})
    (packages,) = folder.glob("lib/python3*/site-packages")
    headers = download_headers(folder, cuda_version(packages / "torch"))
    build = [sys.executable, str(HERE / "build.py"), "--packages", str(packages), "--headers", str(headers)]
    subprocess.run(build, check=True)


def pip(folder: Path, *arguments: str, **environment: str) -> None:
    command = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **index_settings(folder), **environment})


def index_settings(folder: Path) -> dict[str, str]:
    """pip's settings as variables, less the local wheels: variables can't take back what a file of settings says."""
    listed = subprocess.run([str(folder / "bin/python"), "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    settings = {"PIP_CONFIG_FILE": os.devnull}
    for name, value in re.findall(r"^(?!:env:)[\w-]+\.([\w-]+)=(.*)$", listed, re.M):
        settings["PIP_" + name.upper().replace("-", "_")] = str(ast.literal_eval(value))
    settings.update({name: value for name, value in os.environ.items() if name.startswith("PIP_") and name != "PIP_CONFIG_FILE"})
    return {**settings, "PIP_FIND_LINKS": ""}


def install(folder: Path, version: str, pins: dict[str, str]) -> None:
    """Every package is named with its version and none is resolved: lightning asks for torch, and torch for 3 GB of NVIDIA's libraries."""
    pip(folder, "install", "-qq", "--no-deps", f"torch=={version}")
    listed = folder / "pinned.txt"
    listed.write_text("".join(f"{name}=={pin}\n" for name, pin in pins.items() if name != "deepspeed"))
    pip(folder, "install", "-qq", "--no-deps", "--requirement", str(listed))
    # No operator of its own is compiled: torch's optimizers run on the shards.
    pip(folder, "install", "-qq", "--no-deps", f"deepspeed=={pins['deepspeed']}", DS_BUILD_OPS="0")


def cuda_version(torch: Path) -> str:
    found = re.search(r"^cuda: .*= '(\d+\.\d+)'", (torch / "version.py").read_text(), re.M)
    if found is None:
        raise SystemExit(f"pip's index has no CUDA build of this version of torch: {torch} is a CPU build, on which no GPU can be stubbed")
    return found[1]


def download_headers(folder: Path, cuda: str) -> Path:
    headers = folder / f"cuda-headers-{cuda}"
    include = headers / f"nvidia/cu{cuda.split('.')[0]}/include"
    if not (include / "cuda_runtime_api.h").exists():
        wheels = [f"{name}=={cuda}.*" for name in HEADER_PACKAGES]
        pip(folder, "download", "-qq", "--no-deps", "--dest", str(headers), *wheels)
        for wheel in headers.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(headers, [name for name in archive.namelist() if name.endswith((".h", ".hpp"))])
    return include


if __name__ == "__main__":
    main()
