"""A private network for an experiment in which two parties have columns.

The parties are threads, or processes with TLS between each two; the protocols are `vfl.mpc`'s.
"""

from vfl.triple.run import infer_private, predict_private, train_private

__all__ = ["infer_private", "predict_private", "train_private"]
