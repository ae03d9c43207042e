"""Imported by every Python of the environment (nullgpu.pth): who looks for the driver's libraries by name finds those that are loaded."""

import os

if os.environ.get("NULLGPU_DEVICES"):
    os.environ.setdefault("USE_PYTORCH_KERNEL_CACHE", "0")  # what the stub compiles is no kernel that should be kept
    import ctypes
    from pathlib import Path

    for _name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        ctypes.CDLL(str(Path(__file__).parent / "torch/lib" / _name))
