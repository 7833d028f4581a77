"""anyflash for TensorFlow: ops of its own, differentiable, eagerly, in tf.function and in saved models.

    from anyflash.tensorflow import local_2d
    out = local_2d(Q, K, V, window_size=7, log2_stride_size=0, is_causal=False, sync_mode="none_front")

full_1d to local_2d take channels before the sequence, and any batch shape before both. attention takes the arguments of
anyflash.attention. It needs TensorFlow 2.15 or newer; no version is linked. Import this package before you load a saved
model that contains these ops.
"""

from . import _flops  # noqa: F401 - registers its statistic
from ._attention import attention
from ._functions import causal_1d, causal_2d, full_1d, full_2d, local_1d, local_2d

__all__ = ["attention", "causal_1d", "causal_2d", "full_1d", "full_2d", "local_1d", "local_2d"]
