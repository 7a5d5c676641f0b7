"""The response cache: answers of models whose configuration has `response_cache { enable: true }`.

`keys.py` makes the key of a request, `answers.py` has the answers and the memory that they may
take, `redis.py` keeps them on a Redis server as well, and `flights.py` is the stage of a version:
it answers calls, runs the model once for equal ones, and passes on what it has no answer for.
"""
