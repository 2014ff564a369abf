"""The numbers of the ZeRO paper: Rajbhandari, Rasley, Ruwase, He, arXiv 1910.02054v3 (SC20).

Numbers from the paper's tables are as printed. The bars of its figures have no numbers: their values were read off the
drawings, to within 2 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Figure 1: GB per device of 7.5B parameters on 64 devices, by what is partitioned: nothing, P_os, P_os+g, P_os+g+p.
FIGURE_1: Final = {0: "120", 1: "31.4", 2: "16.6", 3: "1.9"}

# Table 1: GB of model states per device, by parameters in B → data-parallel devices → P_os, P_os+g, P_os+g+p.
TABLE_1: Final[dict[float, dict[int, tuple[str, str, str]]]] = {
    7.5: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1000: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}

# Table 2: the largest model in 32 GB, in theory, on 64 data-parallel devices, by model-parallel degree → what is
# partitioned: nothing, P_os, P_os+g, P_os+g+p.
TABLE_2: Final[dict[int, tuple[str, str, str, str]]] = {
    1: ("2B", "7.6B", "14.4B", "128B"),
    2: ("4B", "15.2B", "28.8B", "256B"),
    4: ("8B", "30.4B", "57.6B", "0.5T"),
    8: ("16B", "60.8B", "115.2B", "1T"),
    16: ("32B", "121.6B", "230.4B", "2T"),
}


@dataclass(frozen=True)
class PaperRun:
    """One run of the paper."""

    label: str  # the model size as given in the paper
    system: str  # "ZeRO" or "baseline"
    gpus: int
    tensor: int  # model-parallel degree (MP in the paper)
    layers: int
    width: int
    heads: int
    batch: int  # sequences of 1024 tokens per model-parallel group
    tflops: float  # per GPU, read off the figure


# Figure 2, with the shapes of Table 5. The baseline is Megatron-LM.
FIGURE_2: Final = (
    PaperRun("1.5B", "ZeRO", 400, 1, 48, 1600, 16, 24, 30.3),
    PaperRun("1.5B", "baseline", 400, 2, 48, 1600, 16, 16, 26.4),
    PaperRun("8B", "ZeRO", 400, 4, 72, 3072, 24, 64, 36.9),
    PaperRun("8B", "baseline", 400, 8, 72, 3072, 24, 8, 23.2),
    PaperRun("40B", "ZeRO", 400, 4, 88, 6144, 32, 12, 35.9),
    PaperRun("40B", "baseline", 384, 32, 88, 6144, 64, 4, 5.0),
    PaperRun("60B", "ZeRO", 400, 16, 132, 6144, 32, 64, 36.5),
    PaperRun("60B", "baseline", 384, 64, 132, 6144, 64, 4, 6.4),
    PaperRun("80B", "ZeRO", 400, 16, 100, 8192, 64, 32, 37.6),
    PaperRun("80B", "baseline", 384, 128, 100, 8192, 128, 4, 5.2),
    PaperRun("100B", "ZeRO", 400, 16, 125, 8192, 64, 32, 38.7),
    PaperRun("100B", "baseline", 384, 128, 125, 8192, 128, 2, 3.8),
    PaperRun("120B", "ZeRO", 400, 16, 150, 8192, 64, 24, 28.1),
    PaperRun("120B", "baseline", 384, 128, 150, 8192, 128, 2, 3.8),
    PaperRun("140B", "ZeRO", 400, 16, 175, 8192, 64, 16, 26.9),
    PaperRun("140B", "baseline", 384, 128, 175, 8192, 128, 2, 3.9),
    PaperRun("170B", "ZeRO", 400, 16, 212, 8192, 64, 12, 20.9),
    PaperRun("170B", "baseline", 256, 256, 212, 8192, 256, 2, 2.2),
)

# Figure 3, with the shapes of Table 6: more devices leave memory for larger batches.
FIGURE_3: Final = (
    PaperRun("60B", "ZeRO", 64, 16, 75, 8192, 32, 16, 25.6),
    PaperRun("60B", "ZeRO", 128, 16, 75, 8192, 32, 48, 37.5),
    PaperRun("60B", "ZeRO", 256, 16, 75, 8192, 32, 48, 39.0),
    PaperRun("60B", "ZeRO", 400, 16, 75, 8192, 32, 64, 36.6),
)

# Figure 4, with the shapes of Table 10: no model parallelism. The baseline is PyTorch's DistributedDataParallel.
FIGURE_4: Final = (
    PaperRun("1.5B", "ZeRO", 128, 1, 34, 1920, 16, 24, 40.3),
    PaperRun("2.5B", "ZeRO", 128, 1, 54, 1920, 16, 24, 41.9),
    PaperRun("4B", "ZeRO", 128, 1, 64, 2304, 24, 16, 43.5),
    PaperRun("6B", "ZeRO", 128, 1, 52, 3072, 24, 12, 47.0),
    PaperRun("8B", "ZeRO", 128, 1, 72, 3072, 24, 8, 47.0),
    PaperRun("10B", "ZeRO", 128, 1, 50, 4096, 32, 6, 41.1),
    PaperRun("11B", "ZeRO", 128, 1, 54, 4096, 32, 4, 35.7),
    PaperRun("12B", "ZeRO", 128, 1, 58, 4096, 32, 4, 32.9),
    PaperRun("13B", "ZeRO", 128, 1, 62, 4096, 32, 2, 21.2),
    PaperRun("1.16B", "baseline", 128, 1, 24, 1920, 16, 8, 39.3),
    PaperRun("1.38B", "baseline", 128, 1, 40, 1536, 16, 1, 18.1),
)


@dataclass(frozen=True)
class PaperModelFit:
    """One model under one configuration of Table 3, 16-way model-parallel on 400 GPUs of 32 GB."""

    configuration: str
    label: str
    layers: int
    width: int
    heads: int
    batch: int
    value: float  # billions of parameters in Figure 6, GB cached in Figure 7


# Figure 6, with the shapes of Table 7: the largest model.
FIGURE_6: Final = (
    PaperModelFit("C1", "40B", 50, 8192, 32, 16, 40),
    PaperModelFit("C2", "60B", 132, 6144, 64, 16, 60),
    PaperModelFit("C3", "50B", 62, 8192, 32, 16, 50),
    PaperModelFit("C4", "140B", 175, 8192, 64, 16, 140),
    PaperModelFit("C5", "150B", 187, 8192, 64, 16, 150),
)

# Figure 7, with the shapes of Table 8: the most memory that PyTorch's allocator caches.
FIGURE_7: Final = (
    PaperModelFit("C1", "40B", 50, 8192, 32, 16, 29.7),
    PaperModelFit("C2", "40B", 50, 8192, 32, 16, 24.1),
    PaperModelFit("C3", "40B", 50, 8192, 32, 16, 25.4),
    PaperModelFit("C4", "40B", 50, 8192, 32, 16, 19.8),
    PaperModelFit("C5", "40B", 50, 8192, 32, 16, 19.8),
    PaperModelFit("C4", "100B", 125, 8192, 64, 32, 29.6),
    PaperModelFit("C5", "100B", 125, 8192, 64, 32, 26.6),
)
