"""The first part of sampling, for logits that ranks have put together (GPU targets)."""
