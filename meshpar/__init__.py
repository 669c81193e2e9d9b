"""meshpar: an unmodified Hugging Face model on a pp x dp x tp mesh, proved equal to one process."""

from .config import ParallelConfig
from .mesh import init_distributed
from .model import ParallelModel, parallelize_model

__all__ = ["ParallelConfig", "ParallelModel", "init_distributed", "parallelize_model"]
