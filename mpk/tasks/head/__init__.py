"""The product that makes the logits, and the first part of sampling (GPU targets)."""
