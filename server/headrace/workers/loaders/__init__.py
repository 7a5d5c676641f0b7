"""What turns a model's files into a class with the methods of Triton's Python models.

Each module has `load`, which is given the document that the server asks a worker to load a model
with. Beyond numpy they import only what the models that they are for need, and only in `load`.
"""
