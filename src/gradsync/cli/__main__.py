"""`python -m gradsync.cli`, the same as the command `gradsync`."""

from gradsync.cli import main

main()
