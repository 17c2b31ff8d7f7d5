"""``python -m termrl`` is the same as the ``termrl`` command."""

from termrl.cli import main

if __name__ == "__main__":
    main()
