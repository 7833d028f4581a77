"""What needs two GPUs, or a Hopper GPU, is collected only where they are; scripts/test --gpu says where two are not."""

import torch

collect_ignore = [] if torch.cuda.device_count() > 1 else ["test_two_gpus.py"]
if torch.cuda.get_device_capability() != (9, 0):
    collect_ignore.append("test_kernel_table.py")
