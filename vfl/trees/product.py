"""What `vfl.trees` adds to the kernel: nothing yet but its own names."""

from __future__ import annotations

from vfl.core.products import Product

PRODUCT = Product()
