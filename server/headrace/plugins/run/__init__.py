"""`headrace run`: the rows of files through a model, restarted where it stopped.

`sources` finds the files, `rows` reads them in blocks whose borders depend on the files alone, and
`scoring` sends blocks through a runner and isolates rows that fail. `journal` appends each finished
block to a log, and `outputs` encodes the same blocks: a killed run reads its log again into a new
encoder, so that its result has the bytes of an undisturbed one.
"""
