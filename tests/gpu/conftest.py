"""What needs two GPUs is collected only where they are; scripts/test --gpu says where they are not."""

import torch

collect_ignore = [] if torch.cuda.device_count() > 1 else ["test_two_gpus.py"]
