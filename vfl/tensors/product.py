"""Registration of `vfl.tensors` with the kernel of vfl."""

from __future__ import annotations

from vfl.core.products import Product

PRODUCT = Product(commands={"Run a party": {"worker": "vfl.tensors.command:worker"}})
