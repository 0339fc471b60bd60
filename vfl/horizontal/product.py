"""Registration of `vfl.horizontal` with the kernel."""

from __future__ import annotations

from vfl.core.products import Mode, Product

PRODUCT = Product(
    commands={"Compare and attack": {"horizontal": "vfl.horizontal.command:horizontal"}},
    modes={"horizontal": Mode("vfl.horizontal.server:run_horizontal", "horizontal.json")},
    client_apps=("vfl.horizontal.party:add_rounds",),
    terms={"horizontal": "vfl.horizontal.settings:HorizontalSettings"},
    files={"horizontal.toml": "vfl.horizontal.settings:HorizontalSettings"},
    ledgers=("vfl.horizontal.ledger:rounds_of",),
)
