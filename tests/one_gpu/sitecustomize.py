"""Lets the processes of a launch share one GPU: with this folder on PYTHONPATH, each takes the first it sees.

NCCL from 2.31 allows it when told to by `NCCL_MULTI_RANK_GPU_ENABLE=1`. What runs is the code for several GPUs; how
long it takes says nothing about several GPUs.
"""

import os

if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and "LOCAL_RANK" in os.environ:
    os.environ["LOCAL_RANK"] = "0"
