"""``python -m megadsl``."""

from megadsl.cli import main

if __name__ == "__main__":
    main()
