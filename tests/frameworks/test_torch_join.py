"""Results over different keys, joined into one."""

import anyflash as af
import pytest
import torch
from anyflash import _core
from anyflash.torch import attention as alone

pytestmark = pytest.mark.of_the_cpu


def check_join(device):
    """Results over some keys, joined: those over all keys, whatever the types and strides, and rows that see nothing."""
    generator = torch.Generator().manual_seed(0)
    for kind, into, tolerance in (
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-5),
        (torch.float16, torch.float16, 2e-3),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.bfloat16, torch.float32, 1e-2),
    ):
        for shape, channels, layout in (
            ((37,), 128, "bshd"),
            ((37,), 72, "bhsd"),  # 9 times 16 bytes
            ((11,), 256, "bhsd"),
            ((5, 9), 20, "bhsd"),
            ((3, 4, 5), 7, "bhds"),
            ((40,), 1, "bhsd"),
        ):
            q, k, v = (torch.randn(2, 3, *shape, channels, generator=generator, dtype=torch.float64) for _ in range(3))
            q, k, v = (x.to(device, kind) for x in (10 * q, k, v))
            if layout == "bshd":
                q = q.movedim(1, -2).contiguous().movedim(-2, 1)
            if layout == "bhds":
                q = q.movedim(-1, 2).contiguous().movedim(2, -1)
            cut = shape[0] // 3
            some = af.causal() if len(shape) == 1 else af.local(2)  # rows that see no key of one part, or of the other
            parts = [
                alone(
                    q,
                    k[:, :, at],
                    v[:, :, at],
                    rule=_core.rule_part(some, shape, shape, ((0, shape[0]),), pieces, None),
                    return_lse="lm",
                )
                for at, pieces in ((slice(0, cut), ((0, cut),)), (slice(cut, None), ((cut, shape[0] - cut),)))
            ]
            expected = alone(q, k, v, rule=some, return_lse="lm")
            for first, second in ((0, 1), (1, 0)):
                out, row_sum, row_max = (x.clone() for x in parts[first])
                out = out.to(into)
                stream = torch.cuda.current_stream().cuda_stream if device != "cpu" else 0
                _core.torch_join(out, row_sum, row_max, *parts[second], stream, 1)
                for ours, theirs in zip((out, row_sum, row_max), expected):
                    torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def check_nan(device):
    """A sum that is NaN has seen keys, also if its maximum is -inf. The joined maximum is that of one call: NaN, but
    infinity where a score is."""
    stream = torch.cuda.current_stream().cuda_stream if device != "cpu" else 0
    for of_part in (False, True):
        for number, other, joined in (
            (-torch.inf, 1, torch.nan),
            (torch.nan, 1, torch.nan),
            (torch.inf, 1, torch.inf),
            (torch.nan, torch.inf, torch.inf),
        ):
            results = [[torch.ones(1, 1, 2, 8, device=device), *torch.ones(2, 1, 1, 2, device=device)] for _ in "ab"]
            results[not of_part][2][..., 0] = other
            _, row_sum, row_max = results[of_part]
            row_sum[..., 0], row_max[..., 0] = torch.nan, number
            _core.torch_join(*results[0], *results[1], stream, 1)
            out, row_sum, row_max = results[0]
            assert out.isnan().all(3).tolist() == row_sum.isnan().tolist() == [[[True, False]]]
            torch.testing.assert_close(row_max.flatten().tolist(), [joined, 1.0], equal_nan=True)


def test_join():
    check_join("cpu")
    check_nan("cpu")


PLACES = "row_sum: strides (4, 4, 0) for shape (1, 1, 4), expected a place of its own for each element"


def test_join_refuses():
    out, rows = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4)
    for message, into, part in (
        ("row_sum: shape (1, 1, 3), expected (1, 1, 4)", (out, rows[:, :, :3], rows), (out, rows, rows)),
        ("out: shape (1, 1, 4, 4), expected (1, 1, 4, 8)", (out[..., :4], rows, rows), (out, rows, rows)),
        ("out: type float64, expected float32 as in part", (out.double(), rows, rows), (out, rows, rows)),
        ("row_max: type float64, expected float32", (out, rows, rows.double()), (out, rows, rows)),
        (PLACES, (out, rows[:, :, :1].expand(1, 1, 4), rows), (out, rows, rows)),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            _core.torch_join(*into, *part, 0, 1)
        assert str(error.value) == message
