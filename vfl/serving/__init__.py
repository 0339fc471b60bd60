"""The label party's HTTP service over a session that stays open; see docs/serving.md."""
