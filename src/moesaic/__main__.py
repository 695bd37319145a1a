"""``python -m moesaic`` is the command line."""

from moesaic.cli.main import main

main()
