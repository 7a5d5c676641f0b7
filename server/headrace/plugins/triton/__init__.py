"""Triton as a server that this one has load models, starts and watches."""
