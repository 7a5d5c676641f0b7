"""headrace: an inference server for the KServe Predict-V2 (Open Inference) protocol."""

__version__ = "0.1.0"
