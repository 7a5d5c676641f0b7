"""The HTTP door: a FastAPI application on uvicorn."""
