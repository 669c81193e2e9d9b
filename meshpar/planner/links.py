"""Links between ranks, and how long a collective takes over them: latency a step of the ring, and bytes a second.

NCCL adds up a ring's time in this way to choose its algorithm (src/graph/tuning.cc of NCCL 2.20 and later).
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


_NVLINK = "NVIDIA data sheets give both directions together"
LINKS = {
    link.name: link
    for link in (
        Link("nvlink2", 150e9, _OVER_NVLINK, f"V100 data sheet, 300 GB/s; {_NVLINK}"),
        Link("nvlink3", 300e9, _OVER_NVLINK, f"A100 data sheet, 600 GB/s; {_NVLINK}"),
        Link("nvlink4", 450e9, _OVER_NVLINK, f"H100 SXM data sheet, 900 GB/s; {_NVLINK}"),
        Link("nvlink4-bridge", 300e9, _OVER_NVLINK, f"H100 PCIe and NVL data sheets, 600 GB/s a pair; {_NVLINK}"),
        Link("nvlink5", 900e9, _OVER_NVLINK, f"HGX B200 data sheet, 1.8 TB/s; {_NVLINK}"),
        Link("nvlink-400", 200e9, _OVER_NVLINK, f"A800 and H800, 400 GB/s; {_NVLINK}"),
        Link(
            "infinity-fabric", 448e9, _OVER_NVLINK, "MI300X data sheet, 7 links of 128 GB/s, both directions together"
        ),
        Link("pcie3", 16e9, _OVER_PCIE, "PCI-SIG, x16 at 8 GT/s"),
        Link("pcie4", 32e9, _OVER_PCIE, "PCI-SIG, x16 at 16 GT/s"),
        Link("pcie5", 64e9, _OVER_PCIE, "PCI-SIG, x16 at 32 GT/s"),
        Link("infiniband-hdr", 25e9, _OVER_NETWORK, "InfiniBand Trade Association, HDR 200 Gb/s", efficiency=0.9),
        Link("infiniband-ndr", 50e9, _OVER_NETWORK, "InfiniBand Trade Association, NDR 400 Gb/s", efficiency=0.9),
        Link("infiniband-xdr", 100e9, _OVER_NETWORK, "InfiniBand Trade Association, XDR 800 Gb/s", efficiency=0.9),
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
