"""A url is asked for once in a conversation, whatever its scheme."""

from __future__ import annotations

import pytest

from sightline.errors import MediaRefused
from sightline.media import MediaRef, MediaStore, UrlRefCache
from tests.agents import picture

WHERE = "messages[0].content[0].image_url.url"


class Source:
    """Gives a new image for every question, whatever is asked for; refuses what ends in `bad`."""

    def __init__(self, store: MediaStore) -> None:
        self.store = store
        self.asked: list[str] = []

    def resolve(self, url: str, path: str) -> MediaRef:
        self.asked.append(url)
        if url.endswith("bad"):
            raise MediaRefused(f"{path}: no", "send another")
        return self.store.put(picture(len(self.asked)))


URLS = ["data:image/png;base64,x", "media:sha256:0", "file:///a.png", "https://a/b.png", "\ud800"]


def test_conversations_do_not_share_what_an_address_shows(store: MediaStore) -> None:
    source = Source(store)
    one, other = (UrlRefCache(source.resolve, store).resolve(URLS[3], WHERE) for _ in range(2))
    assert one != other


def test_nothing_is_kept_of_a_refusal(store: MediaStore) -> None:
    source = Source(store)
    urls = UrlRefCache(source.resolve, store)
    for _ in range(2):
        with pytest.raises(MediaRefused, match=r"messages\[0\]"):
            urls.resolve("bad", WHERE)
    assert len(source.asked) == 2 and len(urls) == 0
