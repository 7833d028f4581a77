"""A stream that sleeps while calls are queued: whoever waits for it is found out."""

import time

import torch


def nobody_waits(calls, like):
    """What calls() gives while the stream sleeps; it has to be asleep still when all is queued. like() is as much work
    and is done before, twice: kernels are loaded then, memory is at hand, and the sleep is three times as long."""
    for _ in range(2):
        begin = time.perf_counter()
        like()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    torch.cuda._sleep(int(2e9 * max(0.3, 3 * seconds)))  # clock cycles: 2e9 take a second or more
    awake = torch.cuda.Event()
    awake.record()
    results = calls()
    assert not awake.query()
    return results
