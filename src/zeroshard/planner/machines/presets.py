"""Machine presets, in the format of a machine's JSON file.

Peaks, memory and links come from the vendors' data sheets. Bandwidths are scaled to what is usually reached: NCCL's
tests reach about 0.8 of NVLink's and 0.9 of InfiniBand's rate in each direction, elementwise kernels 0.85 of the memory
bandwidth. There is one efficiency curve per device generation: see [Note: the efficiency curve]. The host times
(``op``, ``unit``) are for one Python thread on a server CPU. All are estimates for machines that cannot be measured;
``zeroshard plan --calibrate`` replaces them by measurements.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from typing import Any, Final

GB, TB, MiB = 10**9, 10**12, 2**20
TFLOPS = 1e12
# fractions of the published rates that are reached
NVLINK_FRACTION, INFINIBAND_FRACTION, MEMORY_BANDWIDTH_FRACTION = (0.8, 0.9, 0.85)

_SERVER_DEFAULTS: Final[dict[str, Any]] = {
    "kind": "cuda",
    "gap": 1.5e-6,
    "op": 4e-5,
    "unit": 3e-4,
    "context": 600 * MiB,
    "workspace": 8_519_680,  # cuBLAS: 8.125 MiB before Hopper
    "disk": 30 * TB,
}


def _links(nvlink: float, infiniband: float) -> dict[str, dict[str, float]]:
    """Return the links for published rates in GB/s and each direction: a device's NVLink, a node's InfiniBand."""
    return {
        "inside": {"bandwidth": NVLINK_FRACTION * nvlink * GB, "latency": 2e-6},
        "outside": {"bandwidth": INFINIBAND_FRACTION * infiniband * GB, "latency": 5e-6},
    }


def _device(gigabytes: float, fp32: float, half: float, bandwidth: float, fp8: float | None = None) -> dict[str, Any]:
    """Return a device by its data sheet: its memory, dense TFLOPS in fp32, 16 bits and float8, GB/s of its memory."""
    return {
        "memory": round(gigabytes * GB),
        "flops": {"fp32": fp32 * TFLOPS, "bf16": half * TFLOPS, "fp16": half * TFLOPS},
        "fp8_flops": None if fp8 is None else fp8 * TFLOPS,
        "bandwidth": MEMORY_BANDWIDTH_FRACTION * bandwidth * GB,
    }


# DGX A100 (data sheet of the 80 GB system): 8 devices, NVLink 3 of 600 GB/s in both directions, 8 adapters of HDR
# InfiniBand, 2 processors of 8 channels DDR4-3200, 2 TB, 8 NVMe disks of 3.84 TB on PCIe 4.
_A100: Final[dict[str, Any]] = {
    **_SERVER_DEFAULTS,
    "devices": 8,
    **_device(85, 19.5, 312, 2039),  # A100 data sheet; 80 GiB, less what the driver uses
    "efficiency": {"share": 0.8, "half": 1.2e9},
    "attention": 0.35,
    "host_memory": 2 * TB,
    "host_update": 8e9,
    "pcie": 24 * GB,  # PCIe 4, 16 lanes
    "disk_read": 45 * GB,
    "disk_write": 25 * GB,
    **_links(300, 200),
}

# DGX H100 (data sheet): 8 devices, NVLink 4 of 900 GB/s in both directions, 8 adapters of NDR InfiniBand, 2 processors
# of 8 channels DDR5-4800, 2 TB, 8 NVMe disks of 3.84 TB.
_H100: Final[dict[str, Any]] = {
    **_A100,
    **_device(85, 67, 989.4, 3350, fp8=1979),  # H100 SXM data sheet
    "efficiency": {"share": 0.7, "half": 2e9},
    "attention": 0.2,
    "workspace": 32 * MiB,  # cuBLAS, on Hopper
    "host_update": 12e9,
    "pcie": 55 * GB,  # PCIe 5, 16 lanes
    **_links(450, 400),
}

# DGX B200 (data sheet): 8 devices of 180 GB, NVLink 5 of 1.8 TB/s in both directions, 8 adapters of 400 Gb/s, 2 TB, 8
# NVMe disks of 3.84 TB. HGX B200 (data sheet): peaks; 7.7 TB/s of memory, where others say 8. Not known, so taken low:
# the efficiency, attention (torch's kernels are not written for Blackwell), the workspace and the host's updates.
_B200: Final[dict[str, Any]] = {
    **_H100,
    **_device(180, 75, 2250, 7700, fp8=4500),
    "efficiency": {"share": 0.65, "half": 4e9},
    "attention": 0.12,
    **_links(900, 400),
}

# L40S (data sheet): PCIe 4, no NVLink. Guesses, taken low: the efficiency, and the server: collectives at half the rate
# of PCIe, one adapter of 200 Gb/s, 512 GB, one NVMe disk.
_L40S: Final[dict[str, Any]] = {
    **_A100,
    **_device(48, 91.6, 362.05, 864, fp8=733),
    "efficiency": {"share": 0.6, "half": 1.2e9},
    "host_memory": 512 * GB,
    "disk": 3840 * GB,
    "disk_read": 5 * GB,
    "disk_write": 3 * GB,
    "inside": {"bandwidth": 16 * GB, "latency": 1e-5},
    "outside": {"bandwidth": INFINIBAND_FRACTION * 25 * GB, "latency": 5e-6},
}

MACHINE_PRESETS: Final[dict[str, dict[str, Any]]] = {
    # DGX-2 (data sheet), the paper's machine: NVSwitch with 300 GB/s a device in both directions, 8 adapters
    # of EDR InfiniBand, 2 processors of 6 channels DDR4-2666, 1.5 TB, 30 TB of NVMe. No bf16: Volta's tensor cores
    # multiply fp16 only.
    "dgx2": {
        **_SERVER_DEFAULTS,
        "devices": 16,
        "memory": 34 * GB,  # 32 GiB, less what the driver uses
        "flops": {"fp32": 15.7 * TFLOPS, "fp16": 125 * TFLOPS},  # V100 SXM data sheet
        "efficiency": {"share": 0.5, "half": 2e9},  # as reached in training with the libraries of 2019
        "attention": 0.15,
        "bandwidth": MEMORY_BANDWIDTH_FRACTION * 900 * GB,
        "gap": 2e-6,
        "context": 450 * MiB,
        "host_memory": 1_500 * GB,
        "host_update": 4e9,
        "pcie": 12 * GB,  # PCIe 3, 16 lanes
        "disk_read": 24 * GB,
        "disk_write": 15 * GB,
        **_links(150, 100),
    },
    "a100": _A100,
    "a100-40gb": {
        **_A100,
        **_device(42.3, 19.5, 312, 1555),
        "host_memory": 1 * TB,
    },
    "h100": _H100,
    # The H100's processor with more and faster memory (H200 data sheet: 141 GB, 4.8 TB/s). It throttles a little less.
    "h200": {
        **_H100,
        **_device(150.1, 67, 989.4, 4800, fp8=1979),
        "efficiency": {"share": 0.73, "half": 2e9},
    },
    "b200": _B200,
    # GB200 NVL72 (data sheet of the rack, / 72). A node is the rack: 72 devices that NVLink connects, in 18 trays. 36
    # processors of 480 GB, each with a link of 900 GB/s in both directions to 2 devices, of which 0.8 is assumed to be
    # reached; an adapter of 400 Gb/s a device. Guesses, taken low: a processor's updates; a disk of 3.84 TB a tray.
    "gb200": {
        **_B200,
        "devices": 72,
        **_device(186, 80, 2500, 8000, fp8=5000),
        "host_memory": 36 * 480 * GB,
        "host_update": 36 * 8e9,
        "pcie": 180 * GB,
        "disk": 18 * 3840 * GB,
        "disk_read": 18 * 5 * GB,
        "disk_write": 18 * 3 * GB,
        **_links(900, 72 * 50),
    },
    # AMD Instinct MI300X (data sheet): PCIe 5; 7 links of 64 GB/s in each direction to the others of its platform, of
    # which RCCL is assumed to reach 0.7: 0.8 of 392. No float8: its formats are not those of precision="fp8". The
    # server is assumed to be an H100's. Guesses, taken low: efficiency, attention, and the workspace of hipBLASLt.
    "mi300x": {
        **_H100,
        **_device(192, 163.4, 1307.4, 5300),
        "efficiency": {"share": 0.45, "half": 4e9},
        "attention": 0.15,
        "workspace": 128 * MiB,
        **_links(392, 400),
    },
    "l40s": _L40S,
    # GeForce RTX 4090 (Ada architecture whitepaper): peaks with fp32 accumulation. Devices exchange through the host's
    # memory, at a quarter of PCIe's rate, it is assumed. The rest is a guess at a workstation, taken low.
    "4090": {
        **_L40S,
        "devices": 4,
        **_device(24, 82.6, 165.2, 1008, fp8=330.3),
        "host_memory": 128 * GB,
        "host_update": 2e9,
        "inside": {"bandwidth": 8 * GB, "latency": 2e-5},
        "outside": {"bandwidth": 1 * GB, "latency": 1e-4},  # 10 Gbit Ethernet
    },
    # A server of 16 cores with AVX2, one rank per 4 cores, connected by gloo. A rank's memory is host memory. 16-bit
    # types are computed in 32 bits.
    "cpu": {
        "kind": "cpu",
        "devices": 4,
        "memory": 16 * GB,
        "flops": {"fp32": 0.38 * TFLOPS, "bf16": 0.04 * TFLOPS, "fp16": 0.02 * TFLOPS},  # 4 cores, 3 GHz, 32 per cycle
        "efficiency": {"share": 0.75, "half": 2e6},
        "attention": 0.3,
        "bandwidth": 10 * GB,
        "gap": 0.0,  # the launching thread runs the kernel itself
        "op": 1e-5,
        "unit": 1.5e-4,
        "context": 300 * MiB,  # Python and torch
        "workspace": 0,
        "host_memory": 64 * GB,
        "host_update": 1e9,
        "pcie": 10 * GB,  # a copy within host memory
        "disk": 500 * GB,
        "disk_read": 2 * GB,
        "disk_write": 1 * GB,
        "inside": {"bandwidth": 2 * GB, "latency": 5e-5},
        "outside": {"bandwidth": 1 * GB, "latency": 1e-4},  # 10 Gbit Ethernet
    },
}

FALLBACK_PRESET: Final = "a100"  # rates for a GPU that has no preset and was not measured

# Words in a GPU's name → its preset; the first entry whose words are all there.
GPU_PRESETS: Final = (
    (("gb200",), "gb200"),
    (("b200",), "b200"),
    (("h200",), "h200"),
    (("h100",), "h100"),
    (("a100", "40gb"), "a100-40gb"),
    (("a100",), "a100"),
    (("v100",), "dgx2"),
    (("mi300x",), "mi300x"),
    (("l40s",), "l40s"),
    (("rtx", "4090"), "4090"),
)
# Peaks of GPUs that have no preset, or others than theirs (data sheets, dense).
_OTHER_PEAKS: Final = (
    (("h100", "pcie"), {"bf16": 756 * TFLOPS, "fp16": 756 * TFLOPS}),
    (("l4",), {"bf16": 121 * TFLOPS, "fp16": 121 * TFLOPS}),
    (("a10",), {"bf16": 125 * TFLOPS, "fp16": 125 * TFLOPS}),
)
_VARIANT_WORDS: Final = {"mig", "nvl", "laptop", "d"}  # mark partitions and slower variants, whose peaks are not known


def _first_match(text: Container[str], table: Iterable[tuple[tuple[str, ...], Any]]) -> Any:
    return next((found for words, found in table if all(word in text for word in words)), None)


def preset_of_gpu(name: str) -> str | None:
    """Return the preset of a GPU by its name; None if unknown.

    >>> preset_of_gpu("NVIDIA A100-SXM4-40GB")
    'a100-40gb'
    >>> preset_of_gpu("NVIDIA GeForce RTX 3090")
    """
    preset: str | None = _first_match(name.lower(), GPU_PRESETS)
    return preset


def gpu_peak_flops(name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU by its name, in "bf16", "fp16" or "fp32"; None if unknown.

    >>> gpu_peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), gpu_peak_flops("Tesla T4", "fp16")
    (312000000000000.0, None)
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if words & _VARIANT_WORDS:
        return None
    peaks = _first_match(words, _OTHER_PEAKS)
    if peaks is None:
        preset = _first_match(words, GPU_PRESETS)
        peaks = MACHINE_PRESETS[preset]["flops"] if preset is not None else {}
    peak: float | None = peaks.get(precision)
    return peak
