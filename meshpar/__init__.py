"""meshpar: an unmodified Hugging Face model on a pp x dp x tp mesh, proved equal to one process."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import ParallelConfig
    from .mesh import init_distributed
    from .model import ParallelModel, parallelize_model
    from .nonfinite import find_nonfinite
    from .parity import VerifyReport, verify
    from .planner.job import plan

_HOME = {
    "ParallelConfig": "config",
    "ParallelModel": "model",
    "VerifyReport": "parity",
    "find_nonfinite": "nonfinite",
    "init_distributed": "mesh",
    "parallelize_model": "model",
    "plan": "planner.job",
    "verify": "parity",
}
__all__ = [
    "ParallelConfig",
    "ParallelModel",
    "VerifyReport",
    "find_nonfinite",
    "init_distributed",
    "parallelize_model",
    "plan",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: listing recipes must not wait for torch and transformers."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
