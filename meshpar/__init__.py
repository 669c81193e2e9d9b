"""meshpar: an unmodified Hugging Face model on a pp x dp x tp mesh, proved equal to one process."""

from .config import ParallelConfig
from .mesh import init_distributed
from .model import ParallelModel, parallelize_model
from .verify import VerifyReport, verify

__all__ = ["ParallelConfig", "ParallelModel", "VerifyReport", "init_distributed", "parallelize_model", "verify"]
