"""What `vfl.trees` adds to the kernel."""

from __future__ import annotations

from vfl.core.products import Product

PRODUCT = Product(members={"vfl.secure": {"trees": "vfl.trees.mode:Trees"}})
