"""Payload capture: requests and responses of some calls, in files that can be replayed.

`opening` puts the parts together: `stage` chooses calls and copies their payloads on the event
loop, `records` converts them to documents and back, `files` writes those on a thread.
"""
