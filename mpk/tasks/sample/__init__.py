"""Chooses the next token of each slot of the batch."""
