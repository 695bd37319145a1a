"""Facts of the machine that stand beside every measured table: versions, CPU flags, compiler, bandwidth."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from moesaic._version import __version__

# Flags that change which kernels run; the rest of the list says nothing to a reader of a table.
TELLING_FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "avx_vnni",
    "asimd",
    "sve",
    "bf16",
)
EXTRAS = {
    "datasets": ("datasets",),
    "tensorboard": ("tensorboard",),
    "tabular": ("sklearn", "scipy", "pandas"),
    "tabular-peers": ("pyod",),
}


def cpu_flags() -> list[str]:
    """Those of ``TELLING_FLAGS`` that this CPU has, as the kernel tells; empty where it tells nothing."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return []
    for line in info.read_text(errors="replace").splitlines():
        if line.lower().startswith(("flags", "features")):
            have = set(line.split(":", 1)[1].split())
            return [flag for flag in TELLING_FLAGS if flag in have]
    return []


def available_memory() -> int:
    """Bytes that this process can still take: what the kernel calls available, or less where a control group says."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text().strip() if group.exists() else ""
    return min(free, int(limit)) if limit.isdigit() else free


def cpu_name() -> str:
    """Model name of the CPU, or the architecture where the kernel tells none."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def versions() -> dict[str, str]:
    """Versions of moesaic, Python and the libraries that numbers depend on."""
    found = {"moesaic": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "safetensors", "tokenizers", "numpy"):
        found[name] = importlib.metadata.version(name)
    return found


def machine_facts() -> dict[str, Any]:
    """Versions, CPU, flags, cores, threads and memory: what is stored with results."""
    return {
        "versions": versions(),
        "cpu": cpu_name(),
        "cpu_flags": cpu_flags(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def memory_bytes() -> int:
    """Physical memory of the machine in bytes; 0 where it cannot be asked."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def read_bandwidth(gib: float = 1.0, repeats: int = 5) -> float:
    """Bytes read from memory in a second: best of ``repeats`` sums over ``gib`` GiB of float32.

    Args:
        gib: size of the tensor in GiB; well above the last-level cache, or the cache is measured.
        repeats: how many sums.

    Returns:
        GB/s (10^9 bytes).

    Raises:
        ValueError: a non-positive size or count, or more than half of the memory.
    """
    if gib <= 0 or repeats < 1:
        raise ValueError(f"gib must be > 0 and repeats >= 1, got {gib} and {repeats}")
    total = memory_bytes()
    if total and gib * 2**30 > total / 2:
        raise ValueError(f"gib={gib} is more than half of the memory ({total / 2**30:.1f} GiB)")
    data = torch.ones(int(gib * 2**28))
    best = min(_seconds(data) for _ in range(repeats))
    return data.numel() * 4 / best / 1e9


def _seconds(data: torch.Tensor) -> float:
    start = time.perf_counter()
    data.sum()
    return time.perf_counter() - start


def compiler() -> str | None:
    """First line of the C++ compiler's version, or None: torch.compile needs one at every process start."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        return None
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    return answer.stdout.splitlines()[0] if answer.returncode == 0 and answer.stdout else None


def extras() -> dict[str, bool]:
    """Which optional extras can be imported here."""
    return {extra: all(importlib.util.find_spec(module) for module in modules) for extra, modules in EXTRAS.items()}
