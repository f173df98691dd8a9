import pytest

from data.new_processor import make_processor
from tests.runs import shapes_processor


@pytest.fixture(scope="session")
def processor():
    tokenizer = shapes_processor(None).tokenizer
    return make_processor(tokenizer, image_size=32, image_seq_len=4, split=True, longest_edge=64)
