"""The autotuner: which schedule of a model is fastest on this machine, found by measuring."""
