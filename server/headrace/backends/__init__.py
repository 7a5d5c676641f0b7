"""Floor 2: what computes. A backend turns a model's files into something that runs."""
