"""``python -m kvsieve``: the same as the ``kvsieve`` command."""

from kvsieve.cli import main

if __name__ == "__main__":
    main()
