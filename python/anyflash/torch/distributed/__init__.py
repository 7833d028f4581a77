"""Exact attention on a sequence that is split over the processes of a torch.distributed group, under any rule.

    from anyflash.torch.distributed import attention, plan_sharding
    sharding = plan_sharding(rule, tokens)
    q, k, v = (sharding.shard(x, dim=2) for x in (q, k, v))
    out = attention(q, k, v, rule=rule, sharding=sharding)

A process gets only those keys and values of others that its queries see, or all entries of some heads where that moves
fewer bytes. The group is gloo's on CPUs and NCCL's on GPUs.
"""

from ._attention import attention
from ._planner import plan_sharding
from ._sharding import Sharding

__all__ = ["Sharding", "attention", "plan_sharding"]
