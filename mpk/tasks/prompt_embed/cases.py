"""Tested against numpy in tests/test_cuda_prompt_kinds.py and tests/test_cuda_prompt_linear.py: it has device code for GPUs only."""

CASES = ()
