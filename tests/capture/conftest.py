from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tokenizers import Tokenizer

from termrl.capture.render import ChatMLRenderer
from tests.capture.fakes import Client, FakeUpstream, running, small_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return small_tokenizer()


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> ChatMLRenderer:
    return ChatMLRenderer(tokenizer)


@pytest.fixture
def upstream(tokenizer: Tokenizer) -> FakeUpstream:
    return FakeUpstream(tokenizer)


@pytest.fixture
async def client(upstream: FakeUpstream, renderer: ChatMLRenderer) -> AsyncIterator[Client]:
    async with running(upstream, renderer) as client:
        yield client
