"""The HTTP door: routes over the table of operations, on uvicorn's connection class."""
