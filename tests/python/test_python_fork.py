"""A process that has used anyflash forks: its children compute, and do not wait for threads that they do not have."""

import multiprocessing

import anyflash as af
import numpy as np
import pytest
from python_helpers import numbers, textbook

PATIENCE = 60  # seconds


def attend(seed):
    q, k, v = (numbers(seed + i, 1, 4, 512, 32) for i in range(3))
    out, lse = af.attention(q, k, v, return_lse=True, threads=4)
    return out, lse, af.attention_backward(q, q, k, v, out, lse, threads=4).dk


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_workers_compute_what_their_parent_does():
    expected = [attend(seed) for seed in range(3)]
    q, k, v = (numbers(i, 1, 4, 512, 32) for i in range(3))
    np.testing.assert_allclose(expected[0][0], textbook(q, k, v)[0], atol=2e-6)
    pool = multiprocessing.get_context("fork").Pool(2)
    try:
        results = pool.map_async(attend, range(3)).get(timeout=PATIENCE)
    finally:
        pool.terminate()
    for result, wanted in zip(results, expected, strict=True):
        for array, same in zip(result, wanted, strict=True):
            np.testing.assert_array_equal(array, same)
    np.testing.assert_array_equal(attend(0)[0], expected[0][0])
