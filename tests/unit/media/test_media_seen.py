"""A url is asked for once in a conversation, whatever its scheme."""

from __future__ import annotations

import threading

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


def test_a_url_that_comes_again_is_known_by_its_text(store: MediaStore) -> None:
    source = Source(store)
    urls = UrlRefCache(source.resolve, store)
    first = [urls.resolve(url, WHERE) for url in URLS]
    assert [urls.resolve(url, WHERE) for url in URLS] == first
    assert source.asked == URLS and len(urls) == len(URLS)


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


def test_an_image_that_was_swept_is_asked_for_again(store: MediaStore) -> None:
    source = Source(store)
    urls = UrlRefCache(source.resolve, store)
    gone = urls.resolve(URLS[3], WHERE)
    store.path(gone.digest).unlink()
    again = urls.resolve(URLS[3], WHERE)
    assert again != gone and store.has(again) and urls.resolve(URLS[3], WHERE) == again


def test_requests_that_bring_a_url_at_the_same_time_agree(store: MediaStore) -> None:
    both_asked = threading.Barrier(2, timeout=30)
    source = Source(store)

    def slow(url: str, path: str) -> MediaRef:
        both_asked.wait()
        return source.resolve(url, path)

    urls, found = UrlRefCache(slow, store), list[MediaRef]()
    threads = [
        threading.Thread(target=lambda: found.append(urls.resolve(URLS[3], WHERE)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(source.asked) == 2 and found[0] == found[1]
