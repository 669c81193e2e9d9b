"""Links between ranks, and how long a collective takes over them: latency a step of the ring, and bytes a second.

NCCL adds up a ring's time in this way to choose its algorithm (src/graph/tuning.cc of NCCL 2.20.3 and later).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from ..config import ConfigError
from .names import nearest_name

# Seconds of one step of NCCL's ring by what it crosses, and of starting one (tuning.cc: hwLatencies and baseLatencies
# of the ring with the Simple protocol). Its other protocols are faster for small messages.
_OVER_NVLINK, _OVER_PCIE, _OVER_NETWORK, _START = 3.4e-6, 5.7e-6, 14.0e-6, 8.4e-6


@dataclass(frozen=True)
class Link:
    """What joins ranks.

    ``bandwidth``: bytes a second and direction of one device. ``latency``: seconds a step of a ring. ``start``: seconds
    a collective. ``efficiency``: the assumed part of the bandwidth that collectives reach with large messages.
    """

    name: str
    bandwidth: float
    latency: float
    source: str
    start: float = _START
    efficiency: float = 0.8

    @property
    def rate(self) -> float:
        """Bytes a second that collectives reach."""
        return self.bandwidth * self.efficiency


# The part that is reached: NCCL (src/graph/topo.h) counts on 20 GB/s of a link of NVLink 2 to 4 and on 40 of NVLink 5,
# where 25 and 50 are published, on 12 of PCIe 3.0 and on 12 of 100 Gb/s.
_NVLINK = "both directions together"
LINKS = {
    link.name: link
    for link in (
        Link(
            "nvlink2", 150e9, _OVER_NVLINK, f"NVIDIA V100, 300 GB/s {_NVLINK}, jingchaozhang.github.io/A100-white-paper"
        ),
        Link(
            "nvlink3", 300e9, _OVER_NVLINK, f"NVIDIA A100, 600 GB/s {_NVLINK}, jingchaozhang.github.io/A100-white-paper"
        ),
        Link("nvlink4", 450e9, _OVER_NVLINK, f"NVIDIA H100 SXM, 900 GB/s {_NVLINK}, NVIDIA/nccl#1264"),
        Link("nvlink4-bridge", 300e9, _OVER_NVLINK, f"NVIDIA H100 PCIe and NVL, 600 GB/s a pair {_NVLINK}, assumed"),
        Link(
            "nvlink5", 900e9, _OVER_NVLINK, f"NVIDIA B200, 1.8 TB/s {_NVLINK}, verda.com/blog/gb300-nvl72-architecture"
        ),
        Link(
            "nvlink-400", 200e9, _OVER_NVLINK, f"NVIDIA A800 and H800, 400 GB/s {_NVLINK}, aiwiki.ai/wiki/nvidia_a800"
        ),
        Link(
            "infinity-fabric",
            448e9,
            _OVER_NVLINK,
            "AMD MI300X, 7 links of 64 GB/s, 48 of them usable, rocm.blogs.amd.com mi300x-rccl-xgmi; latency assumed",
            efficiency=0.75,
        ),
        Link("pcie3", 15.75e9, _OVER_PCIE, "x16 at 8 GT/s with 128b/130b, intel.com/.../programmable/683111"),
        Link("pcie4", 31.5e9, _OVER_PCIE, "x16 at 16 GT/s with 128b/130b, twice PCIe 3.0"),
        Link("pcie5", 63e9, _OVER_PCIE, "x16 at 32 GT/s with 128b/130b, twice PCIe 4.0"),
        Link(
            "infiniband-hdr",
            25e9,
            _OVER_NETWORK,
            "4 lanes of 50 Gb/s, github.com/open-mpi/ompi/pull/4946",
            efficiency=0.9,
        ),
        Link("infiniband-ndr", 50e9, _OVER_NETWORK, "4 lanes of 100 Gb/s, Linux commit f946e45f59ef", efficiency=0.9),
        Link("infiniband-xdr", 100e9, _OVER_NETWORK, "4 lanes of 200 Gb/s, Linux commit 0f1f9b5e47ce", efficiency=0.9),
        Link("ethernet-400g", 50e9, _OVER_NETWORK, "IEEE 802.3bs, 400 Gb/s; with RDMA"),
        Link("ethernet-100g", 12.5e9, 30e-6, "IEEE 802.3, 100 Gb/s; latency of TCP assumed"),
        Link("ethernet-10g", 1.25e9, 30e-6, "IEEE 802.3, 10 Gb/s; latency of TCP assumed"),
        Link("loopback", 4e9, 60e-6, "assumed of gloo within one machine; measured by --calibrate", 100e-6, 0.5),
    )
}


def link_named(name: str) -> Link:
    """The link of the table; ConfigError for another name, with the nearest."""
    if name not in LINKS:
        raise ConfigError(f"link={name!r} is not known; {nearest_name(name, LINKS)}.")
    return LINKS[name]


@dataclass(frozen=True)
class Reach:
    """Where a group's ranks sit, at worst: how many nodes it touches, and its ranks on the node with the fewest."""

    ranks: int
    nodes: int
    per_node: int


@cache
def reach(ranks: int, stride: int, per_node: int) -> Reach:
    """The reach of a mesh dimension of ``ranks`` ranks, ``stride`` apart, on nodes of ``per_node``.

    The mesh is laid over ranks with its last dimension innermost, so a group starts ``ranks`` * ``stride`` after the
    one before it, and within that at each of ``stride`` ranks.
    """
    worst = Reach(ranks, 1, ranks)
    offsets = range(min(stride, per_node))
    starts = {(block * ranks * stride + first) % per_node for block in range(per_node) for first in offsets}
    for start in sorted(starts):
        nodes = Counter((start + i * stride) // per_node for i in range(ranks))
        found = Reach(ranks, len(nodes), min(nodes.values()))
        worst = max(worst, found, key=lambda r: (r.nodes, -r.per_node))
    return worst


@dataclass(frozen=True)
class Network:
    """Nodes of ``per_node`` devices: the links inside a node, and of each device to other nodes.

    ``whole``: mesh dimensions whose groups count as inside one node wherever they are, to tell what it costs that they
    are not.
    """

    inside: Link
    across: Link
    per_node: int
    whole: frozenset[str] = frozenset()

    def seconds(self, kind: str, sent: float, group: Reach, calls: int = 1) -> float:
        """Seconds of ``calls`` collectives in which a rank sends ``sent`` bytes altogether; of "p2p", of messages.

        A ring enters and leaves each node once; with several ranks there, it has as many network devices.
        """
        if group.ranks == 1 or (calls == 0 and not sent):
            return 0.0
        slow = self.across if group.nodes > 1 else self.inside
        rate = self.across.rate * (1 if kind == "p2p" else group.per_node) if group.nodes > 1 else self.inside.rate
        if group.nodes > 1 and group.per_node > 1:
            rate = min(rate, self.inside.rate)
        if kind == "p2p":
            return calls * (slow.start + slow.latency) + sent / rate
        rounds = 2 if kind == "all_reduce" else 1
        outside = group.nodes - 1
        steps = outside * self.across.latency + (group.ranks - 1 - outside) * self.inside.latency
        return calls * (slow.start + rounds * steps) + sent / rate
