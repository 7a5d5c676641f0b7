"""Padding to buckets: requests of different lengths share batches of a few shapes.

`configuration.py` reads the parameter, `decisions.py` decides on buckets, pads and cuts, over
values, and `stage.py` does so for the calls of a version.
"""

from headrace.plugins.padding.stage import BucketPadding

__all__ = ["BucketPadding"]
