"""Certificates that were made a while ago."""

from datetime import UTC, datetime, timedelta

import pytest


def made_ago(ago, make):
    """What `make` gives, with certificates as if it had been called so many days ago."""

    def then(days):
        return datetime.now(UTC) + timedelta(days=days - ago)

    with pytest.MonkeyPatch.context() as past:
        past.setattr("vfl.transport.certificates._after", then)
        return make()
