"""Frames, sockets, shared memory and elements: what processes of one server speak with each other.

Engine, workers and front ends use it, and workers may run on another interpreter than the server:
the standard library and numpy suffice.
"""
