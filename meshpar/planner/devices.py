"""Devices: memory, peak arithmetic and memory bandwidth from the vendors' data sheets, and what of it is reached.

Peaks are dense: data sheets often print twice that, for matrices half of zeros. The efficiencies are assumptions about
large matrix products in eager PyTorch; `calibrate` measures them instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import ConfigError
from .links import LINKS, Link, Network
from .names import nearest_name

_GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process's part of a CPU.

    ``memory``: bytes that torch can allocate. ``peak``: dense FLOP/s of matrix products by dtype. ``bandwidth``: bytes
    a second of its memory. ``inside``: the link to the others of its node. The ``efficiency`` of each: the part of the
    data sheet's number that is reached. ``launch``: seconds in which the host starts one operation.
    ``asynchronous``: it computes while the host starts the next. ``torch_names``: parts of its name in torch.
    """

    name: str
    memory: int
    peak: Mapping[str, float]
    bandwidth: float
    inside: Link
    source: str
    torch_names: tuple[str, ...] = ()
    matmul_efficiency: float = 0.7
    attention_efficiency: float = 0.4
    memory_efficiency: float = 0.85
    launch: float = 10e-6
    asynchronous: bool = True

    def matmul_rate(self, dtype: str) -> float:
        """FLOP/s that matrix products reach in ``dtype``."""
        return self.peak[dtype] * self.matmul_efficiency

    def attention_rate(self, dtype: str) -> float:
        """FLOP/s that attention reaches in ``dtype``."""
        return self.peak[dtype] * self.attention_efficiency

    @property
    def memory_rate(self) -> float:
        """Bytes a second that element-wise operations reach."""
        return self.bandwidth * self.memory_efficiency


_BOOK = "github.com/stas00/ml-engineering compute/accelerator"
_A100 = "NVIDIA A100 data sheet, glennklockwood.com/garden/processors/A100"
_H100 = "NVIDIA H100 data sheet, glennklockwood.com/garden/processors/h100"
_SOURCES = {  # of peaks and bandwidth; after "memory", where torch printed the total
    "a100-40gb": f"{_A100}; memory: vllm-project/vllm#16570",
    "a100-80gb": f"{_A100}; memory: lianqi1008/Control-GIC#6",
    "a100-pcie-80gb": "NVIDIA A100 data sheet, 80 GB PCIe; memory assumed equal",
    "a800-80gb": "an A100 with less NVLink, aiwiki.ai/wiki/nvidia_a800; memory assumed equal",
    "h100-pcie-80gb": f"NVIDIA H100 data sheet, {_BOOK}; memory and efficiencies assumed",
    "h100-nvl-94gb": "NVIDIA H100 data sheet, bfloat16 as in torchtitan, the rest assumed; memory: ali-vilab/VACE#56",
    "gh200-96gb": f"NVIDIA GH200 data sheet, {_BOOK}; memory: vllm-project/vllm#9630",
    "h100-80gb": f"{_H100}; memory: vllm-project/vllm#27508",
    "h800-80gb": "an H100 with less NVLink, philisun.com/technical-analysis; memory assumed equal",
    "h200": f"NVIDIA H200 data sheet, {_BOOK}; memory: 139.7 to 139.8 GiB in error messages",
    "gb200": f"NVIDIA GB200 data sheet, {_BOOK}, hmc-tech.com; memory: 184.3 GiB in error messages",
    "b200": f"NVIDIA HGX B200 data sheet, {_BOOK}, hmc-tech.com; memory and bandwidth: pytorch/ao#4002",
    "l40s": "NVIDIA L40S data sheet, mullet.se/product.html?product_id=355414; memory: stepfun-ai/Step-Video-T2V#8; "
    "efficiencies assumed",
    "rtx-4090": "NVIDIA Ada white paper, waredb.com/processor/nvidia-geforce-rtx-4090; memory: 23.5 to 23.7 GiB in "
    "error messages; efficiencies assumed",
    "mi300x": f"AMD MI300X data sheet, {_BOOK}, alpharomercoma/MI300X-vs-H200; memory: 191.7 to 192.0 GiB in error "
    "messages; attention assumed",
}


def _gpu(
    name: str,
    gib: float,
    tflops: tuple[float, float, float],
    gbytes: float,
    link: str,
    torch_names: tuple[str, ...],
    matmul: float,
    attention: float,
) -> Device:
    """``tflops``: of bfloat16 with float32 sums, of TF32, and of float32, which torch uses for float32 by default."""
    peak = dict(zip(("bfloat16", "tf32", "float32"), (t * 1e12 for t in tflops), strict=True))
    memory, inside = int(gib * _GIB), LINKS[link]
    return Device(name, memory, peak, gbytes * 1e9, inside, _SOURCES[name], torch_names, matmul, attention)


# GiB are what torch.cuda.mem_get_info reports as the total: the data sheet's GB less what driver and ECC keep.
# Matrix products of the best shapes reach 87 % of an A100's peak, 80 % of an H100's, 78 % of a B200's and 51 to 60 % of
# an MI300X's (stas00/ml-engineering); those of a step are taken to reach somewhat less.
# Attention is FlashAttention-2's: 50 to 73 % on an A100 (arXiv 2307.08691), 35 % on an H100 (arXiv 2407.08608).
DEVICES = {
    device.name: device
    for device in (
        _gpu("a100-40gb", 39.4, (312, 156, 19.5), 1555, "nvlink3", ("A100-SXM4-40", "A100-PCIE-40"), 0.8, 0.6),
        _gpu("a100-80gb", 79.1, (312, 156, 19.5), 2039, "nvlink3", ("A100",), 0.8, 0.6),
        _gpu("a100-pcie-80gb", 79.1, (312, 156, 19.5), 1935, "pcie4", ("A100 80GB PCIe",), 0.8, 0.6),
        _gpu("a800-80gb", 79.1, (312, 156, 19.5), 2039, "nvlink-400", ("A800",), 0.8, 0.6),
        _gpu("h100-pcie-80gb", 79.1, (756, 378, 51), 2000, "nvlink4-bridge", ("H100 PCIe",), 0.6, 0.35),
        _gpu("h100-nvl-94gb", 93.0, (835, 417, 60), 3900, "nvlink4-bridge", ("H100 NVL",), 0.6, 0.35),
        _gpu("gh200-96gb", 94.5, (989, 494, 67), 4000, "nvlink4", ("GH200",), 0.7, 0.35),
        _gpu("h100-80gb", 79.1, (989, 494, 67), 3350, "nvlink4", ("H100",), 0.7, 0.35),
        _gpu("h800-80gb", 79.1, (989, 494, 67), 3350, "nvlink-400", ("H800",), 0.7, 0.35),
        _gpu("h200", 139.7, (989, 494, 67), 4800, "nvlink4", ("H200",), 0.7, 0.35),
        _gpu("gb200", 184.3, (2500, 1250, 80), 8000, "nvlink5", ("GB200",), 0.7, 0.35),
        _gpu("b200", 178.3, (2250, 1125, 75), 7700, "nvlink5", ("B200",), 0.7, 0.35),
        _gpu("l40s", 44.4, (362, 183, 91.6), 864, "pcie4", ("L40S",), 0.7, 0.4),
        _gpu("rtx-4090", 23.5, (165.2, 82.6, 82.6), 1008, "pcie4", ("RTX 4090",), 0.8, 0.6),
        _gpu("mi300x", 191.7, (1307, 654, 163), 5300, "infinity-fabric", ("MI300X",), 0.5, 0.3),
        # One core of a server: two 256-bit multiply-adds a cycle at 3 GHz; bfloat16 without instructions of its own.
        Device(
            "cpu",
            4 * _GIB,
            {"bfloat16": 48e9, "float32": 96e9},
            10e9,
            LINKS["loopback"],
            "assumed of one core and its part of the memory; measured by --calibrate",
            asynchronous=False,
        ),
    )
}
ACROSS = "infiniband-ndr"  # what joins nodes, where nothing else is said


def device_named(name: str) -> Device:
    """The device of the table; ConfigError for another name, with the nearest."""
    if name.lower() not in DEVICES:
        raise ConfigError(f"device={name!r} is not known; {nearest_name(name, DEVICES)}.")
    return DEVICES[name.lower()]


def device_in_torch(name: str) -> Device | None:
    """The device that torch calls ``name``: of those whose names fit, the one with the longest."""
    fitting = [(len(part), device) for device in DEVICES.values() for part in device.torch_names if part in name]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def network_of(device: Device, per_node: int = 8, across: Link = LINKS[ACROSS]) -> Network:
    """Nodes of ``per_node`` such devices, joined by ``across``."""
    return Network(device.inside, across, per_node)
