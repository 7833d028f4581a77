"""PyTorch is not among the tests' requirements: its tests are collected where somebody has installed it."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["test_python_torch.py"]
