"""`python -m gradsync`, the same as the command `gradsync`: for `torchrun -m gradsync doctor`."""

from gradsync.cli import main

main()
