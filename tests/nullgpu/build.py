"""Build the stub libraries and the extension that computes, and put them where an installed torch looks for CUDA's libraries.

    python build.py --packages VENV/lib/python3.x/site-packages --headers DIR

Which libraries, functions and symbol versions there must be is read from torch's own libraries, so that another release of it needs no
other sources. What isn't written by hand in src/ is generated: it returns success (cuSOLVER, cuSPARSE, cuFFT and so on: "not supported",
which torch raises). Each file is renamed into its place, so that processes that run keep what they have loaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: By library: its own sources, and what functions that nobody wrote return.
LIBRARIES: dict[str, tuple[list[str], int]] = {
    "libcudart": (["settings.c", "state.c", "addresses.c", "cudart.c"], 0),
    "libcuda": (["cuda_driver.c"], 0),
    "libnvidia-ml": (["nvml.c"], 3),
    "libcublas": (["blas.c"], 0),
    "libcublasLt": (["blas.c"], 0),
    "libcudnn": (["cudnn.c"], 3000),
    "libnccl": (["nccl.c", "nccl_reduce.c"], 5),
    "libcufft": ([], 16),
    "libcusparse": ([], 10),
    "libcusolver": ([], 9),
    "libcusparseLt": ([], 10),
    "libnvrtc": (["nvrtc.c"], 1),
    "libcupti": ([], 0),
}
PREFIXES = (
    ("cusparseLt", "libcusparseLt"),
    ("cuFile", "libcufile"),
    ("nccl", "libnccl"),
    ("nvshmem", "libnvshmem_host"),
    ("cu", "libcuda"),
)
CUDAS = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJit|nvToolsExt)")


@dataclass
class Wanted:
    """What torch's libraries take from CUDA's, by library."""

    sonames: dict[str, str] = field(default_factory=lambda: {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"})
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    versions: dict[str, str] = field(default_factory=dict)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} … failed:\n{done.stderr[-4000:]}")
    return done.stdout


def wanted(torch: Path) -> Wanted:
    found = Wanted()
    for file in (
        sorted((torch / "lib").glob("libtorch*.so"))
        + sorted((torch / "lib").glob("libc10*.so"))
        + sorted((torch / "lib").glob("libcaffe2*.so"))
    ):
        for soname in re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", str(file))):
            if CUDAS.match(soname):
                found.sonames[soname.split(".so")[0]] = soname
        for line in run("readelf", "--dyn-syms", "-W", str(file)).splitlines():
            _note(found, line.split())
    # NVML's functions are looked up by their names.
    names = re.findall(rb"\0(nvml[A-Z]\w+)(?=\0)", (torch / "lib/libc10_cuda.so").read_bytes())
    found.functions["libnvidia-ml"] |= {name.decode() for name in names}
    return found


def _note(found: Wanted, fields: list[str]) -> None:
    """One line of a symbol table: what isn't defined there and is CUDA's."""
    if len(fields) < 8 or fields[6] != "UND":
        return
    name, _, version = fields[7].partition("@")
    version = version.strip("@")
    if version.startswith("lib"):
        library = version.split(".so")[0]
        found.versions[library] = version
    elif version == "NVSHMEM":
        library = "libnvshmem_host"
        found.versions[library] = version
    elif not version and re.match(r"(cu[A-Z]|cusparseLt|nccl[A-Z]|nvshmem)", name):
        library = next(library for prefix, library in PREFIXES if name.startswith(prefix))
    else:
        return
    found.functions[library].add(name)


@dataclass(frozen=True, kw_only=True)
class Builder:
    """Builds one library after another into torch's folder."""

    torch: Path
    headers: Path
    work: Path
    cudart: int
    wanted: Wanted

    @property
    def into(self) -> Path:
        return self.torch / "lib"

    def place(self, made: Path, name: str) -> None:
        """Beside its place first: a rename leaves no moment without the file."""
        beside = self.into / f".{name}.new"
        shutil.copy(made, beside)
        os.replace(beside, self.into / name)

    def stub(self, library: str) -> str:
        sources, otherwise = LIBRARIES.get(library, ([], 0))
        objects = [self._compiled(library, source) for source in sources]
        written = set(re.findall(r" [TDBW] (\w+)", run("nm", *objects))) if objects else set()
        functions, soname = self.wanted.functions[library], self.wanted.sonames[library]
        rest = self.work / f"{library}.rest.c"
        rest.write_text(generated(sorted(functions - written), otherwise))
        node, script, made = self.wanted.versions.get(library, ""), self.work / f"{library}.map", self.work / soname
        script.write_text(f"{node} {{ global: *; }};\n")
        # What all of them share lies in the runtime's stub.
        shared = [] if library == "libcudart" else [str(self.into / self.wanted.sonames["libcudart"])]
        link = [f"-Wl,-soname,{soname}", f"-Wl,--version-script,{script}", "-Wl,-rpath,$ORIGIN"]
        run("gcc", "-shared", "-O1", "-fPIC", "-w", *link, *objects, str(rest), *shared, "-o", str(made), "-lpthread", "-ldl")
        self.place(made, soname)
        return f"{soname}: {len(functions & written)} of {len(functions)} functions by hand"

    def _compiled(self, library: str, source: str) -> str:
        made = str(self.work / f"{library}.{source}.o")
        defines = [f"-DNULLGPU_CUDART={self.cudart}", "-DNULLGPU_CUDNN=92000", "-DNULLGPU_NCCL=22907"]
        lt = ["-DNULLGPU_LT=1"] if library == "libcublasLt" else []
        run(
            "gcc",
            "-c",
            "-O2",
            "-fPIC",
            "-w",
            *lt,
            *defines,
            f"-I{self.headers}",
            f"-I{HERE / 'src'}",
            str(HERE / "src" / source),
            "-o",
            made,
        )
        return made

    def extension(self, source: Path) -> str:
        made = str(self.work / f"{source.stem}.o")
        includes = [
            f"-I{path}" for path in (self.torch / "include", self.torch / "include/torch/csrc/api/include", self.headers, HERE / "src")
        ]
        run("g++", "-c", "-std=c++20", "-O1", "-fPIC", "-w", *includes, str(source), "-o", made)
        return made

    def link_extension(self, objects: list[str]) -> str:
        name = "libnullgpu_compute.so"
        libraries = [
            f"-L{self.into}",
            "-lc10",
            "-lc10_cuda",
            "-ltorch_cpu",
            "-ltorch_cuda",
            str(self.into / self.wanted.sonames["libcudart"]),
        ]
        run("g++", "-shared", *objects, *libraries, "-Wl,-rpath,$ORIGIN", "-o", str(self.work / name))
        self.place(self.work / name, name)
        return name


def generated(functions: list[str], otherwise: int) -> str:
    """C for the functions that nobody wrote: each tells of its first call, and returns the same."""
    lines = ["void ng_trace(const char *);"]
    for name in functions:
        text = name.endswith("String")  # what an error is called
        kind, value = ("const char *", '"an error of a stub"') if text else ("int ", str(otherwise))
        lines.append(f'{kind}{name}() {{ static int once; if (!once) {{ once = 1; ng_trace("{name}"); }} return {value}; }}')
    return "\n".join(lines) + "\n"


def place_loaders(packages: Path) -> None:
    """What Python runs at its start, and torch at the end of its import: see site/."""
    for file in (HERE / "site").glob("*.py"):
        shutil.copy(file, packages / file.name)
    about = packages / "nullgpu-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nullgpu\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nnullgpu = nullgpu_compute:load\n")
    (packages / "nullgpu.pth").write_text("import nullgpu_preload\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--packages", type=Path, required=True, help="the folder that holds torch")
    parser.add_argument("--headers", type=Path, required=True, help="CUDA's")
    options = parser.parse_args()
    torch = options.packages / "torch"
    version = re.search(r"^cuda: .*= '(\d+)\.(\d+)'", (torch / "version.py").read_text(), re.M)
    if version is None:
        raise SystemExit(f"{torch} isn't a CUDA build")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        builder = Builder(
            torch=torch,
            headers=options.headers,
            work=Path(folder),
            cudart=int(version[1]) * 1000 + int(version[2]) * 10,
            wanted=wanted(torch),
        )
        extension = [pool.submit(builder.extension, source) for source in sorted((HERE / "compute").glob("*.cpp"))]
        print(builder.stub("libcudart"))
        for line in pool.map(builder.stub, [library for library in builder.wanted.sonames if library != "libcudart"]):
            print(line)
        print(builder.link_extension([made.result() for made in extension]))
    place_loaders(options.packages)


if __name__ == "__main__":
    main()
