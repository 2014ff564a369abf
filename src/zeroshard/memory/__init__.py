"""Where tensors live: the memory tracker, arenas for long-lived tensors, the bucket ring, and the tiers."""

from zeroshard.memory.allocator.segment_preallocator import SegmentPreallocator
from zeroshard.memory.bucket_ring import BucketRing, BucketSlot, buffer_lengths
from zeroshard.memory.disk.disk import Disk, Transfer, aligned_buffer
from zeroshard.memory.disk.file import DiskError
from zeroshard.memory.host_memory import PinnedBuffer, available_host_memory, host_memory, local_world_size
from zeroshard.memory.pool import Arena, CublasWorkspace, Pool
from zeroshard.memory.streams import SideStream, record_blocking_event
from zeroshard.memory.tier_allocator import (
    ParamPrefetcher,
    TierAllocator,
)
from zeroshard.memory.tiered_tensor import TieredTensor, TierSegment
from zeroshard.memory.tracker import (
    MODEL_STATE_KINDS,
    STATE_KINDS,
    MemoryTracker,
    OwnedMatrix,
    OwnedParam,
    Profile,
    Report,
    Routing,
    fullest_over_mean,
)

__all__ = [
    "MODEL_STATE_KINDS",
    "STATE_KINDS",
    "Arena",
    "BucketRing",
    "BucketSlot",
    "CublasWorkspace",
    "Disk",
    "DiskError",
    "MemoryTracker",
    "OwnedMatrix",
    "OwnedParam",
    "ParamPrefetcher",
    "PinnedBuffer",
    "Pool",
    "Profile",
    "Report",
    "Routing",
    "SegmentPreallocator",
    "SideStream",
    "TierAllocator",
    "TierSegment",
    "TieredTensor",
    "Transfer",
    "aligned_buffer",
    "available_host_memory",
    "buffer_lengths",
    "fullest_over_mean",
    "host_memory",
    "local_world_size",
    "record_blocking_event",
]
