"""`python -m dspark_hf` is `dspark-hf`."""

from .cli.app import main

main()
