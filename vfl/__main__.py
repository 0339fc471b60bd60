"""Program of ``python -m vfl``, the same as the command `vfl`."""

from __future__ import annotations

from vfl.cli import main

if __name__ == "__main__":
    main()
