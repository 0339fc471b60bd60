"""A process that ends between two frames, and how far two trainings ended apart."""


class Killed(Exception):
    """Stands for a process that ends between two frames."""


class Killer:
    """Ends the session when a frame of a step passes the link; of one party where it is named."""

    def __init__(self, step, direction="down", party=None):
        self.step, self.direction, self.party = step, direction, party

    def __call__(self, party, direction, frame):
        if (frame.step, direction) == (self.step, self.direction) and self.party in (None, party):
            raise Killed


def weights_apart(one, two):
    """The largest difference of any weight of any party."""
    return max(
        float((one[party][name] - two[party][name]).abs().max())
        for party in one
        for name in one[party]
    )
