"""Let the trainer try the torch that is here: on the path of gpu.py's jobs where it is older than the trainer needs."""

from fsdp_jobs.config import torch_version

torch_version._FSDP = (2, 9)
