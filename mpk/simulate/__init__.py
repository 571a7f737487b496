"""Discrete-event simulation of scheduled graphs, and pictures of simulated and measured runs."""
