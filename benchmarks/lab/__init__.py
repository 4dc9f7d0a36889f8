"""canvax beside PyTorch diffusers: same weights, same inputs, same work.

Every contender is a process of its own (:mod:`benchmarks.lab.worker`), so that each has its own peak memory and none
has to be importable here. They take turns, so that a drift of the machine hits all alike, and their outputs are
compared before anything is timed.
"""
