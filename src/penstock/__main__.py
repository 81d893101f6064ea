"""`python -m penstock` is the command `penstock`."""

from penstock.use.cli import main

main()
