"""Closes a step and plans the next one."""
