"""`python -m mpk` is the same as the command `mpk`."""

from mpk.cli import main

main()
