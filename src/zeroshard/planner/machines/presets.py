"""Machine presets, in the format of a machine's JSON file.

Peaks, memory and links come from the vendors' data sheets. Bandwidths are scaled to what is usually reached: NCCL's
tests reach about 0.8 of NVLink's and 0.9 of InfiniBand's rate in each direction, elementwise kernels 0.85 of the memory
bandwidth. There is one efficiency curve per device generation: see [Note: the efficiency curve]. The host times
(``op``, ``unit``) are for one Python thread on a server CPU. All are estimates for machines that cannot be measured;
``zeroshard plan --calibrate`` replaces them by measurements.
"""

from __future__ import annotations

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


# DGX A100 (data sheet of the 80 GB system): 8 devices, NVLink 3 of 600 GB/s in both directions, 8 adapters of HDR
# InfiniBand, 2 processors of 8 channels DDR4-3200, 2 TB, 8 NVMe disks of 3.84 TB on PCIe 4.
_A100: Final[dict[str, Any]] = {
    **_SERVER_DEFAULTS,
    "devices": 8,
    "memory": 85 * GB,  # 80 GiB, less what the driver uses
    "flops": {"fp32": 19.5 * TFLOPS, "bf16": 312 * TFLOPS, "fp16": 312 * TFLOPS},  # A100 data sheet, dense
    "efficiency": {"share": 0.8, "half": 1.2e9},
    "attention": 0.35,
    "bandwidth": MEMORY_BANDWIDTH_FRACTION * 2039 * GB,
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
    "flops": {"fp32": 67 * TFLOPS, "bf16": 989.4 * TFLOPS, "fp16": 989.4 * TFLOPS},  # H100 SXM data sheet, dense
    "fp8_flops": 1979 * TFLOPS,
    "efficiency": {"share": 0.7, "half": 2e9},
    "attention": 0.2,
    "bandwidth": MEMORY_BANDWIDTH_FRACTION * 3350 * GB,
    "workspace": 32 * MiB,  # cuBLAS, on Hopper
    "host_update": 12e9,
    "pcie": 55 * GB,  # PCIe 5, 16 lanes
    **_links(450, 400),
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
        "memory": 42_300_000_000,
        "bandwidth": MEMORY_BANDWIDTH_FRACTION * 1555 * GB,
        "host_memory": 1 * TB,
    },
    "h100": _H100,
    # The H100's processor with more and faster memory (H200 data sheet: 141 GB, 4.8 TB/s). It throttles a little less.
    "h200": {
        **_H100,
        "memory": 150_100_000_000,
        "efficiency": {"share": 0.73, "half": 2e9},
        "bandwidth": MEMORY_BANDWIDTH_FRACTION * 4800 * GB,
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

# GPU name → preset: the first entry whose words are all in the name.
GPU_NAME_PATTERNS: Final = (
    (("H200",), "h200"),
    (("H100",), "h100"),
    (("A100", "40GB"), "a100-40gb"),
    (("A100",), "a100"),
    (("V100",), "dgx2"),
)


def preset_of_gpu(name: str) -> str | None:
    """Return the preset of a GPU by its name; None if unknown.

    >>> preset_of_gpu("NVIDIA A100-SXM4-40GB")
    'a100-40gb'
    >>> preset_of_gpu("NVIDIA GeForce RTX 4090")
    """
    return next((preset for words, preset in GPU_NAME_PATTERNS if all(word in name for word in words)), None)
