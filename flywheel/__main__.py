"""`python -m flywheel` is the command line."""

from flywheel.cli import main

main()
