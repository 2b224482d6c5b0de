"""``python -m weightwire``: the command line."""

from weightwire.cli import main

if __name__ == "__main__":
    main()
